"""Stored bytes, unchanged: samples of a dataset (split 0) and tensors of a pushed model.

Long ones are read twice, piece by piece: first to compare the checksum, then to send. So nothing is sent
before all of it was found whole, and at most two pieces are in memory. If it differs the second time, its
last piece is not sent: the frame stays unfinished, and the client rejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from hapi.arrays import IntArray
from hapi.data.dataset import Dataset
from hapi.data.reading.reader import AccessHint
from hapi.errors import StoreError
from hapi.process.threads import Threads
from hapi.repository.stored import StoredModel
from hapi.server.account import Account, Marks
from hapi.server.context import RequestContext
from hapi.server.device.host_memory import HostMemory, HostNeed
from hapi.server.frame_stream import Frames, FrameStream
from hapi.server.prefetch import Prefetcher
from hapi.wire import messages
from hapi.wire.frames import (
    END_BYTES,
    NO_IDS,
    Buffer,
    FrameHeader,
    StreamedBytes,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    frame_bytes,
)
from hapi.wire.labels import LabelForm

FRAME_BYTES = 8 << 20
"""Stored bytes per frame of split 0, and of a piece: so many that headers do not count, so few that work overlaps."""
LONG = 2
"""Samples and tensors of more than so many pieces are sent piece by piece."""
LEAST_FRAME = 64 << 10
HELD = 8
"""Frames' bytes that a request holds at most: two frames of up to three pieces, and two pieces of a long sample."""


@dataclass(frozen=True)
class Long:
    """A sample or tensor that was found whole, and is read again to be sent."""

    nbytes: int
    digest: int
    """xxh3-64 of all of it, as it was found."""
    read: Callable[[int, memoryview], None]
    """``read(start, out)``"""


Payload = Sequence[Buffer | Long]
"""The tensors of one frame."""


class _Stored(Protocol):
    """Requested objects, frame by frame."""

    kind: str
    """One of :data:`hapi.server.device.host_memory.HOST_KINDS`."""
    headers: Sequence[FrameHeader]
    samples: int

    def load(self, frame: int, step: Callable[[], None]) -> Payload:
        """Read what goes into frame number ``frame``; ``step()`` is called before each piece of what is long."""

    def count(self, frame: int) -> int:
        """Samples, or tensors, of the frame."""


