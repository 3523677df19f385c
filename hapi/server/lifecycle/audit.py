"""The audit: a line in the log for each refused and each administrative act, with the field ``audit``.

Requests that are refused are told by their own line, which then has that field too (:mod:`hapi.server.http.app`).
"""

from __future__ import annotations

import logging

log = logging.getLogger("hapi.audit")


def refused(act: str, **fields: object) -> None:
    """Somebody was refused something: ``act`` says what."""
    log.info("refused", extra={"audit": act, **fields})


def administered(act: str, **fields: object) -> None:
    """The operator, or the system for them, did ``act``: started, stopped, changed something."""
    log.info("administered", extra={"audit": act, **fields})
