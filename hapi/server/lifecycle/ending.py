"""The end of a server process, also when threads hang.

An interpreter waits for its threads at the end, and one that reads from a store that does not answer never comes back.
So there is a time limit: after it the process ends without them, with the same exit code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from hapi.process.output_stream import settle

log = logging.getLogger("hapi.server")

END_SECONDS = 2.0
"""Time after a drain for all that ends in order: connections, threads, child processes, the interpreter."""


def end_within(seconds: float, code: int, children: Callable[[], Sequence[int]]) -> None:
    """End this process with ``code`` after ``seconds`` if it has not ended by then.

    Args:
        seconds: Time for an orderly end.
        code: The exit code.
        children: Gives the processes that are killed with this one. It must not wait for locks.
    """
    timer = threading.Timer(seconds, _end, (code, children))
    timer.daemon = True
    timer.name = "hapi-end"
    timer.start()


def _end(code: int, children: Callable[[], Sequence[int]]) -> None:
    for pid in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Whoever reads the log may have stopped reading: the last word has no time limit of its own.
    telling = threading.Thread(target=_tell, args=(code,), daemon=True)
    telling.start()
    telling.join(END_SECONDS / 4)
    os._exit(code)


def _tell(code: int) -> None:
    hung = sorted(
        t.name for t in threading.enumerate() if t.name.startswith("hapi-") and t.name != "hapi-end"
    )
    log.warning("ended without waiting for its threads", extra={"code": code, "threads": hung[:20]})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            settle(stream, END_SECONDS / 4)
