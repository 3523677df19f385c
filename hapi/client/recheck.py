"""``--recheck N``: some samples of each pass are computed here too, and a server with false answers is
dropped.

The system's own randomness draws the samples, so that a server cannot know where to be honest: N of them, and
each other one with a chance that stays the same however many were compared. Their stored samples are
requested only after a batch has come, from another server where there is one. The frozen layers' result here
must be the features that were sent: the same bits, or those of another order of summation (another COS batch,
another device).

The servers' own words tell which one is wrong. A server is, if its features are not those of its own stored
samples. Two servers with different stored samples or labels need a third; without one the run stops. A single
server that lies in the same way about samples, labels and features is not found out.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import IntArray
from hapi.client.job_context import JobContext
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.prefetcher import Batch, Fetched
from hapi.client.loading.receiver import checked_samples, stored_buffers
from hapi.client.memory import FrozenSuffix, MemoryBudget, MicroBatch
from hapi.client.transport.trouble import is_servers_fault
from hapi.data.transforms.pipeline import input_batch
from hapi.errors import DataError, HapiError, WireError
from hapi.wire import messages
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import StreamEnd, byte_view
from hapi.wire.labels import equal_labels
from hapi.wire.samples import Samples
from hapi.wire.transport.base import Transport

log = logging.getLogger("hapi.client")

TOLERANCE = 1e-4
"""Largest difference, over the largest feature, that is rounding: ten times what COS batches differ by on a CPU."""
ROUGH_TOLERANCE = 2e-2
"""The same tolerance for layers in 16 bits or with TF32."""
MICRO_BATCH = 64
Rows = npt.NDArray[np.int64]


class ServerLeftError(Exception):
    """A server is not asked any more; its requests under way must be repeated."""


class Recheck:
    """Compares features from servers with those computed here from stored samples. Not thread-safe."""

    def __init__(self, job_context: JobContext, samples: int, budget: MemoryBudget) -> None:
        """Recheck at least ``samples`` of each pass; the weights of all frozen layers are here, within
        ``budget``.
        """
        self._job_context, self._samples, self._budget = job_context, samples, budget
        self._tolerance = ROUGH_TOLERANCE if job_context.rough else TOLERANCE
        self._random = np.random.default_rng(secrets.randbits(128))
        self._drawn: dict[int, Rows] = {}
        """Rows to compare, by number of the batch."""
        self._prefixes: dict[int, FrozenSuffix] = {}
        self.compared = 0
        """Samples that were as they should be."""
        self.largest = 0.0
        """Largest difference of theirs, over the largest feature."""
        self.left: list[str] = []
        """Servers that were left."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures for a run's report."""
        return {
            "samples": self.compared,
            "largest_difference": self.largest,
            "tolerance": self._tolerance,
            "left": self.left,
        }

    def begin(self, batches: Sequence[IntArray]) -> None:
        """Draw the samples of a pass over ``batches``."""
        ends = np.cumsum([len(batch) for batch in batches])
        total = int(ends[-1]) if len(ends) else 0
        at_least = min(self._samples, total)
        more = int(self._random.binomial(total - at_least, at_least / total)) if total else 0
        chosen = np.sort(self._random.choice(total, at_least + more, replace=False))
        numbers = np.searchsorted(ends, chosen, side="right")
        self._drawn = {
            int(n): chosen[numbers == n] - int(ends[n]) + len(batches[n]) for n in np.unique(numbers)
        }

    def check(self, number: int, batch: Batch) -> None:
        """Compare the drawn samples of batch ``number`` that servers sent, before the batch is used.

        Raises:
            ServerLeftError: a server gave false answers and others remain.
            DataError: no other server remains, or it is unknown which one is wrong.
        """
        drawn, fetched = self._drawn.get(number), batch.fetched
        if drawn is None or fetched is None:
            return
        rows = np.flatnonzero(np.isin(fetched.rows, drawn))
        for server, its in _by_server(fetched, rows):
            self._compare(fetched, its, server)
        del self._drawn[number]

    def _compare(self, batch: Fetched, rows: Rows, server: str | None) -> None:
        stored, witness = self._witnessed(batch.job, batch.ids[rows], server)
        problem = self._difference(batch, rows, stored)
        if problem is None:
            return
        reason = f"split {batch.job.split}: {problem}"
        if server is None:
            raise DataError(
                f"--recheck: the sample cache and {witness} differ at {reason}; empty it with 'hapi cache clear'"
            )
        self._stop_using(self._wrong_server(batch.job, batch.ids[rows], stored, server, witness), reason)

    def _difference(self, batch: Fetched, rows: Rows, stored: Samples) -> str | None:
        """Difference from the stored samples, and its size; None for nothing beyond rounding."""
        labels = batch.labels.numpy()[rows]
        if wrong := np.flatnonzero(~equal_labels(labels, stored.labels)).tolist():
            row = wrong[0]
            return f"the label of sample {stored.ids[row]} came as {labels[row]} and is {stored.labels[row]}"
        expected = self._computed(batch.job, stored)
        given = batch.features[torch.from_numpy(rows)]
        same = (given == expected) | (given.isnan() & expected.isnan())
        off = (given.double() - expected.double()).abs().masked_fill(same, 0.0).reshape(len(rows), -1).amax(1)
        size = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
        largest = float(off.max()) / size
        tolerance = self._tolerance if batch.job.split else 0.0  # stored samples were decoded here, both
        if not largest <= tolerance:
            wrong_id = stored.ids[int(off.nan_to_num(torch.inf).argmax())]
            return f"what came for sample {wrong_id} is off by {largest:.2g} of the largest feature"
        self.compared += len(rows)
        self.largest = max(self.largest, largest)
        return None

    def _computed(self, job: ExtractionJob, stored: Samples) -> torch.Tensor:
        """Layers 1..split over stored samples, on the CPU afterwards."""
        inputs = input_batch(stored, job.layout, job.transform)
        if job.split == 0:
            return inputs
        if job.split not in self._prefixes:
            segment = self._job_context.frozen.segment(0, job.split, frozen=True)
            self._prefixes[job.split] = FrozenSuffix(
                segment, job.shape, job.dtype, MicroBatch(MICRO_BATCH), self._job_context.device, self._budget
            )
        return self._prefixes[job.split](inputs).cpu()

    def _witnessed(self, job: ExtractionJob, ids: IntArray, server: str | None) -> tuple[Samples, str]:
        """The stored samples, and which server gave them: another one than ``server`` if any answers."""
        servers = self._job_context.servers
        for other in servers.urls:
            if other != server:
                try:
                    return self._stored(job, ids, other, once=True)
                except HapiError as error:
                    if not is_servers_fault(error):
                        raise
        return self._stored(job, ids, None)

    def _stored(
        self, job: ExtractionJob, ids: IntArray, server: str | None, once: bool = False
    ) -> tuple[Samples, str]:
        """The stored samples from ``server`` (None: any), and which one that was."""
        request = messages.SamplesRequest(dataset=job.dataset, ids=ids, job=job.id).to_json()

        def attempt(transport: Transport) -> tuple[Samples, str]:
            read = transport.stream(messages.SAMPLES_PATH, request, lambda reader: _read(reader, job, ids))
            return read, transport.url

        return self._job_context.servers.run(attempt, only=server, once=once)

    def _wrong_server(
        self, job: ExtractionJob, ids: IntArray, stored: Samples, server: str, witness: str
    ) -> str:
        """The wrong one of the two servers; :class:`DataError` when that cannot be told."""
        if witness == server:
            return server
        own, _ = self._stored(job, ids, server)
        if _equal(own, stored):
            return server
        for third in self._job_context.servers.urls:
            if third not in (server, witness):
                said, _ = self._stored(job, ids, third)
                if _equal(said, stored):
                    return server
                if _equal(said, own):
                    return witness
        raise DataError(
            f"--recheck: {server} and {witness} have different samples or labels for the ids "
            f"{', '.join(map(str, ids[:5].tolist()))}; find out which one is damaged ('hapi verify') and leave it away"
        )

    def _stop_using(self, server: str, reason: str) -> None:
        text = f"{server}: its answers are false at {reason}"
        if not self._job_context.servers.leave(server):
            raise DataError(
                f"--recheck: {text}; no other server is left. It lies, its data or layers are damaged, or its "
                "libraries compute otherwise than those here"
            )
        self.left.append(server)
        log.warning("%s; it is not asked any more, and its requests go elsewhere", text)
        raise ServerLeftError(server)


