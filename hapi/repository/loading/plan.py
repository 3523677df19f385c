"""Plan of a load: the fewest ranges that bring the wanted tensors, first layers first.

A pure function of the tensors' locations and of how their store is best read. Neighbours are one range. A store
that answers whole ranges also reads over small gaps, as long as all gaps together stay below a hundredth of the
wanted bytes. Large ranges are split, so that several readers share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from hapi.repository.checksums import CHECKED_BYTES

MAX_EXCESS, EXCESS_BYTES = 0.01, 4 << 10
"""Bytes of gaps that are moved, at most, for each wanted byte, and for a load of few bytes."""


class ReadTraits(NamedTuple):
    """Ways in which a store is best read."""

    range_bytes: int
    """Largest range of one call."""
    readers: int
    """Calls side by side."""
    gap_bytes: int | None
    """Longest gap that is read over to save a range. None: a call reads several ranges and no gap, as a local file
    is read."""


class Wanted(NamedTuple):
    """Location of one wanted tensor."""

    pack: str
    start: int
    nbytes: int
    digest: str
    """Identity of the bytes. Tensors of one digest, checksum and size are read once."""
    checksum: str = ""


class ContentSlice(NamedTuple):
    """A part of one content that one range brings."""

    content: int
    start: int
    """First byte within the content."""
    nbytes: int


@dataclass(frozen=True)
class ReadRange:
    """Bytes ``start..stop`` of an object, and the slices of contents in them, by their position."""

    pack: str
    start: int
    stop: int
    slices: tuple[ContentSlice, ...]
    first: int
    """Content that is needed first, of this range and of later ranges that go on with one of its contents."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(part.nbytes for part in self.slices)


@dataclass(frozen=True)
class ReadPlan:
    """Ranges in the order in which they are read."""

    contents: tuple[Wanted, ...]
    """Different contents, in the order of their first need."""
    content_of: tuple[int, ...]
    """Number of the content of each wanted tensor."""
    ranges: tuple[ReadRange, ...]
    moved: int
    """Bytes that the ranges bring, with gaps."""

    @property
    def needed(self) -> int:
        """Bytes of all contents."""
        return sum(content.nbytes for content in self.contents)


def plan_reads(wanted: Iterable[Wanted], traits: ReadTraits) -> ReadPlan:
    """Return the ranges that bring ``wanted``.

    Args:
        wanted: tensors in the order in which they are needed.
        traits: of the store.
    """
    numbers: dict[tuple[str, str, int], int] = {}
    contents: list[Wanted] = []
    content_of = []
    for tensor in wanted:
        number = numbers.setdefault((tensor.digest, tensor.checksum, tensor.nbytes), len(contents))
        if number == len(contents):
            contents.append(tensor)
        content_of.append(number)
    by_position = sorted(
        (n for n, content in enumerate(contents) if content.nbytes),
        key=lambda n: (contents[n].pack, contents[n].start),
    )
    if traits.gap_bytes is None:
        ranges = list(_batches(contents, by_position, traits.range_bytes))
        moved = sum(found.nbytes for found in ranges)
    else:
        ranges = [
            part
            for run in _joined(contents, by_position, traits)
            for part in _split(contents, run, traits.range_bytes)
        ]
        moved = sum(found.stop - found.start for found in ranges)
    return ReadPlan(tuple(contents), tuple(content_of), tuple(_by_need(ranges)), moved)


def _by_need(ranges: Sequence[ReadRange]) -> list[ReadRange]:
    """Ranges, given by position, in the order of need; the slices of each content stay in their order."""
    found = list(ranges)
    for i in reversed(range(len(found) - 1)):
        before, after = found[i], found[i + 1]
        goes_on = {part.content for part in before.slices} & {p.content for p in after.slices if p.start}
        if goes_on:
            found[i] = replace(before, first=min(before.first, after.first))
    return sorted(found, key=lambda read: read.first)  # equal ones keep their order


