"""Checks of answers: documents, refusals, ranges. What is no answer of a hapi-server ends here."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from typing import Any, TypeVar

from hapi.errors import (
    BadRequestError,
    BusyError,
    ForbiddenError,
    ForeignAnswerError,
    HapiError,
    TooLargeError,
    TransportError,
    UnauthorizedError,
    UsageError,
    from_problem,
)
from hapi.text import printable
from hapi.waiting import moved
from hapi.wire.documents import parse_document

T = TypeVar("T")

MAX_DOCUMENT_BYTES = 32 << 20
"""Largest JSON answer (descriptions of models with many layers) that a client reads."""
MAX_PROBLEM_BYTES = 1 << 16
"""Largest description of an error that a client reads."""
_OF_PROXIES = (BusyError, ForbiddenError, TooLargeError, UnauthorizedError)
"""Refusals that mean the same whoever gives them."""
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,20})-([0-9]{1,20})/([0-9]{1,20}|\*)", re.ASCII)


def read_document(response: http.client.HTTPResponse, url: str) -> Any:
    """The JSON answer; :class:`ForeignAnswerError` for anything else."""
    body = response.read(MAX_DOCUMENT_BYTES + 1)
    missing = response.length if len(body) <= MAX_DOCUMENT_BYTES else 0
    if missing or (missing is None and not body):  # read() with a limit says nothing of an early end
        raise http.client.IncompleteRead(body, missing)
    return parsed_answer(body, url)


def parsed_answer(body: bytes, url: str) -> Any:
    """Return the document in ``body``; :class:`ForeignAnswerError` for anything else."""
    try:
        if len(body) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"longer than {MAX_DOCUMENT_BYTES} bytes")
        return parse_document(body)
    except ValueError as error:
        reason = printable(str(error))
        raise ForeignAnswerError(
            f"{url}: the answer is not JSON ({reason}); is this a hapi-server?"
        ) from None


def understood(answer: Any, read: Callable[[Any], T], url: str) -> T:
    """Return ``read(answer)``; :class:`ForeignAnswerError` with the URL where the document has not the agreed form."""
    try:
        return read(answer)
    except UsageError:
        raise
    except BadRequestError as error:
        raise ForeignAnswerError(f"{url}: {error}; is this a hapi-server, of a version that fits?") from None


def check_plain(response: http.client.HTTPResponse, url: str) -> None:
    """:class:`ForeignAnswerError` for an answer that would first have to be decompressed, to any size."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ForeignAnswerError(
            f"{url}: answered in the encoding {printable(encoding, 40)!r}, which was not asked for; does a proxy "
            "compress answers? Switch that off for it"
        )


def refusal(response: http.client.HTTPResponse, url: str) -> HapiError:
    """The error that an answer other than 200 stands for, whoever gave it."""
    status = response.status
    if 300 <= status < 400:
        target = printable(response.headers.get("Location") or "nowhere")
        return UsageError(f"{url}: redirected to {target}, which is not followed; give the final server URL")
    body = response.read(MAX_PROBLEM_BYTES + 1)
    try:
        problem = parse_document(body) if len(body) <= MAX_PROBLEM_BYTES else None
    except ValueError:
        problem = None
    error = from_problem(problem, status)
    retry_after = error.retry_after
    if retry_after is None:
        retry_after = _seconds(response.headers.get("Retry-After"))
    kind, message = type(error), str(error)
    if not isinstance(problem, dict) or not isinstance(problem.get("detail"), str):
        # A proxy, which may have a bad moment, or something else altogether.
        message = f"{url}: answered {status} {printable(response.reason)}; is this a hapi-server?"
        if status == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            message += " A proxy before one has to let requests of 1 MiB pass; or lower --request-size"
        if status >= 500 or status == http.HTTPStatus.REQUEST_TIMEOUT:  # 408: the link was slow for a moment
            kind = TransportError
        elif kind not in _OF_PROXIES:
            kind = ForeignAnswerError
    return kind(message, retry_after=retry_after, expected_wait=error.expected_wait)


def _seconds(text: str | None) -> float | None:
    """Retry-After's seconds (RFC 9110, 10.2.3); its other form, a date, is not worth trusting two clocks."""
    text = (text or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def check_range(response: http.client.HTTPResponse, start: int, stop: int, url: str) -> None:
    """Raise :class:`BadRequestError` unless ``response`` brings just the bytes ``start..stop`` (excluded)."""
    given = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(given)
    if match is None or (int(match[1]), int(match[2])) != (start, stop - 1):
        raise BadRequestError(
            f"{url}: the bytes {start}-{stop - 1} were asked for, {printable(given, 60) or 'none'} came; is this a "
            "hapi-server?"
        )
    if response.length != stop - start:
        raise BadRequestError(f"{url}: {response.length} bytes are announced for a range of {stop - start}")


def receive_into(response: http.client.HTTPResponse, out: memoryview) -> None:
    """Fill ``out`` with the next bytes of the answer, straight from its socket."""
    view = out.cast("B")
    while view:
        count = response.readinto(view)
        if not count:
            raise http.client.IncompleteRead(b"", view.nbytes)
        moved()
        view = view[count:]
