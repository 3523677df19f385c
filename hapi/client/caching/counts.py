"""Counters of kept features over one pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping


class KeptCounts:
    """Features that a pass read from the cache, and those that it put there. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0
        """Samples whose features came out of the cache."""
        self.misses = 0
        """Samples whose features were computed."""
        self.kept = 0
        """Samples whose features came into the cache."""
        self.skipped = 0
        """Samples whose features were computed and not kept."""
        self.known = 0
        """Samples whose features were computed, and had come into the cache meanwhile."""
        self.bytes_read = 0
        self.bytes_written = 0
        """Bytes of the features that came into the cache, before they were encoded."""
        self.kept_at: float | None = None
        """Time (``time.monotonic``) at which the last of them did."""
        self.read_seconds = 0.0
        """Seconds of reading, of all threads."""

    def used(self, hits: int, misses: int) -> None:
        """Count the samples of a batch that was handed out."""
        with self._lock:
            self.hits += hits
            self.misses += misses

    def read(self, nbytes: int, seconds: float) -> None:
        """Count bytes of features that were read, and the time that it took."""
        with self._lock:
            self.bytes_read += nbytes
            self.read_seconds += seconds

    def wrote(self, kept: int, nbytes: int, skipped: int, known: int = 0) -> None:
        """Count features that were offered to the cache.

        Args:
            kept: samples that came into it.
            nbytes: bytes of their features.
            skipped: samples that did not.
            known: samples that were in it already.
        """
        with self._lock:
            self.kept += kept
            if kept:
                self.kept_at = time.monotonic()
            self.bytes_written += nbytes
            self.skipped += skipped
            self.known += known

    def to_json(self) -> Mapping[str, float]:
        """Return the counters by their names in a run's report."""
        with self._lock:
            return {
                "feature_hits": self.hits,
                "feature_misses": self.misses,
                "features_kept": self.kept,
                "features_skipped": self.skipped,
                "feature_bytes_read": self.bytes_read,
                "feature_bytes_written": self.bytes_written,
                "feature_read_seconds": round(self.read_seconds, 4),
            }
