"""The server's account of a request, as tests make it."""

from __future__ import annotations

from typing import Any

from hapi.wire.report import STAGES, RequestReport, ServerTier


def report_with(**changes: Any) -> RequestReport:
    """A report whose numbers are all exact in binary, with ``changes``."""
    usual: dict[str, Any] = {
        "server": "a",
        "seconds": dict.fromkeys(STAGES, 0.5),
        "cpu": dict.fromkeys(STAGES, 0.25),
        "busy": (1.0, 2.0),
        "work": (0.0, 2.0),
        "others": (0.0, 0.0),
        "process": (0.0, 3.0),
        "clock": (0.0, 4.0),
        "pages": 12,
        "first": 0.03125,
        "cos_batch": 16,
        "layers": (),
        "tier": ServerTier(device="cpu", processors=2, threads=1, running=4, devices=1, reuse=True),
    }
    return RequestReport(**(usual | changes))
