"""Facts that the application keeps beside a request, and kinds of requests and errors."""

from __future__ import annotations

import re
import uuid
from typing import Any

from aiohttp import web

from hapi.errors import BusyError, ForbiddenError, HapiError, ShortageError, TooLargeError, UnauthorizedError
from hapi.server.scheduling.costs import Request
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire import messages
from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest
from hapi.wire.warm_up import WarmUpRequest

REQUEST_ID = web.RequestKey("id", str)
STATUS = web.RequestKey("status", int)
"""Status of a request that did not end with its response's status."""
PROBLEM = web.RequestKey("problem", HapiError)
"""The error that ended it, if one did."""
TENANT = web.RequestKey("tenant", Tenant)
LOGGED = web.RequestKey("logged", dict)
"""Further fields of the request's line in the log."""
BEGAN = web.RequestKey("began", dict)
"""Monotonic seconds at which each of its stages first began."""
_TRACE = re.compile(
    "00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    "|(?!00|ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,200})?",
    re.ASCII,
)
"""Version 0, and later ones, which may have more at the end."""
GONE = 499
"""Logged and counted as the status of a request whose client went away or was too slow (nginx's number)."""

HEALTH = (messages.HEALTH_PATH, messages.READY_PATH)
"""Paths that are answered whoever asks, also when there is no room for another connection."""
OPEN = (*HEALTH, messages.PAGE_PATH)
"""Paths that never need a token: they tell nothing."""
SENT_AWAY = (UnauthorizedError, ForbiddenError)
"""Errors that end the connection too: it has no business here."""
AUDITED = (*SENT_AWAY, BusyError, TooLargeError, ShortageError)
"""Errors whose line in the log has the field ``audit``."""
QUIET = (*OPEN, messages.STATUS_PATH, messages.METRICS_PATH)
"""Paths that are asked for all the time, and logged only with ``--log-level debug``."""


def request_id_of(request: web.Request) -> str:
    """Return the client's id of the request, or one of our own for a client that gave none."""
    given = request.headers.get(messages.REQUEST_ID_HEADER, "")[:64]
    return given if given.isascii() and given.isalnum() else uuid.uuid4().hex[:16]


def trace_of(request: web.BaseRequest) -> str:
    """Return the client's ``traceparent``; empty without one that is as W3C Trace Context has it."""
    # Blanks around a value are none of it (RFC 9110, 5.5); not every release of aiohttp takes those at its end away.
    given = [value.strip(" \t") for value in request.headers.getall(messages.TRACE_HEADER, [])]
    return given[0] if len(given) == 1 and _TRACE.fullmatch(given[0]) else ""


def facts_of(request: web.Request, status: int, seconds: float) -> dict[str, Any]:
    """Return the fields of an answered request's line in the log.

    Args:
        request: the request.
        status: of its answer.
        seconds: since its arrival.
    """
    tenant = request[TENANT].name if TENANT in request else ""
    return {
        "request_id": request[REQUEST_ID],
        "method": request.method,
        "path": request.path[:200],
        "status": status,
        "seconds": round(seconds, 4),
        **({"tenant": tenant} if tenant else {}),
        **({messages.TRACE_HEADER: trace} if (trace := trace_of(request)) else {}),
        **request.get(LOGGED, {}),
    }


def named_in(asked: Request | WarmUpRequest) -> dict[str, object]:
    """Return the dataset, model, split and job that a request names, for its line in the log."""
    found: dict[str, object] = {}
    if isinstance(asked, ExtractRequest | SamplesRequest):
        found["dataset"] = asked.dataset.name
    if isinstance(asked, ExtractRequest | WarmUpRequest):
        found |= {"model": asked.model.name, "split": asked.split}
    if isinstance(asked, TensorsRequest):
        found["model"] = asked.name
    elif not isinstance(asked, WarmUpRequest) and asked.job:
        found["job"] = asked.job
    return found


def stall_of(request: web.Request) -> float | None:
    """Return the share of waiting that the client tells; None when it tells none."""
    return messages.stall_of(request.headers.get(messages.STALL_HEADER))


def deadline_of(request: web.Request) -> float | None:
    """Return the seconds after which a request that still waits is not wanted any more."""
    return messages.deadline_of(request.headers.get(messages.DEADLINE_HEADER))
