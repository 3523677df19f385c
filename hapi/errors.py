"""The one exception tree of Hapi, and its form on the wire (problem details, RFC 9457).

Foreign errors (sockets, the object store, torch) are mapped to these at the border of the room that
meets them. A message names what was wrong, where, and what to do about it, on one line of printable text
(see ``hapi/text.py``), so that names from a store or a server cannot steer a terminal.

>>> import hapi
>>> try:
...     hapi.open_dataset("store/flowers")
... except hapi.errors.NotFoundError as error:
...     print("not there")
not there
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from hapi.text import MESSAGE_CHARACTERS, printable

PROBLEM_MEDIA_TYPE = "application/problem+json"
URN = "urn:hapi:problem:"
_LONGEST_SECONDS = 1e9
"""Largest number of seconds (31 years) that is believed when the other side names one."""
_GATEWAY = (502, 503, 504)
"""What a proxy answers by itself while it cannot reach a server: no word of Hapi's on its store or its queue."""


class HapiError(Exception):
    """Base of every error that Hapi raises on purpose.

    ``status`` is the HTTP status that carries it on the wire, ``slug`` its stable name there,
    ``retryable`` whether the same request may succeed later or on another server.

    >>> import hapi
    >>> try:
    ...     hapi.pack("no-such-folder", "store/flowers")
    ... except hapi.HapiError as error:
    ...     print(type(error).__name__, error.retryable)
    UsageError False
    """

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    retryable: ClassVar[bool] = False
    on_wire: ClassVar[bool] = True
    """Whether a server may say it: what ends this process in a way of its own, only this process says."""

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        expected_wait: float | None = None,
        outside: str | None = None,
    ) -> None:
        super().__init__(printable(" ".join(message.split()), MESSAGE_CHARACTERS))
        self.retry_after = retry_after
        """Seconds to wait before trying again, when the sender knows them."""
        self.expected_wait = expected_wait
        """Seconds that the request would wait in the queue if it were in it, when the sender knows them."""
        self.outside = outside
        """Message for a client that must not learn what else lies in the store, where ``message`` tells it."""
        self.request_id: str | None = None

    def about_request(self, request_id: str) -> None:
        """Name the request in the message, once: the other tier's log has the same id."""
        if self.request_id is None:
            self.request_id = request_id
            self.args = (printable(f"{self} (request {printable(request_id)})", MESSAGE_CHARACTERS),)

    def to_problem(self) -> dict[str, Any]:
        """The problem-details document (RFC 9457, section 3) of this error."""
        problem: dict[str, Any] = {
            "type": URN + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": str(self),
        }
        for name, seconds in (("retry_after", self.retry_after), ("expected_wait", self.expected_wait)):
            if seconds is not None:
                problem[name] = seconds
        return problem


class BadRequestError(HapiError):
    """A request or document that does not have the agreed form."""

    status, slug, title = 400, "bad-request", "Bad request"


class UsageError(BadRequestError):
    """A person asked for something that cannot be: a wrong flag, name, value or combination."""

    slug, title = "usage", "Wrong usage"


class ConfigError(UsageError):
    """A configuration file with an unknown key, a wrong type or value. Names file and line."""

    slug, title = "config", "Wrong configuration"


class UnauthorizedError(HapiError):
    """The bearer token is missing or wrong."""

    status, slug, title = 401, "unauthorized", "Unauthorized"


class ForbiddenError(HapiError):
    """A request that came by a name, or from a page, that this server does not answer to."""

    status, slug, title = 403, "forbidden", "Forbidden"


class NotFoundError(HapiError):
    """A data set, model, sample or object that does not exist. The message names what does."""

    status, slug, title = 404, "not-found", "Not found"


class ConflictError(HapiError):
    """The named thing exists in another version or with other content than the request expects."""

    status, slug, title = 409, "conflict", "Conflict"


class TooLargeError(HapiError):
    """A request or answer beyond the size limits, refused before anything is allocated."""

    status, slug, title = 413, "too-large", "Too large"


class UnprocessableError(HapiError):
    """A well-formed request that cannot be carried out: a split out of range, a wrong shape."""

    status, slug, title = 422, "unprocessable", "Unprocessable"


class ModelError(UnprocessableError):
    """A model that cannot be built, traced, split or loaded as asked."""

    slug, title = "model", "Model cannot be used so"


class ModelChoiceError(ModelError):
    """A person chose of a model what there is not: an architecture, factory, weights or blocks of that name."""

    slug, title = "model-choice", "No such choice of a model"


class WeightsAbsentError(ModelError):
    """A library has no such weights, or they are neither in its cache nor can they be fetched."""

    slug, title = "weights-absent", "Weights are not to be had"


class BusyError(HapiError):
    """The queue is full, or would not come to the request in time; ``retry_after`` says when to come back."""

    status, slug, title, retryable = 429, "busy", "Too many requests", True


