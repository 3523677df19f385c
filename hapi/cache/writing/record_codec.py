"""Codec of the records that a process writes of one key: the named one, or what pays on the measured disk.

``auto`` begins raw. Once a few megabytes have come, the exact codecs are tried on rows of them, and with each further
put the choice is made anew from what is known by then: the disk's rates, the time that a sample takes in training and
the time that it takes to be computed anew. A plan knows more, and overrules it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from hapi.arrays import Bytes
from hapi.cache.disk_rates import DiskRates
from hapi.codecs.choose import CodecFigures, Shelf, choose
from hapi.codecs.measure import measure
from hapi.codecs.names import AT_REST, EXACT, ITEM_BYTES, LOSSY, NONE, CacheCodec, Codec

ENOUGH_BYTES = 4 << 20
"""Features that must have come before codecs are tried: of less, reading and writing takes no time."""
TRIED_BYTES, TRIED_ROWS = 2 << 20, 32
"""Most bytes and rows on which they are tried; one row in any case."""
READ_RATE, WRITE_RATE = 500e6, 200e6
"""Bytes per second of a disk that could not be measured: a plain SSD."""


class PassTimes(NamedTuple):
    """Seconds of a pass for each of its samples."""

    step: float = 0.0
    """Seconds of the training step."""
    computed: float = 0.0
    """Seconds in all, where features are computed."""


class RecordCodec:
    """Codec of one key's records. Thread-safe."""

    def __init__(
        self,
        wanted: CacheCodec,
        itemsize: int,
        row_bytes: int,
        *,
        room: float,
        reads: int,
        rates: Callable[[], DiskRates],
        small_form: Codec = NONE,
    ) -> None:
        """Encode as ``wanted`` says.

        Args:
            wanted: ``auto``, or a codec.
            itemsize: bytes of an element; elements of unknown length stay raw.
            row_bytes: of one sample.
            room: part of all rows for which the budget has room when they are raw; above 1 for more.
            reads: passes in which what is kept will be read.
            rates: measures the disk, or tells what was measured.
            small_form: codec by which all rows were rounded before, which then gives every bit back; ``auto`` may
                choose it too.
        """
        self.itemsize = itemsize
        self._codecs: tuple[Codec, ...] = ()
        if itemsize in ITEM_BYTES and wanted != NONE:
            self._codecs = (
                (wanted,) if wanted != "auto" else EXACT if small_form == NONE else (*EXACT, small_form)
            )
        self._auto = wanted == "auto"
        self._row_bytes, self._room, self._reads, self._rates = row_bytes, room, reads, rates
        self._lock = threading.Lock()
        self._seen = 0
        self._times = PassTimes()
        self._planned = False
        self.name: Codec = NONE if self._auto or not self._codecs else self._codecs[0]
        """Codec of the records that are written now."""
        self.figures: tuple[CodecFigures, ...] = ()
        """Those of the codecs that may be taken, once they were tried; here or on a sample elsewhere."""
        self._measured_here = False

    def expect(self, figures: tuple[CodecFigures, ...]) -> None:
        """Begin with what codecs did on a sample of such features, until they are tried on rows that come."""
        with self._lock:
            if not self._measured_here:
                self.figures = figures

    def at(self, rows: Bytes, times: PassTimes | None = None) -> Codec:
        """Return the codec for ``rows``, which may be the ones that codecs are tried on.

        Args:
            rows: features of n samples, uint8 [n, row_bytes], C-contiguous.
            times: of the pass that computed them; None where they are not known.
        """
        if not self._codecs:
            return NONE
        with self._lock:
            self._times = times or self._times
            self._seen += rows.nbytes
            if not self._measured_here and self._seen >= ENOUGH_BYTES:
                self.figures, self._measured_here = self._measured(rows), True
            if self._auto and self.figures and not self._planned:
                self.name = self._chosen()
            return self.name

    def follow(self, name: str) -> None:
        """Write what is put from now on by the codec that a plan has chosen, if it could choose."""
        with self._lock:
            if self._auto and self.figures and name in (NONE, *self._codecs):
                self._planned = True
                self.name = next(codec for codec in AT_REST if codec == name)

    def _measured(self, rows: Bytes) -> tuple[CodecFigures, ...]:
        count = min(TRIED_ROWS, max(1, TRIED_BYTES // max(1, self._row_bytes)), len(rows))
        distance = len(rows) // count
        samples = [rows[row * distance].data for row in range(count)]
        found = measure(samples, self.itemsize, self._codecs)
        return tuple(_checked(figures) if figures.name in LOSSY else figures for figures in found)

    def _chosen(self) -> Codec:
        if all(figures.ratio <= 1 for figures in self.figures):
            return NONE
        rates, each = self._rates(), max(1, self._row_bytes)
        shelf = Shelf(
            write_rate=rates.write or WRITE_RATE,
            read_rate=rates.read or READ_RATE,
            training=self._times.step / each,
            computing=self._times.computed / each,
            room=self._room,
            reads=self._reads,
        )
        name = choose(self.figures, shelf).name
        return next(codec for codec in AT_REST if codec == name)

    def to_json(self) -> dict[str, Any]:
        """Return the present codec and what was measured, for a run's report."""
        return {"codec": self.name, "measured": [asdict(figures) for figures in self.figures]}


def _checked(figures: CodecFigures) -> CodecFigures:
    """``figures`` of a codec that rounds, whose rows are decoded when they are written, to see that all came back."""
    seconds = 1 / figures.encode_rate + 1 / figures.decode_rate
    return replace(figures, encode_rate=1 / seconds if seconds > 0 else figures.encode_rate)
