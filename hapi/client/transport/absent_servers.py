"""Servers that could not be reached: a few threads ask them whether they are there again.

A machine that is gone may swallow packets, so that each request to it takes seconds to fail, and one to a server that
hangs takes ``--timeout``. Batches come in order: no sample should wait for that where other servers are well.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from hapi.client.transport.hedging import Server
from hapi.client.transport.trouble import is_absence
from hapi.errors import HapiError, StuckError
from hapi.wire.messages import READY_PATH
from hapi.wire.transport.base import Transport

log = logging.getLogger("hapi.client")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before a server is asked first, doubled with each time that it does not answer, up to the longest."""
MOST_THREADS = 8
MOST_AT_FIRST = 32
"""Servers that are asked side by side when a job begins; of a longer list the others are taken to be there."""


class AbsentServers:
    """Asks servers until they answer. Thread-safe."""

    def __init__(self, closed: threading.Event, in_use: Callable[[Server], bool]) -> None:
        """Ask until ``closed``, and servers that are ``in_use``."""
        self._closed, self._in_use = closed, in_use
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, float, Server]] = []
        """Heap of times, numbers, pauses before them, and servers."""
        self._watched: set[Server] = set()
        """Those in the heap, and those that are being asked."""
        self._numbers = itertools.count()
        self._threads = 0

    def find(self, servers: Sequence[Server], seconds: float) -> None:
        """Ask ``servers`` side by side whether they are there, and return after ``seconds`` at the latest.

        Those that have not answered by then are absent until they do, where another one is there.
        """
        answers, changed = dict[int, bool](), threading.Condition()
        first = servers[:MOST_AT_FIRST]

        def find_one(server: Server) -> None:
            """Note whether it is there, however late."""
            found = is_there(server.transport)
            with changed:
                answers[id(server)] = found
                server.absent = server.absent and not found
                changed.notify_all()
            if not found:
                self.add(server)

        for server in first:
            threading.Thread(target=find_one, args=(server,), name="hapi-at-first", daemon=True).start()
        with changed:
            changed.wait_for(lambda: len(answers) == len(first), seconds)
            silent = [server for server in first if not answers.get(id(server))]
            if len(silent) == len(first):
                return
            for server in silent:
                server.absent = True
                log.warning(
                    "%s does not answer yet; requests go to the others until it does", server.transport.url
                )

    def add(self, server: Server, *, at_once: bool = False) -> None:
        """Note that ``server`` could not be reached, or is new; it is :attr:`Server.absent` until it answers.

        It is asked after a pause, or ``at_once``.
        """
        with self._lock:
            server.absent = True
            if server in self._watched:
                return
            self._watched.add(server)
            self._put(server, FIRST_PAUSE, 0.0 if at_once else FIRST_PAUSE)
            if self._threads < MOST_THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="hapi-absent", daemon=True).start()

    def _put(self, server: Server, pause: float, wait: float) -> None:
        """Have ``server`` asked after ``wait`` seconds; ``pause`` is the length that pauses are doubled from."""
        due = time.monotonic() + wait * random.uniform(0.75, 1.25)
        heapq.heappush(self._due, (due, next(self._numbers), pause, server))

    def _work(self) -> None:
        """Ask one server after the other, when each is due, until none is absent."""
        while True:
            with self._lock:
                if not self._due:
                    self._threads -= 1
                    return
                due, _, pause, server = heapq.heappop(self._due)
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            is_back = not server.absent or not self._in_use(server) or is_there(server.transport)
            with self._lock:
                if is_back:
                    server.absent = False
                    self._watched.remove(server)
                else:
                    pause = min(2 * pause, LONGEST_PAUSE)
                    self._put(server, pause, pause)


def is_there(transport: Transport) -> bool:
    """Return whether the server answers, and takes requests; one that refuses this question is there."""
    try:
        transport.call("GET", READY_PATH)
    except HapiError as error:
        return not (is_absence(error) or isinstance(error, StuckError))
    except Exception:
        log.debug("%s: an answer that nobody understands", transport.url, exc_info=True)
    return True