class StoredBytes:
    """Answers requests for stored bytes; thread-safe."""

    def __init__(self, account: Account, loaders: Threads, host: HostMemory) -> None:
        self._account = account
        self._loaders = loaders
        self._host = host
        self.part_bytes = max(LEAST_FRAME, min(FRAME_BYTES, host.share // HELD))
        """Stored bytes of a frame and of a piece."""

    def samples(
        self, dataset: Dataset, ids: IntArray, hint: AccessHint | None, context: RequestContext
    ) -> FrameStream:
        """Answer with stored samples.

        Args:
            dataset: that has them.
            ids: of the samples, int64 [n].
            hint: for :meth:`Dataset.read_at`.
            context: of the request.
        """
        return self._stream(_StoredSamples(dataset, ids, hint, self.part_bytes), context)

    def tensors(self, model: StoredModel, names: Sequence[str], context: RequestContext) -> FrameStream:
        """Answer with the tensors ``names``, a frame for each."""
        return self._stream(_StoredTensors(model, names, self.part_bytes), context)

    def _stream(self, stored: _Stored, context: RequestContext) -> FrameStream:
        """The frames of ``stored``, within a claim of the host's memory."""
        begun, nbytes = self._account.marks(context.clock), self._need(stored.headers)
        with ExitStack() as resources:
            need = HostNeed(min_bytes=nbytes, max_bytes=nbytes)
            resources.enter_context(self._host.reserve(stored.kind, need, context.interest))
            return FrameStream(
                context,
                sum(frame_bytes(h) for h in stored.headers) + END_BYTES,
                self._frames(stored, context, begun),
                samples=stored.samples,
                resources=resources.pop_all(),
            )

    def _frames(self, stored: _Stored, context: RequestContext, begun: Marks) -> Frames:
        def load(number: int) -> Payload:
            with self._account.busy.running(), context.clock.stage("read"):
                return stored.load(number, context.step)

        with Prefetcher(self._loaders, load, range(len(stored.headers)), context.interest) as loaded:
            for number, payload in enumerate(loaded):
                context.progress.done += stored.count(number)
                tensors = [self._parts(p, context) if isinstance(p, Long) else p for p in payload]
                yield data_frame(stored.headers[number], tensors, context.wire)
        report = self._account.report(begun, context)
        end = StreamEnd(len(stored.headers), stored.samples, report.to_json())
        yield [end_frame(end, version=context.wire)]

    def _need(self, headers: Sequence[FrameHeader]) -> int:
        """Bytes of two frames, the one that is sent and the one that is read ahead."""
        bound = LONG * self.part_bytes
        whole = [h.payload_bytes for h in headers if h.tensors[0].nbytes <= bound]
        parts = 3 if len(whole) < len(headers) else 0  # two that are sent, one that is checked
        return 2 * max(whole, default=0) + parts * self.part_bytes

    def _parts(self, long: Long, context: RequestContext) -> StreamedBytes:
        return StreamedBytes(long.nbytes, self._sent(long, context))

    def _sent(self, long: Long, context: RequestContext) -> Iterator[Buffer]:
        size = self.part_bytes

        def load(start: int) -> memoryview:
            part = memoryview(bytearray(min(size, long.nbytes - start)))
            with self._account.busy.running(), context.clock.stage("read"):
                long.read(start, part)
            return part

        digest = xxhash.xxh3_64()
        sent = 0
        with Prefetcher(self._loaders, load, range(0, long.nbytes, size), context.interest) as parts:
            for part in parts:
                digest.update(part)
                sent += len(part)
                if sent == long.nbytes and digest.intdigest() != long.digest:
                    raise StoreError("a stored object changed while it was sent; ask again")
                yield part


class _StoredSamples:
    """Samples, several to a frame, but for long ones."""

    kind = "samples"

    def __init__(self, dataset: Dataset, ids: IntArray, hint: AccessHint | None, part_bytes: int) -> None:
        self._dataset = dataset
        self._hint = hint
        self._part_bytes = part_bytes
        self._located = dataset.locate(ids)
        lengths = self._located.length
        self._sample_ranges = by_bytes(lengths, part_bytes, LONG * part_bytes)
        self.headers: Sequence[FrameHeader] = [
            _stored_header(ids[low:high], int(lengths[low:high].sum()), dataset.label_form)
            for low, high in self._sample_ranges
        ]
        self.samples = len(ids)

    def load(self, frame: int, step: Callable[[], None]) -> Payload:
        """Bytes, offsets and labels of the frame's samples."""
        dataset, located = self._dataset, self._located.part(*self._sample_ranges[frame])
        length = int(located.length[0])
        if length <= LONG * self._part_bytes:
            samples = dataset.read_at(located, self._hint)
            return [byte_view(part) for part in (samples.data, samples.offsets, samples.labels)]
        digest = dataset.checked(located, self._part_bytes, step)
        long = Long(length, digest, lambda start, out: dataset.read_part(located, start, out))
        return [long, byte_view(np.array([0, length], np.int64)), byte_view(dataset.labels_at(located))]

    def count(self, frame: int) -> int:
        """Samples of the frame."""
        low, high = self._sample_ranges[frame]
        return high - low


class _StoredTensors:
    """Tensors of a pushed model, one to a frame."""

    kind = "tensors"
    samples = 0

    def __init__(self, model: StoredModel, names: Sequence[str], part_bytes: int) -> None:
        self._model = model
        self._names = names
        self._part_bytes = part_bytes
        self.headers: Sequence[FrameHeader] = [
            FrameHeader(NO_IDS, (model.tensor_spec(name),)) for name in names
        ]

    def load(self, frame: int, step: Callable[[], None]) -> Payload:
        """Bytes of the frame's tensor."""
        model, name = self._model, self._names[frame]
        nbytes = model.tensor_spec(name).nbytes
        if nbytes <= LONG * self._part_bytes:
            return [model.read_tensor(name)]
        digest = model.checked(name, self._part_bytes, step)
        return [Long(nbytes, digest, lambda start, out: model.read_part(name, start, out))]

    def count(self, frame: int) -> int:
        """One tensor."""
        return 1


def _stored_header(chunk: IntArray, total: int, form: LabelForm) -> FrameHeader:
    return FrameHeader(
        chunk,
        (
            TensorSpec(messages.STORED, "uint8", (total,)),
            TensorSpec(messages.OFFSETS, "int64", (len(chunk) + 1,)),
            form.spec(len(chunk)),
        ),
    )


def by_bytes(lengths: IntArray, limit: int, alone: int) -> list[tuple[int, int]]:
    """Divide consecutive samples into pieces of about ``limit`` stored bytes.

    Args:
        lengths: stored bytes of each sample, [n].
        limit: bytes of a piece.
        alone: a sample of more bytes is a piece of its own.

    Returns:
        The first sample of each piece, and the one after its last.
    """
    before = np.cumsum(lengths) - lengths
    group, long = before // limit, lengths > alone
    apart = (group[1:] != group[:-1]) | long[1:] | long[:-1]
    cuts = (np.flatnonzero(apart) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(lengths)], strict=True))
