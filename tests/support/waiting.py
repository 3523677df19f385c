"""How long a test waits for what must come: as long as a slow machine with much else to do may need."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 400.0
"""Seconds until a test gives up; what comes in a tenth of one may take so long while a machine stands still."""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until ``condition()`` is true; ``seconds`` may only be more than :data:`PATIENCE`."""
    limit = max(seconds, PATIENCE)
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {limit:g} s")
        time.sleep(0.02)
