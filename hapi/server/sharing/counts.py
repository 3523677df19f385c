"""Counts of samples by the source of their features."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

SOURCES = ("computed", "joined", "recent", "cache")
"""Forward passes; those of another request; a recent result; the feature cache on the disk."""


class SourceCounts:
    """Samples by source. Thread-safe."""

    def __init__(self, total: SourceCounts | None = None) -> None:
        """Begin at 0; what is added counts in ``total`` too."""
        self._total = total
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, source: str, samples: int) -> None:
        """Count ``samples`` of ``source``, one of :data:`SOURCES`."""
        with self._lock:
            self._counts[source] += samples
        if self._total is not None:
            self._total.add(source, samples)

    def all(self) -> Mapping[str, int]:
        """Return the samples of each source."""
        with self._lock:
            return {source: self._counts[source] for source in SOURCES}
