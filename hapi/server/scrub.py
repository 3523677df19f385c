"""Scrubbing: all stored data is read once in a while, at a bounded rate, to find damage before a job does.

One thread of the lowest priority, without a slot: it stands still while requests wait, and ends at once when
told to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from hapi.data.manifest import Manifest, load_manifest
from hapi.data.verify import verify_dataset
from hapi.errors import HapiError, NotFoundError
from hapi.repository.verify import Verified, verify_model
from hapi.repository.versions import list_versions, model_names
from hapi.store.base import ObjectStore
from hapi.store.damage import Damage

log = logging.getLogger("hapi.server")

PASS_SECONDS = 3600.0
"""Least time from the beginning of one pass over everything to that of the next."""
_WAIT_SECONDS = 0.2
"""Seconds between two checks of a paused scrub whether requests still wait."""
_LINES = 20
"""Most lines of the log for one dataset or model and pass; all findings are counted."""
_NICE = 19


class _Stopped(Exception):
    """The scrub is to end."""


class _Changed(Exception):
    """The dataset or model being read was replaced meanwhile: missing objects are no damage."""


class Scrub:
    """Thread-safe; nothing runs before :meth:`start`."""

    def __init__(self, store: ObjectStore, rate: int, busy: Callable[[], bool] = lambda: False) -> None:
        """Read ``rate`` bytes a second (0: nothing), but nothing while ``busy()``."""
        self.rate = rate
        self._store = store
        self._busy = busy
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._bytes = 0
        self._damaged: dict[str, int] = {}
        self._last_complete = 0.0
        self._due = 0.0
        self._verified: Verified = set()
        """Tensors that this pass found sound; models share them."""

    def start(self) -> None:
        """Begin, unless the rate is 0."""
        if self.rate and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hapi-scrub", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end; one that waits for the store is left behind by the process's end."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait so long for the thread to have left."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def bytes(self) -> int:
        """Bytes read so far."""
        return self._bytes

    @property
    def damaged(self) -> Mapping[str, int]:
        """Findings of the last look by dataset, or by ``model:NAME``; sound ones are not in it."""
        return dict(self._damaged)

    @property
    def last_complete(self) -> float:
        """Time at which a pass over everything last ended, seconds since 1970; 0 before the first."""
        return self._last_complete

    def to_json(self) -> dict[str, object]:
        """Return the figures for ``/v1/status``."""
        damaged = self.damaged
        return {
            "rate": self.rate,
            "bytes": self.bytes,
            "damaged": len(damaged),
            "findings": sum(damaged.values()),
            "last_complete": round(self.last_complete, 3),
        }

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, where the system can (Linux)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        with suppress(_Stopped):
            while True:
                began = time.monotonic()
                try:
                    self._pass()
                except _Stopped:
                    raise
                except Exception:  # as where memory is short: the next pass must come
                    with suppress(MemoryError):
                        log.exception("scrub: unexpected error; the pass ends here")
                self._pause(max(0.0, began + PASS_SECONDS - time.monotonic()))

    def _pass(self) -> None:
        """Look at everything once."""
        complete = True
        self._verified.clear()
        try:
            datasets = [(name, name, self._look_at_dataset) for name in self._store.list_names("datasets")]
            models = [
                (f"model:{name}@{version}", f"{name}@{version}", self._look_at_model)
                for name in model_names(self._store)
                for version in list_versions(self._store, name)
            ]
        except HapiError as error:
            log.warning("scrub: the store cannot be listed: %s", error)
            return
        everything = [*datasets, *models]
        for gone in self._damaged.keys() - {title for title, _, _ in everything}:
            del self._damaged[gone]
        for title, name, check in everything:
            self._pause(0.0)
            try:
                self._note(title, check(title, name))
            except _Changed:
                complete = False  # the next pass sees what there is then
            except HapiError as error:
                complete = False
                log.warning("scrub: %s cannot be read: %s", title, error)
        if complete:
            self._last_complete = time.time()
            log.info("scrub: everything was read", extra={"damaged": len(self._damaged)})

    def _note(self, title: str, findings: int) -> None:
        if findings:
            self._damaged[title] = findings
        else:
            self._damaged.pop(title, None)

    def _look_at_dataset(self, title: str, name: str) -> int:
        if not self._store.exists(f"datasets/{name}/manifest.json"):
            return 0  # being packed
        begun: list[Manifest] = []

        def changed() -> bool:
            return bool(begun) and load_manifest(self._store, name).pack != begun[0].pack

        findings = _Findings(self, title, changed)
        verify_dataset(
            self._store, name, on_damage=findings.add, on_start=begun.append, on_progress=self._progress
        )
        return findings.count

    def _look_at_model(self, title: str, name: str) -> int:
        findings = _Findings(self, title, lambda: False)
        try:
            verify_model(
                self._store,
                name,
                verified=self._verified,
                on_damage=findings.add,
                on_progress=self._progress,
            )
        except NotFoundError:
            return 0  # removed since the listing
        return findings.count

    def found(self, title: str, count: int) -> None:
        """Count a finding at once."""
        self._damaged[title] = max(count, self._damaged.get(title, 0))

    def _progress(self, _: int, size: int) -> None:
        """Keep to the rate: what was read is paid for by a pause."""
        self._bytes += size
        self._due = max(self._due, time.monotonic()) + size / self.rate
        self._pause(self._due - time.monotonic())

    def _pause(self, seconds: float) -> None:
        """Stand still so long, and while requests wait; :class:`_Stopped` when that is the end."""
        if self._stop.wait(max(0.0, seconds)):
            raise _Stopped
        while self._busy():
            if self._stop.wait(_WAIT_SECONDS):
                raise _Stopped


class _Findings:
    """Damage of one dataset or model: a line of the log for each, up to a bound."""

    def __init__(self, scrub: Scrub, title: str, changed: Callable[[], bool]) -> None:
        self._scrub, self._title, self._changed = scrub, title, changed
        self.count = 0

    def add(self, damage: Damage) -> None:
        """Count and tell ``damage``; what belongs to nothing serves nobody and is none."""
        if damage.extra:
            return
        if self._changed():
            raise _Changed
        self.count += 1
        self._scrub.found(self._title, self.count)
        if self.count <= _LINES:
            log.error("scrub: damage in %s: %s", self._title, damage)
        elif self.count == _LINES + 1:
            log.error(
                "scrub: damage in %s: more than %d findings; hapi verify names all", self._title, _LINES
            )
