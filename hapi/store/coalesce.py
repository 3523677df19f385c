"""Requests that cover the parts of a read: near ranges joined, large ones split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from hapi.process.threads import Threads
from hapi.store.base import ReadPart, Then, nothing

COALESCE_GAP = 256 << 10
"""Ranges nearer than this are fetched as one: at about 3 ms a request the gap is cheaper to read."""
SLICE_BYTES = 16 << 20
"""Most bytes of one request; larger ranges are split and fetched in parallel."""


@dataclass(frozen=True)
class PartSlice:
    """A part, or a piece of one that is too large for one request."""

    key: str
    start: int
    out: memoryview
    number: int
    """Number of the part."""
    last: bool
    """True for the last piece of its part."""

    @property
    def stop(self) -> int:
        """Byte after its last one."""
        return self.start + len(self.out)


@dataclass(frozen=True)
class Fetch:
    """One request: bytes ``start..stop`` of ``key``, from which ``parts`` are cut."""

    key: str
    start: int
    stop: int
    parts: list[PartSlice]


def coalesced(
    parts: Sequence[ReadPart],
    *,
    gap: int | None = None,
    slice_bytes: int | None = None,
    apart: bool = False,
) -> list[Fetch]:
    """Return requests that cover ``parts``: near ranges joined, large ones split.

    Args:
        parts: ranges to read.
        gap: most unwanted bytes between two that are joined; None for :data:`COALESCE_GAP`.
        slice_bytes: most bytes of one request; None for :data:`SLICE_BYTES`.
        apart: parts that overlap are not joined, so that each byte of a request has one place.
    """
    max_gap = COALESCE_GAP if gap is None else gap
    max_bytes = SLICE_BYTES if slice_bytes is None else slice_bytes
    fetches: list[Fetch] = []
    for part in sorted(_split(parts, max_bytes), key=lambda p: (p.key, p.start)):
        stop = part.stop
        last = fetches[-1] if fetches else None
        between = 0 if last is None else part.start - last.stop
        if (
            last is not None
            and last.key == part.key
            and between <= max_gap
            and not (apart and between < 0)
            and max(stop, last.stop) - last.start <= max_bytes
        ):
            last.parts.append(part)
            fetches[-1] = Fetch(last.key, last.start, max(stop, last.stop), last.parts)
        else:
            fetches.append(Fetch(part.key, part.start, stop, [part]))
    return fetches


def _split(parts: Sequence[ReadPart], max_bytes: int) -> Iterator[PartSlice]:
    for number, part in enumerate(parts):
        out = part.out.cast("B")
        for first in range(0, len(out), max_bytes):
            part_slice = out[first : first + max_bytes]
            yield PartSlice(part.key, part.start + first, part_slice, number, first + max_bytes >= len(out))


def fetch_all(
    parts: Sequence[ReadPart],
    fetches: Sequence[Fetch],
    fetch: Callable[[Fetch, Then], None],
    workers: Threads,
    then: Then = nothing,
) -> None:
    """Make all requests, side by side if there are several; nothing writes into the parts any more afterwards.

    Args:
        parts: the ranges to read.
        fetches: the requests that cover them.
        fetch: makes one, in a thread of ``workers``; a single one in the caller's. It calls the function that it is
            given with the number of each part whose last piece has come.
        workers: threads for it.
        then: called by the caller's thread with the number of each part whose last piece has come.
    """
    if len(fetches) == 1:
        fetch(fetches[0], then)
    else:
        _side_by_side(fetches, fetch, workers, then)
    for number, part in enumerate(parts):
        if not part.out.nbytes:
            then(number)


def _side_by_side(
    fetches: Sequence[Fetch], fetch: Callable[[Fetch, Then], None], workers: Threads, then: Then
) -> None:
    running: list[Future[None]] = []
    try:
        for one in fetches:
            running.append(
                workers.submit(fetch, one, nothing)
            )  # what was submitted must be known if the next fails
        for one, done in zip(fetches, running, strict=True):
            done.result()
            report(one, then)
    finally:
        # After a failure the caller's memory is given back: nobody may write there any more.
        _until_ended([fetching for fetching in running if not fetching.cancel()])


def report(fetch: Fetch, then: Then) -> None:
    """Call ``then`` with each part whose last piece a request has brought: they are waited for in their order."""
    for part_slice in fetch.parts:
        if part_slice.last:
            then(part_slice.number)


def _until_ended(running: Sequence[Future[None]]) -> None:
    """Wait, also when Ctrl-C is pressed meanwhile: that is heard afterwards, and the store's time limits bound it."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait(running)
            break
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
    if interrupted is not None:
        raise interrupted
