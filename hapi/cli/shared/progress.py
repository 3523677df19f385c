"""A progress bar on stderr with samples/s and MB/s; silent when asked to be, or without a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from hapi.cli.shared.steady_bar import SteadyBar
from hapi.text import MESSAGE_CHARACTERS, counted, printable


class TransferBar:
    """Counts samples and bytes. A context manager; :meth:`start` may be called once inside."""

    def __init__(self, label: str, quiet: bool = False, by_bytes: bool = False) -> None:
        """Make a bar; ``by_bytes``: the total is known in bytes, not in samples."""
        self._label = label
        self._by_bytes = by_bytes
        self._disabled = quiet or not sys.stderr.isatty()
        self._bar: SteadyBar | None = None
        self._began = time.monotonic()
        self.samples = 0
        self.size = 0

    def start(self, total: int, done: int = 0) -> None:
        """Begin with ``total`` samples or bytes, ``done`` of which an earlier run completed."""
        self._began = time.monotonic()
        self._bar = SteadyBar(
            total=total, initial=done, desc=self._label, unit="B" if self._by_bytes else " samples", unit_scale=True,
            disable=self._disabled, file=sys.stderr,
        )  # fmt: skip

    def advance(self, samples: int, size: int) -> None:
        """Count samples and bytes since the last call."""
        self.samples += samples
        self.size += size
        if self._bar is not None and not self._disabled:
            rate = self.size / max(1e-9, time.monotonic() - self._began) / 1e6
            said = counted(self.samples, "sample") if self._by_bytes else f"{rate:.1f} MB/s"
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(size if self._by_bytes else samples)

    def print(self, line: str) -> None:
        """Print a line on stdout that does not tear the bar."""
        tqdm.write(printable(line, MESSAGE_CHARACTERS), file=sys.stdout)

    @property
    def seconds(self) -> float:
        """Return the seconds since the bar began."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