def _by_server(batch: Fetched, rows: Rows) -> Iterator[tuple[str | None, Rows]]:
    """``rows`` by the server that sent them; None: the sample cache."""
    known = np.zeros(len(rows), dtype=bool)
    found: dict[str, list[Rows]] = {}
    for sent, server in batch.origins:
        its = np.isin(rows, sent)
        if its.any():
            found.setdefault(server, []).append(rows[its])
            known |= its
    for server, parts in found.items():
        yield server, np.concatenate(parts)
    if not known.all():
        yield None, rows[~known]


def _read(reader: FrameReader, job: ExtractionJob, ids: IntArray) -> Samples:
    """All stored samples of ``ids`` from an answer's frames."""
    parts: list[Samples] = []
    received: list[npt.NDArray[Any]] = []
    done = 0

    def sink(header: Any) -> list[memoryview]:
        if not len(header.ids) or not np.array_equal(header.ids, ids[done : done + len(header.ids)]):
            raise WireError("the server sent other samples than were asked for, or in another order")
        received[:] = stored_buffers(header, job)
        return [byte_view(buffer) for buffer in received]

    while not isinstance(header := reader.next(sink), StreamEnd):
        parts.append(checked_samples(np.asarray(header.ids), *received))
        done += len(header.ids)
    if done != len(ids):
        raise WireError(f"the stream ended {len(ids) - done} samples early")
    return _joined(parts)


def _joined(parts: Sequence[Samples]) -> Samples:
    shifts = np.cumsum([0, *(len(part.data) for part in parts)])
    return Samples(
        ids=np.concatenate([part.ids for part in parts]),
        data=np.concatenate([part.data for part in parts]),
        offsets=np.concatenate([[0], *(p.offsets[1:] + s for p, s in zip(parts, shifts[:-1], strict=True))]),
        labels=np.concatenate([part.labels for part in parts]),
    )


def _equal(one: Samples, other: Samples) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in ((one.data, other.data), (one.offsets, other.offsets), (one.labels, other.labels))
    )
