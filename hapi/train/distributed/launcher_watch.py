"""The end of a rank whose launcher is gone: torchrun ends its ranks when it is stopped, but not when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

WATCH_SECONDS = 1.0
"""Seconds between two looks."""
END_SECONDS = 60.0
"""Seconds to stop in, as torchrun gives its ranks 30: a rank that waits for lost ones in a library hears no signal."""


def stop_with_launcher(gone: Callable[[], None]) -> None:
    """Let this process get SIGTERM when its parent has ended, and SIGKILL if it then goes on.

    A parent that ended before is not noticed here, but where the ranks meet: torchrun's own store is gone then, too.

    Args:
        gone: called before, in a thread of its own.
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent, gone), name="hapi-launcher", daemon=True).start()


def _watch(parent: int, gone: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    with contextlib.suppress(OSError, ValueError):  # torchrun may have read this process's output
        gone()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
