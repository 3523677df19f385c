"""Comparison of the code that servers compute with, answer by answer, with the code that a run's key names.

A server may be upgraded in the middle of a run, or another one take its place. Each answer tells its code in a header,
before any of its features, so that no features of another code are kept under a key that does not name it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch

from hapi.cache.code_version import libraries_text
from hapi.models.devices import arithmetic_name

log = logging.getLogger("hapi.client")

OTHER = (
    "computes with other code than before: its features may differ from earlier ones, are not kept in this pass, and "
    "have a key of their own in the next"
)
OLDER = "does not tell with which code it computes: its features are not kept; update it"


class CodeWatch:
    """Codes of the servers that answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: frozenset[str | None] = frozenset()
        self._left: str | None = None
        self.why = ""
        """One line that says which server's code has changed; empty as long as none has."""

    def expect(self, codes: Iterable[str | None]) -> None:
        """Take ``codes`` for those that the keys of the passes to come name."""
        with self._lock:
            self._codes, self._left = frozenset(codes), None

    @property
    def changed(self) -> bool:
        """True once an answer came of another code than those expected: what was computed since is of no key."""
        with self._lock:
            return self._left is not None

    def answered(self, server: str, code: str | None) -> None:
        """Note that ``server`` begins to send features that ``code`` computed; None when it does not tell."""
        with self._lock:
            if code in self._codes or self._left is not None:
                return
            self._left, first = server, not self.why
            self.why = f"{server} {OLDER if code is None else OTHER}"
        if first:
            log.warning("%s", self.why)


def computers(device: torch.device, servers: Iterable[str]) -> str:
    """Return devices and libraries that compute features of a run, for people.

    Args:
        device: this side's.
        servers: those of each server, as it tells them; empty for one that does not.
    """
    own = f"{arithmetic_name(device)}, {libraries_text()}"
    known = sorted({computes or "not told" for computes in servers})
    return own if known == [own] else f"servers {' and '.join(known)}; trainer {own}"