class DeadlineError(HapiError):
    """The request waited until its client's deadline; it was not begun."""

    status, slug, title, retryable = 504, "deadline", "Deadline passed in the queue", True


class StoreError(HapiError):
    """The object store did not answer, refused, or returned something else than asked for."""

    status, slug, title, retryable = 502, "store", "Object store failed", True


class StoreUnavailableError(StoreError):
    """The object store is out of reach or overloaded for now."""

    slug, title = "store-unavailable", "Object store out of reach"


class DataError(HapiError):
    """Stored data that is damaged or cannot be decoded. Names data set, shard and sample."""

    status, slug, title = 500, "data", "Damaged data"


class DrainingError(HapiError):
    """The server is shutting down and takes no new work."""

    status, slug, title, retryable = 503, "draining", "Server is draining", True


class HostMemoryError(HapiError):
    """The server's machine had no memory for the work just now; the batch was halved as far as it goes."""

    status, slug, title, retryable = 503, "host-memory", "Out of memory", True


class StuckError(HapiError):
    """The server takes work, but what it has does not move: ``/readyz`` says so."""

    status, slug, title, retryable = 503, "stuck", "Server is stuck", True


class DeviceMemoryError(HapiError):
    """The work does not fit the device, not even with a batch of one."""

    status, slug, title = 507, "device-memory", "Does not fit the device"


class HostBudgetError(DeviceMemoryError):
    """The work does not fit what the server may take of its machine's memory, not even sample by sample."""

    slug, title = "host-budget", "Does not fit the server's memory"


class DivergedError(HapiError):
    """Training has left the finite numbers at step ``batch`` of ``epoch``; what it is now is not worth keeping."""

    slug, title, on_wire = "diverged", "Training has diverged", False

    def __init__(
        self,
        message: str,
        *,
        epoch: int = 0,
        batch: int = 0,
        retry_after: float | None = None,
        expected_wait: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, expected_wait=expected_wait)
        self.epoch, self.batch = epoch, batch


class WireError(HapiError):
    """Bytes from the other tier that break the frame format, or fail their checksum."""

    status, slug, title, retryable = 502, "wire", "Broken frame", True


class TransportError(HapiError):
    """The other tier could not be reached, or the connection broke."""

    status, slug, title, retryable = 503, "transport", "Connection failed", True


class ShortageError(TransportError):
    """The server is short of file descriptors, buffers, threads or connections for now."""

    slug, title = "shortage", "Server is short of resources"


SHORT_OF: Mapping[int, str] = {
    errno.EMFILE: "file descriptors (raise the limit of open files)",
    errno.ENFILE: "file descriptors of the whole system",
    errno.ENOBUFS: "network buffers",
    errno.ENOMEM: "memory",
}
"""Errors of the system that pass by themselves, and what there is too little of."""
_TEXTS = {os.strerror(number): what for number, what in SHORT_OF.items()}
"""The same in the words of libraries that keep no numbers."""


def shortage(error: BaseException) -> ShortageError | None:
    """The error for what the system cannot give for now.

    None when ``error`` is no such thing, and was not raised because of one either: whoever maps what a library raises
    (weights that are not there, a shard that cannot be read) need not tell it from all else.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        what = SHORT_OF.get(behind.errno or 0) if isinstance(behind, OSError) else None
        if what is None and isinstance(behind, OSError | RuntimeError):
            what = next((what for text, what in _TEXTS.items() if text in str(behind)), None)
        if what is not None:
            return ShortageError(f"short of {what} for now; come back in 1 s", retry_after=1.0)
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def by_slug(root: type[HapiError] = HapiError) -> dict[str, type[HapiError]]:
    """All kinds of errors from ``root`` down, by the name that each has on the wire."""
    found = {root.slug: root} if root.on_wire else {}
    for child in root.__subclasses__():
        found.update(by_slug(child))
    return found


def from_problem(problem: Any, status: int) -> HapiError:
    """The exception that a problem-details document stands for.

    ``problem`` comes from the network and may be anything; what is not understood becomes the error
    that fits ``status`` best, with a message that says so.
    """
    kinds = by_slug()
    if not isinstance(problem, dict):
        problem = {}
    kind = str(problem.get("type", "")).removeprefix(URN)
    cls = kinds.get(kind)
    if cls is None:
        by_status = {c.status: c for c in reversed(kinds.values())}
        by_status |= dict.fromkeys(_GATEWAY, TransportError)
        cls = by_status.get(status, TransportError if status >= 500 else BadRequestError)
    detail = problem.get("detail")
    message = detail[:2000] if isinstance(detail, str) and detail else f"the server answered {status}"
    return cls(
        message,
        retry_after=_seconds(problem.get("retry_after")),
        expected_wait=_seconds(problem.get("expected_wait")),
    )


def _seconds(value: Any) -> float | None:
    """``value`` if it can be a number of seconds; None for anything else, endless and negative ones too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_SECONDS:
        return None
    return float(value)
