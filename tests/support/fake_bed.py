"""A test bed of the benchmarks on which nothing runs."""

from __future__ import annotations

from typing import Self


class FakeBed:
    """Remembers the bandwidths that were set."""

    def __init__(self) -> None:
        self.bandwidths: list[float | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def set_bandwidth(self, bandwidth: float | None) -> None:
        """As a real one's, in bits per second."""
        self.bandwidths.append(bandwidth)
