"""Features of one request, part by part: what is there is read, what is under way is waited for, the rest is computed.

A part is one COS batch of the answer, or several while little of them is to be computed. A loading thread prepares a
part ahead: it reads what there is, claims what nobody computes, and decodes that. The request's own thread then begins
the forward pass, sends the part before meanwhile, and at last waits for what others compute. So nothing waits for
others while its own claims are not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hapi.arrays import Bytes, IntArray, LabelArray
from hapi.server.context import RequestContext
from hapi.server.feeding import Feeding, SampleRange
from hapi.server.sharing.claims import ForwardPass, PendingBatch, RestOfPass
from hapi.server.sharing.request_share import SOUND_SAMPLES, RequestShare

LOOK_AHEAD_BYTES = 16 << 20
"""Bytes of a part of several COS batches, whose missing samples are computed together."""


class Engine(Protocol):
    """The request's layers on a device, with reserved memory."""

    @property
    def batch(self) -> int:
        """Samples of a forward pass."""

    @property
    def layer_seconds(self) -> tuple[float, ...]:
        """Seconds of each layer so far, if they are timed."""

    def start(self, inputs: torch.Tensor) -> ForwardPass:
        """Begin a forward pass over ``inputs``, [n, ...]."""


@dataclass(eq=False)
class Part:
    """Consecutive samples of a request on their way; rows are places among them."""

    low: int
    high: int
    """Places in the request."""
    labels: LabelArray
    rows: Bytes | None = None
    """Features, uint8 [n, bytes of a sample]; None until some are there."""
    claims: list[tuple[PendingBatch, IntArray]] = field(default_factory=list)
    joined: list[tuple[PendingBatch, list[tuple[int, int]]]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """Rows that are neither there nor in anybody's work."""
    others: dict[PendingBatch, PendingBatch] = field(default_factory=dict)
    """By claim: the claim of samples that are not asked for, in the rest of its forward pass."""
    doubles: list[tuple[int, int]] = field(default_factory=list)
    """Rows of samples that came before in the part, and those rows."""


class Pipeline:
    """Makes the parts of one request. ``load`` is called by one thread at a time, all else by the request's."""

    def __init__(
        self,
        ids: IntArray,
        feeding: Feeding,
        share: RequestShare,
        context: RequestContext,
        *,
        row_bytes: int,
        running: Callable[[], AbstractContextManager[None]],
        open_engine: Callable[[], Engine],
    ) -> None:
        """Make the features of samples ``ids``.

        Args:
            ids: int64 [n].
            feeding: reads and decodes them.
            share: the request's share.
            context: of the request.
            row_bytes: bytes of one sample's features.
            running: marks a block in which the server works.
            open_engine: reserves memory and loads the layers, when they are needed first.
        """
        self._ids = ids
        self._feeding = feeding
        self._share = share
        self._context = context
        self._row_bytes = row_bytes
        self._running = running
        self._open_engine = open_engine
        self.engine: Engine | None = None
        """None until it is needed."""
        self.largest = 0
        """Largest batch that fitted."""

    def open(self) -> Engine:
        """Return the engine, which is opened now if it was not before."""
        if self.engine is None:
            self.engine = self._open_engine()
        return self.engine

    def parts(self, ranges: Sequence[SampleRange]) -> Iterator[SampleRange]:
        """Yield the parts, each of one or several of ``ranges``, which follow each other."""
        start = 0
        while start < len(ranges):
            stop = start + 1
            if self._share.shares and self.engine is not None:
                stop = self._together(ranges, start, self.engine.batch)
            yield ranges[start][0], ranges[stop - 1][1]
            start = stop

    def _together(self, ranges: Sequence[SampleRange], start: int, batch: int) -> int:
        """The end of the ranges from ``start`` on whose missing samples are one forward pass at most."""
        missing, stop = 0, start
        while stop < len(ranges):
            low, high = ranges[stop]
            missing += self._share.missing(self._ids[low:high])
            nbytes = (high - ranges[start][0]) * self._row_bytes
            if stop > start and (missing > batch or nbytes > LOOK_AHEAD_BYTES):
                break
            stop += 1
        return stop

    def load(self, part_range: SampleRange) -> Part:
        """Read what is there of a part, and load what this request computes of it."""
        low, high = part_range
        with self._running():
            part = Part(low, high, self._feeding.labels(low, high))
            rows = self._first_rows(part)
            part.missing = self._read(part, rows)
            if self.engine is not None:
                self._divide(part, self.engine, join=True)
                for pending, claimed in part.claims:
                    self._load(part, pending, claimed, self.engine)
        return part

    def begin(self, part: Part) -> Callable[[], str]:
        """Begin the forward passes of a loaded part; return what tells the stage of the first one."""
        begun = [pending.begin() for pending, _ in part.claims]
        for started in begun:
            if started is not None:
                return started.stage
        return str

    def finish(self, part: Part) -> memoryview:
        """Return the features of a part that was begun; what others fail to compute is computed here.

        Raises:
            HapiError: a sample cannot be read, or a pass failed.
        """
        self._collect(part)
        for join in (True, False):
            if not part.missing:
                break
            engine = self.open()
            with self._running():
                part.missing = self._read(part, part.missing)
                self._divide(part, engine, join=join)
            for pending, claimed in part.claims:
                with self._running():
                    self._load(part, pending, claimed, engine)
                    pending.begin()
                self._compute(part, pending, claimed)
            part.claims.clear()
            self._collect(part)
        if part.rows is None:
            return memoryview(bytearray())
        for row, source in part.doubles:
            part.rows[row] = part.rows[source]
        return part.rows.reshape(-1).data

    # -- steps -----------------------------------------------------------------------------------------------

    def _first_rows(self, part: Part) -> list[int]:
        """Rows of the part's samples, each sample once."""
        ids = self._ids[part.low : part.high]
        first, inverse = np.unique(ids, return_index=True, return_inverse=True)[1:]
        if len(first) == len(ids):
            return list(range(len(ids)))
        sources = first[inverse].tolist()
        part.doubles = [(row, source) for row, source in enumerate(sources) if row != source]
        return sorted(first.tolist())

    def _read(self, part: Part, rows: list[int]) -> list[int]:
        """Read those of ``rows`` that are there; return the others."""
        if not self._share.shares:
            return rows
        ids = self._ids[part.low : part.high][rows]
        with self._context.clock.stage("read"):
            out = np.empty((len(ids), self._row_bytes), dtype=np.uint8)
            found = self._share.read(ids, out)
        if part.rows is None and found.all():
            part.rows = out if len(ids) == part.high - part.low else None
        if found.any() and part.rows is not out:
            self._rows_of(part)[np.array(rows)[found]] = out[found]
        return [row for row, was_read in zip(rows, found.tolist(), strict=True) if not was_read]

    def _divide(self, part: Part, engine: Engine, *, join: bool) -> None:
        """Claim the part's missing samples, or join those that others compute."""
        rows = np.array(part.missing, dtype=np.int64)
        if not len(rows):
            return
        ids = self._ids[part.low : part.high][rows]
        with self._share.dividing():
            taken = self._share.take(ids, engine.batch, join=join)
            part.claims = [(pending, rows[places]) for pending, places in taken.claims]
            if self._sound(engine):
                for pending, claimed in part.claims:
                    self._fill_up(part, pending, len(claimed))
        part.joined = [
            (pending, [(int(rows[place]), other) for place, other in pairs])
            for pending, pairs in taken.joined.items()
        ]
        part.missing = rows[taken.kept].tolist()  # which came in the moment since they were looked for

    def _sound(self, engine: Engine) -> bool:
        """Whether passes have so many samples that their features may be shared; those that lack some are filled."""
        return self._share.shares and min(len(self._ids), engine.batch) >= SOUND_SAMPLES

    def _fill_up(self, part: Part, pending: PendingBatch, count: int) -> None:
        """Claim samples that nobody has yet for the rest of a pass, of which others left too few.

        Without them the rest is repeats, which is work for nothing. They are claimed before anything is loaded, and
        before another request takes samples, so that one pass at most lacks some in the end.

        Args:
            part: the part that the pass is for.
            pending: the pass's claim.
            count: samples of that claim.
        """
        room = SOUND_SAMPLES - count
        if room > 0 and count < part.high - part.low:
            others = self._share.claim_others(self._feeding.count, room, self._feeding.fits_memory)
            if others is not None:
                part.others[pending] = others

    def _load(self, part: Part, pending: PendingBatch, rows: IntArray, engine: Engine) -> None:
        try:
            inputs = self._feeding.load(part.low + rows, SOUND_SAMPLES if self._sound(engine) else 0)
            if pending in part.others:
                self._load_others(part, pending, len(rows), inputs)
        except BaseException:
            self._share.fail(pending)
            if pending in part.others:
                self._share.fail(part.others.pop(pending))
            raise
        pending.loaded(lambda: engine.start(inputs))
        others = part.others.get(pending)
        if others is not None:
            others.loaded(lambda: RestOfPass(pending.begin(), len(rows), len(others.ids)))

    def _load_others(self, part: Part, pending: PendingBatch, first: int, inputs: torch.Tensor) -> None:
        """Load the samples that fill a pass into ``inputs``, [n, ...], from ``first`` on, where repeats are.

        Samples that cannot be read are given up, and the repeats stay.
        """
        others = part.others[pending]
        room = torch.empty_like(inputs[first : first + len(others.ids)])
        if self._feeding.load_others(others.ids, room):
            inputs[first : first + len(others.ids)] = room
        else:
            self._share.fail(part.others.pop(pending))

    def _collect(self, part: Part) -> None:
        """Wait for the claims of the part, its own first."""
        for pending, rows in part.claims:
            self._compute(part, pending, rows)
        part.claims.clear()
        for pending, pairs in part.joined:
            with self._context.clock.stage("device_wait"):
                features = pending.wait(self._context.interest)
            places = [place for _, place in pairs]
            waited = [row for row, _ in pairs]
            if features is None:
                part.missing += waited
            else:
                self._rows_of(part)[waited] = features[places]
                self._share.counts.add("joined", len(waited))
        part.joined.clear()

    def _compute(self, part: Part, pending: PendingBatch, rows: IntArray) -> None:
        begun = pending.begin()
        if begun is None:
            part.missing += rows.tolist()
            self._share.fail(pending)
            if pending in part.others:
                self._share.fail(part.others.pop(pending))
            return
        with self._running():
            whole = begun.features()
            fitted = begun.fitted()
        self.largest = max(self.largest, fitted)
        self._share.counts.add("computed", len(whole))
        features = whole[: len(rows)]
        self._share.publish(pending, features, part.labels[rows], fitted)
        others = part.others.pop(pending, None)
        if others is not None:
            unasked = whole[len(rows) : len(rows) + len(others.ids)]
            self._share.publish(others, unasked, self._feeding.labels_of(others.ids), fitted)
        if part.rows is None and len(rows) == part.high - part.low:
            part.rows = features  # in their order
        else:
            self._rows_of(part)[rows] = features

    def _rows_of(self, part: Part) -> Bytes:
        if part.rows is None:
            part.rows = np.empty((part.high - part.low, self._row_bytes), dtype=np.uint8)
        return part.rows
