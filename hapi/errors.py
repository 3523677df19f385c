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
"""Statuses that a proxy answers by itself while it cannot reach a server. They say nothing about store or
queue.
"""


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
    """True when a server may send it. An error that ends only this process is never sent."""

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

    def about_server(self, url: str) -> None:
        """Name the server at ``url`` in the message, once: of several, one may have another store."""
        if url not in str(self):
            self.args = (printable(f"{url}: {self}", MESSAGE_CHARACTERS),)

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


class ForeignAnswerError(BadRequestError):
    """An answer that no hapi-server gives, or none of a version that fits; another server of several may be right."""

    slug, title, on_wire = "foreign-answer", "Not the answer of a hapi-server", False


class UsageError(BadRequestError):
    """A person asked for something impossible: a wrong flag, name, value or combination."""

    slug, title = "usage", "Wrong usage"


class ConfigError(UsageError):
    """A configuration file with an unknown key, a wrong type or value. Names file and line."""

    slug, title = "config", "Wrong configuration"


class UnauthorizedError(HapiError):
    """The bearer token is missing or wrong."""

    status, slug, title = 401, "unauthorized", "Unauthorized"


class ForbiddenError(HapiError):
    """A request under a host name, or from a web page, that this server does not serve."""

    status, slug, title = 403, "forbidden", "Forbidden"


class NotFoundError(HapiError):
    """A dataset, model, sample or object that does not exist. The message names those that do."""

    status, slug, title = 404, "not-found", "Not found"


class ConflictError(HapiError):
    """The named thing exists in another version or with other content than the request expects."""

    status, slug, title = 409, "conflict", "Conflict"


class TooLargeError(HapiError):
    """A request or answer beyond the size limits, refused before anything is allocated."""

    status, slug, title = 413, "too-large", "Too large"


class RangeError(HapiError):
    """The asked range has no byte of the object, or several ranges were asked for."""

    status, slug, title = 416, "range", "No such range"
    size: int | None = None
    """Bytes of the object, for the answer's header; None where they are not known."""


class UnprocessableError(HapiError):
    """A well-formed request that cannot be carried out: a split out of range, a wrong shape."""

    status, slug, title = 422, "unprocessable", "Unprocessable"


class ModelError(UnprocessableError):
    """A model that cannot be built, traced, split or loaded as asked."""

    slug, title = "model", "Unusable model"


class ModelChoiceError(ModelError):
    """An architecture, factory, weights entry or block that the model's library does not have."""

    slug, title = "model-choice", "No such choice of a model"


class WeightsAbsentError(ModelError):
    """Weights that a library does not have, or that are not in its cache and cannot be fetched."""

    slug, title = "weights-absent", "Weights not available"


class BusyError(HapiError):
    """The queue is full, or too long for the request's deadline; ``retry_after`` says when to try again."""

    status, slug, title, retryable = 429, "busy", "Too many requests", True


class DeadlineError(HapiError):
    """The request waited in the queue until its client's deadline. It was never begun."""

    status, slug, title, retryable = 504, "deadline", "Deadline passed in the queue", True


class StoreError(HapiError):
    """The object store did not answer, refused, or returned something unexpected."""

    status, slug, title, retryable = 502, "store", "Object store failed", True


class StoreUnavailableError(StoreError):
    """The object store is out of reach or overloaded for now."""

    slug, title = "store-unavailable", "Object store out of reach"


class NoRoomError(StoreError):
    """The disk of the object store, or its user's share of that disk, is full."""

    slug, title = "no-room", "Object store is full"


class DataError(HapiError):
    """Stored data that is damaged or cannot be decoded. Names dataset, shard and sample."""

    status, slug, title = 500, "data", "Damaged data"


class DrainingError(HapiError):
    """The server is shutting down and takes no new work."""

    status, slug, title, retryable = 503, "draining", "Server is draining", True


class HostMemoryError(HapiError):
    """The server's machine had no memory for the work, not even with the smallest batch; it may have later."""

    status, slug, title, retryable = 503, "host-memory", "Out of memory", True


class StuckError(HapiError):
    """The server accepts work but makes no progress; ``/readyz`` answers 503."""

    status, slug, title, retryable = 503, "stuck", "Server is stuck", True


class DeviceMemoryError(HapiError):
    """The work does not fit the device, not even with a batch of one."""

    status, slug, title = 507, "device-memory", "Does not fit the device"


class HostBudgetError(DeviceMemoryError):
    """The work does not fit the server's budget of host memory, not even sample by sample."""

    slug, title = "host-budget", "Does not fit the server's memory"


class OtherRankError(HapiError):
    """Another process of this training has ended, so this one cannot go on; the other one says why."""

    slug, title, on_wire = "other-rank", "Another rank has ended", False


class DivergedError(HapiError):
    """Training left the finite numbers at step ``batch`` of ``epoch``; its state is not saved."""

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
"""System errors that pass by themselves, with the resource that is short."""
_TEXTS = {os.strerror(number): what for number, what in SHORT_OF.items()}
"""The same shortages in the words of libraries that report no error number."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""System's errors of a disk without room, or of a user's share of it."""


def shortage(error: BaseException) -> ShortageError | None:
    """Return the error for a resource that the system is short of.

    None when ``error`` is not a shortage and was not caused by one. Code that maps a library's errors (absent
    weights, an unreadable shard) calls this first, so that it need not tell shortages apart itself.
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
    """Return all error classes from ``root`` down, by their name on the wire."""
    found = {root.slug: root} if root.on_wire else {}
    for child in root.__subclasses__():
        found.update(by_slug(child))
    return found


def from_problem(problem: Any, status: int) -> HapiError:
    """Return the exception for a problem-details document.

    Args:
        problem: the parsed document. It comes from the network and may be anything. If it is not understood,
            the error that fits ``status`` best is returned, with a message that says so.
        status: the HTTP status of the answer.
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
    """``value`` as a number of seconds; None if it is negative, not finite or no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_SECONDS:
        return None
    return float(value)