def _batches(contents: Sequence[Wanted], by_position: Sequence[int], limit: int) -> Iterator[ReadRange]:
    """Wanted bytes of each object in parts of at most ``limit`` bytes, whatever lies between them.

    A piece of a checksum that fits is not cut: who reads it can hash it alone.
    """
    for pack, group in groupby(by_position, key=lambda n: contents[n].pack):
        numbers = list(group)
        total = sum(contents[n].nbytes for n in numbers)
        size = _even(total, limit)
        slices: list[ContentSlice] = []
        room = size
        for number in numbers:
            done = 0
            while done < contents[number].nbytes:
                whole = min(limit, contents[number].nbytes - done, CHECKED_BYTES - done % CHECKED_BYTES)
                if slices and whole > room:
                    yield _range(contents, pack, slices)
                    slices, room = [], size
                part = ContentSlice(number, done, whole)
                slices.append(part)
                done, room = done + part.nbytes, room - part.nbytes
                if room <= 0:
                    yield _range(contents, pack, slices)
                    slices, room = [], size
        if slices:
            yield _range(contents, pack, slices)


def _even(total: int, limit: int) -> int:
    """Size of the parts when ``total`` bytes are cut evenly into as few parts of at most ``limit`` as possible."""
    return -(-total // -(-total // limit))


def _range(contents: Sequence[Wanted], pack: str, slices: Sequence[ContentSlice]) -> ReadRange:
    starts = [contents[part.content].start + part.start for part in slices]
    stops = [start + part.nbytes for start, part in zip(starts, slices, strict=True)]
    return ReadRange(pack, min(starts), max(stops), tuple(slices), min(part.content for part in slices))


def _joined(
    contents: Sequence[Wanted], by_position: Sequence[int], traits: ReadTraits
) -> Iterator[Sequence[int]]:
    """Runs of contents that are read as one, the shortest gaps closed first.

    Each closed gap saves one range whatever its length, so the shortest first is the most for a given excess.
    """
    count = len(by_position)
    starts = [contents[n].start for n in by_position]
    stops = _running_stops(contents, by_position)
    excess = max(EXCESS_BYTES, int(MAX_EXCESS * sum(contents[n].nbytes for n in by_position)))
    first_of, last_of = list(range(count)), list(range(count))
    closed = [False] * count
    """Whether content i of them and the one before it are in one run."""
    gaps = sorted(
        (max(0, starts[i] - stops[i - 1]), i)
        for i in range(1, count)
        if contents[by_position[i]].pack == contents[by_position[i - 1]].pack
    )
    for gap, i in gaps:
        if gap > min(excess, traits.gap_bytes or 0):
            break
        first, last = first_of[i - 1], last_of[i]
        left, right = stops[i - 1] - starts[first], stops[last] - starts[i]
        size = traits.range_bytes
        if gap and -(-left // size) + -(-right // size) <= -(-(left + gap + right) // size):
            continue
        excess -= gap
        closed[i] = True
        last_of[first], first_of[last] = last, first
    cuts = [*(i for i in range(count) if not closed[i]), count]
    for begin, end in pairwise(cuts):
        yield by_position[begin:end]


def _running_stops(contents: Sequence[Wanted], by_position: Sequence[int]) -> list[int]:
    """End of all contents of the object up to each one: one may lie within another."""
    stops: list[int] = []
    pack = None
    for number in by_position:
        content = contents[number]
        before = stops[-1] if stops and content.pack == pack else 0
        stops.append(max(before, content.start + content.nbytes))
        pack = content.pack
    return stops


def _split(contents: Sequence[Wanted], run: Sequence[int], limit: int) -> Iterator[ReadRange]:
    """A run cut evenly into ranges of at most ``limit`` bytes."""
    begin = contents[run[0]].start
    total = max(contents[n].start + contents[n].nbytes for n in run) - begin
    size = _even(total, limit)
    slices: list[list[ContentSlice]] = [[] for _ in range(-(-total // size))]
    for number in run:
        start, nbytes = contents[number].start - begin, contents[number].nbytes
        done = 0
        while done < nbytes:
            part = (start + done) // size
            count = min(nbytes - done, (part + 1) * size - start - done)
            slices[part].append(ContentSlice(number, done, count))
            done += count
    for found in slices:
        if found:  # a cut inside of a gap may leave a part without anything wanted
            yield _range(contents, contents[run[0]].pack, found)
