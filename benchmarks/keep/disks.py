"""Disks and what is kept on them, in simulated time: records by sample, a line of bounded size, a writer behind it.

It follows how Hapi's cache works, not how its cost is estimated: rows that come while the line is full are left out; a
row counts once it was appended, and the disk begins with it; the writer waits for the disk when a segment is full, but
not at an epoch's end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.keep.events import Clock, Pool, Then
from hapi.cache.disk_rates import RateMeter
from hapi.cache.records import SEGMENT_BYTES
from hapi.cache.segments import TRAILER_BYTES, record_bytes
from hapi.client.caching.filling import FLUSH_SECONDS
from hapi.profiler.reuse.facts import CodecCost
from hapi.profiler.reuse.job_cost import LINE_BYTES
from hapi.wire.labels import SINGLE

_HEAD = record_bytes(SINGLE)
"""Bytes of a record beside its content."""
SEGMENTS = 16
"""Segments of a small budget."""
MEMORY_RATE = 4e9
"""Bytes a second of copies in memory."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """True rates of a disk, in bytes a second."""

    read: float
    write: float
    slow_write: float | None = None
    """Rate of writing once ``fast_bytes`` are written; None for the same."""
    fast_bytes: int = 0

    def writing(self, nbytes: float, before: float) -> float:
        """Return the seconds that ``nbytes`` take after ``before`` others."""
        if self.slow_write is None:
            return nbytes / self.write
        fast = max(0.0, min(nbytes, self.fast_bytes - before))
        return fast / self.write + (nbytes - fast) / self.slow_write


class DiskAtWork:
    """A disk with one arm."""

    def __init__(self, clock: Clock, disk: Disk) -> None:
        """Nothing was written yet."""
        self.arm = Pool(clock)
        self._disk, self._written = disk, 0.0
        self.on_its_way = 0.0
        """Bytes that were handed over, and are not written."""
        self.last_seconds = 0.0
        """Seconds of what was handed over last."""

    def read(self, nbytes: float, then: Then) -> None:
        """Read, then let ``then`` come."""
        self.arm.use(nbytes / self._disk.read, then)

    def write(self, nbytes: float, then: Then) -> None:
        """Write, then let ``then`` come."""
        self.last_seconds = self._disk.writing(nbytes, self._written)
        self._written += nbytes
        self.on_its_way += nbytes

        def written() -> None:
            """Note it."""
            self.on_its_way -= nbytes
            then()

        self.arm.use(self.last_seconds, written)


class Shelf:
    """Records of one cut, of some samples, each encoded as it was when it came."""

    def __init__(self, samples: int, content: float) -> None:
        """Hold nothing of ``samples``, of ``content`` bytes each before any codec."""
        self.content = content
        self.stored = array("d", bytes(8 * samples))
        """Bytes of each record's content on disk."""
        self.held = bytearray(samples)
        self.in_memory = bytearray(samples)
        self.count = self.memory_count = 0

    @property
    def share(self) -> float:
        """Share of the samples that is held."""
        return self.count / len(self.held)


