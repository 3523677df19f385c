"""Errors as HTTP answers: every error becomes problem details (RFC 9457) at this border."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

from aiohttp import web

from hapi.errors import (
    PROBLEM_MEDIA_TYPE,
    BadRequestError,
    DeviceMemoryError,
    HapiError,
    HostMemoryError,
    NotFoundError,
    RangeError,
    ShortageError,
    TooLargeError,
    shortage,
)
from hapi.process.memory_errors import was_for_memory
from hapi.server.device.host_memory import out_of_memory
from hapi.wire import messages

SERVER_NAME = "hapi"
"""Value of the header ``Server`` in answers: no versions, which would help attackers."""
_SHORT = (DeviceMemoryError, HostMemoryError, ShortageError)


class HttpError(BadRequestError):
    """A refusal of the HTTP library (405 and the like), with its own status."""

    slug = "http"

    def __init__(self, error: web.HTTPException) -> None:
        self.allow = error.headers.get("Allow")
        allowed = f"; allowed here: {self.allow}" if self.allow else ""
        super().__init__(f"{error.status} {HTTPStatus(error.status).phrase}{allowed}")
        self.status = error.status  # type: ignore[misc]  # of this one, where the class has a usual one


def as_hapi_error(error: Exception) -> HapiError:
    """Return the Hapi error for a foreign one; a plain :class:`HapiError` for an unexpected one.

    An error caused by lack of memory is a :class:`HostMemoryError`, whatever it was mapped to, and one caused
    by lack of descriptors or buffers a :class:`ShortageError`.
    """
    if isinstance(error, _SHORT):
        return error
    if was_for_memory(error):
        return out_of_memory()
    if (short_of := shortage(error)) is not None:
        return short_of
    if isinstance(error, HapiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return body_too_large()
    if isinstance(error, web.HTTPNotFound):
        return NotFoundError("no such path; see /v1/datasets and /v1/models")
    if isinstance(error, web.HTTPException):
        return HttpError(error)
    if isinstance(error, web.RequestPayloadError):
        # The parser's own words quote what it could not read.
        return BadRequestError(f"the request's body broke off ({type(error.__cause__ or error).__name__})")
    if isinstance(error, TimeoutError):
        return BadRequestError("the request took too long to arrive or to be read")
    return HapiError("internal error; the server's log says more")


def body_too_large() -> TooLargeError:
    """Return the error for a request body beyond the limit."""
    return TooLargeError(
        f"request body exceeds {messages.MAX_REQUEST_BYTES} bytes; send fewer samples per request"
    )


def problem_response(problem: HapiError) -> web.Response:
    """Return the answer that carries ``problem``."""
    headers = {"Server": SERVER_NAME}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after)))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(problem, HttpError) and problem.allow:
        headers["Allow"] = problem.allow
    if isinstance(problem, RangeError) and problem.size is not None:
        headers["Content-Range"] = f"bytes */{problem.size}"
    return web.Response(
        text=json.dumps(problem.to_problem()),
        status=problem.status,
        content_type=PROBLEM_MEDIA_TYPE,
        headers=headers,
    )
