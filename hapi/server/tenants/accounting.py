"""Accounts of tenants: a CSV file for each day (UTC) and server process, with a row for each tenant.

A file is written anew, whole, about once a minute, and at the end of the process. So a process that is killed loses the
last minute, and servers may share a folder: the sum over the files of a day is that of all. A day that is over has its
file for good: where the clock is set back into it, what follows has another file.
"""

from __future__ import annotations

import csv
import io
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from hapi.atomic import write_atomically
from hapi.errors import UsageError

log = logging.getLogger("hapi.server")

WRITE_SECONDS = 60.0
"""Seconds between two writes: the most that a killed process loses."""


@dataclass
class Account:
    """Use of the server by one tenant in one day."""

    served: int = 0
    """Requests answered wholly."""
    shed: int = 0
    """Requests sent away: too many waited, or their turn came too late."""
    samples: int = 0
    """Samples of requests that had a slot."""
    sent_bytes: int = 0
    """Bytes of their answers, those that broke off included."""
    cost_seconds: float = 0.0
    """Seconds of the scarcest resource, see :mod:`hapi.server.scheduling.costs`."""
    pack_bytes: int = 0
    """Bytes of stored models' packs, those that broke off included."""

    def add(self, more: Account) -> None:
        """Add ``more`` to it."""
        self.served += more.served
        self.shed += more.shed
        self.samples += more.samples
        self.sent_bytes += more.sent_bytes
        self.cost_seconds += more.cost_seconds
        self.pack_bytes += more.pack_bytes


COLUMNS = ("day", "server", "tenant", *(f.name for f in fields(Account)))


class Accounts:
    """The accounts of one server process. Thread-safe."""

    def __init__(self, folder: str, server: str, clock: Callable[[], float] = time.time) -> None:
        """Keep them in ``folder``, which is made if need be.

        Args:
            folder: of the files ``DAY-SERVER.csv``, and ``DAY-SERVER.2.csv`` where the clock was set back.
            server: id of the process.
            clock: seconds since 1970.

        Raises:
            UsageError: no file can be written there.
        """
        self._folder, self._server, self._clock = Path(folder), server, clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._days: dict[str, dict[str, Account]] = {}
        """Accounts by day and tenant; past days go once they are written."""
        self._over = Counter[str]()
        """Files that are written for good, by day."""
        self._unwritten: set[str] = set()
        self._failed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_day(self._today())
        except OSError as error:
            raise UsageError(f"--accounts {folder}: cannot be written: {error.strerror or error}") from None

    def add(self, tenant: str, use: Account) -> None:
        """Add ``use`` to today's account of ``tenant``."""
        with self._lock:
            today = self._today()
            self._days.setdefault(today, {}).setdefault(tenant, Account()).add(use)
            self._unwritten.add(today)

    def write(self) -> None:
        """Write what has changed; what cannot be written is kept, tried again the next time, and logged once."""
        with self._writing:
            with self._lock:
                days, self._unwritten = sorted(self._unwritten), set()
            for day in days:
                try:
                    self._write_day(day)
                except OSError as error:
                    self._keep(day, error)
                else:
                    self._failed = False
                    self._forget(day)

    def _keep(self, day: str, error: OSError) -> None:
        with self._lock:
            self._unwritten.add(day)
        if not self._failed:
            log.error("accounts not written", extra={"day": day, "error": error.strerror or str(error)})
        self._failed = True

    def _forget(self, day: str) -> None:
        with self._lock:
            if day != self._today() and day not in self._unwritten and day in self._days:
                del self._days[day]
                self._over[day] += 1

    def _write_day(self, day: str) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        with self._lock:
            part = f".{self._over[day] + 1}" if day in self._over else ""
            for tenant, account in sorted(self._days.get(day, {}).items()):
                cost = f"{account.cost_seconds:.6f}"
                counts = (account.served, account.shed, account.samples, account.sent_bytes)
                table.writerow((day, self._server, tenant, *counts, cost, account.pack_bytes))
        write_atomically(self._folder / f"{day}-{self._server}{part}.csv", text.getvalue().encode())

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).date().isoformat()