class CacheAtWork:
    """One side's cache: shelves under one budget, and the writer that fills them. Rows are numbers of samples."""

    def __init__(
        self, clock: Clock, cores: Pool, disk: DiskAtWork, budget: int, memory_bytes: int, samples: int
    ) -> None:
        """Begin empty.

        Args:
            clock: simulated time.
            cores: processors that encode and copy.
            disk: where records are written.
            budget: most bytes on it.
            memory_bytes: most bytes of rows that are held in memory too.
            samples: of the job.
        """
        self._clock, self._cores, self.disk = clock, cores, disk
        self._budget, self._memory_bytes, self._samples = budget, memory_bytes, samples
        self.used_bytes = 0.0
        self.most_bytes = 0.0
        """Most bytes that were ever on the disk."""
        self.last_kept = 0.0
        """Time at which a row was kept last."""
        self.rate = RateMeter()
        self.reading = RateMeter(lambda: clock.now)
        self._segment_bytes = min(SEGMENT_BYTES, budget // SEGMENTS)
        self._segment = 0.0
        """Bytes in the open segment."""
        self._shelves: dict[int, Shelf] = {}
        self._line: deque[tuple[Sequence[int], Shelf, CodecCost]] = deque()
        self._waiting = 0.0
        self._at_work = False
        self._flushed: Then | None = None
        self._waits: Then | None = None
        """Next step of the writer, which waits for the disk."""

    @property
    def idle(self) -> bool:
        """True when nothing is left to be written."""
        return not self._line and not self._at_work and self.disk.arm.idle

    def shelf(self, cut: int, content: float) -> Shelf:
        """Return the shelf of a cut."""
        return self._shelves.setdefault(cut, Shelf(self._samples, content))

    def share(self, cut: int) -> float:
        """Return the share of the samples that is held at a cut."""
        return self._shelves[cut].share if cut in self._shelves else 0.0

    def mean_ratio(self, cut: int) -> float:
        """Return the bytes of what is held at a cut before their codec, over those on disk; 1 where nothing is."""
        shelf = self._shelves.get(cut)
        stored = 0.0 if shelf is None else sum(shelf.stored)
        return shelf.count * shelf.content / stored if shelf is not None and stored else 1.0

    @property
    def rows(self) -> int:
        """Number of rows on disk and in memory."""
        return sum(shelf.count + shelf.memory_count for shelf in self._shelves.values())

    def offer(self, rows: Sequence[int], shelf: Shelf, codec: CodecCost) -> None:
        """Let rows be kept with a codec, if the line has a place for them."""
        nbytes = len(rows) * shelf.content
        if not rows or (self._waiting and self._waiting + nbytes > LINE_BYTES):
            return
        self._line.append((rows, shelf, codec))
        self._waiting += nbytes
        if not self._at_work:
            self._next()

    def put_at_once(self, rows: Sequence[int], shelf: Shelf) -> None:
        """Keep rows that the page cache takes at once; the disk writes them in its own time."""
        self.disk.write(self._keep(rows, shelf, shelf.content), _nothing)

    def read(self, rows: Sequence[int], shelf: Shelf, then: Then) -> None:
        """Read rows that are held, from memory or from the disk."""
        from_disk = [row for row in rows if not shelf.in_memory[row]]
        copied = (len(rows) - len(from_disk)) * shelf.content / MEMORY_RATE
        stored = sum(map(shelf.stored.__getitem__, from_disk))

        def arrived() -> None:
            """Note the rate, and hold what was read in memory."""
            self.reading.end(int(stored))
            self._remember(from_disk, shelf)
            then()

        if from_disk:
            nbytes = stored + len(from_disk) * _HEAD

            def begun() -> None:
                """Read."""
                self.reading.begin()
                self.disk.read(nbytes, arrived)

            self._cores.use(copied, begun)
        else:
            self._cores.use(copied, then)

    def flush(self, then: Then) -> None:
        """Let ``then`` come when the line is empty, or at once where the disk is far behind; it is not waited for."""
        if self.disk.on_its_way > LINE_BYTES:
            then()
            return
        self._flushed = then
        self._clock.after(FLUSH_SECONDS, lambda: self._end_flush(then))
        self._go_on()
        self._check_flush()

    def _go_on(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            waits()

    def _check_flush(self) -> None:
        if self._flushed is not None and not self._line and not self._at_work:
            self._segment = 0.0
            self._end_flush(self._flushed)

    def _end_flush(self, then: Then) -> None:
        if self._flushed is then:
            self._flushed = None
            then()

    def _next(self) -> None:
        if not self._line:
            self._at_work = False
            self._check_flush()
            return
        self._at_work = True
        rows, shelf, codec = self._line.popleft()
        nbytes = len(rows) * shelf.content
        self._cores.compute(nbytes / codec.encode, lambda: self._append(rows, shelf, codec, nbytes))

    def _append(self, rows: Sequence[int], shelf: Shelf, codec: CodecCost, nbytes: float) -> None:
        added, began = self._keep(rows, shelf, shelf.content / codec.ratio), self._clock.now
        self._segment += added
        at_work = not self.disk.arm.idle

        def done() -> None:
            """Take the next rows."""
            self._waiting -= nbytes
            self._next()

        def on_disk() -> None:
            """Note the rate by what was written last, and take the next rows."""
            if at_work:
                self.rate.add(int(added), self.disk.last_seconds)
            else:
                self.rate.add(int(added), self._clock.now - began + added / MEMORY_RATE)
            if self._waits is done:
                self._go_on()

        if self._segment >= self._segment_bytes > 0 and self._flushed is None:
            self._segment = 0.0
            self._waits = done
            self.disk.write(added, on_disk)
        else:
            # The disk is at work on it while the next rows come.
            self.disk.write(added, _nothing)
            self._clock.after(0.0, done)

    def _keep(self, rows: Sequence[int], shelf: Shelf, stored: float) -> float:
        """Count rows as held, as far as there is room; the bytes that they take."""
        record = stored + _HEAD
        # A segment's end takes some bytes, too.
        room = int((self._budget - SEGMENTS * TRAILER_BYTES - self.used_bytes) // record)
        fresh = [row for row in rows if not shelf.held[row]][: max(0, room)]
        for row in fresh:
            shelf.held[row] = 1
            shelf.stored[row] = stored
        shelf.count += len(fresh)
        added = len(fresh) * record
        self.used_bytes += added
        if added:
            self.last_kept = self._clock.now
            self.most_bytes = max(self.most_bytes, self.used_bytes)
        self._remember([row for row in rows if shelf.held[row]], shelf)
        return added

    def _remember(self, rows: Sequence[int], shelf: Shelf) -> None:
        taken = sum(one.memory_count * one.content for one in self._shelves.values())
        room = int((self._memory_bytes - taken) // shelf.content)
        for row in rows:
            if room <= 0:
                return
            if not shelf.in_memory[row]:
                shelf.in_memory[row] = 1
                shelf.memory_count += 1
                room -= 1


def _nothing() -> None:
    """Do nothing, as no process waits."""
