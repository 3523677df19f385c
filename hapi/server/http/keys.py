"""Facts that the application keeps beside a request, and kinds of requests and errors."""

from __future__ import annotations

import uuid

from aiohttp import web

from hapi.errors import BusyError, ForbiddenError, HapiError, ShortageError, TooLargeError, UnauthorizedError
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire import messages

REQUEST_ID = web.RequestKey("id", str)
STATUS = web.RequestKey("status", int)
"""Status of a request that did not end with its response's status."""
PROBLEM = web.RequestKey("problem", HapiError)
"""The error that ended it, if one did."""
TENANT = web.RequestKey("tenant", Tenant)
LOGGED = web.RequestKey("logged", dict)
"""Further fields of the request's line in the log."""
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


def deadline_of(request: web.Request) -> float | None:
    """Return the seconds after which a request that still waits is not wanted any more."""
    return messages.deadline_of(request.headers.get(messages.DEADLINE_HEADER))
