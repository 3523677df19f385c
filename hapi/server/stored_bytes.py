"""Stored bytes as they are: samples of a data set (split 0) and tensors of a pushed model.

What is long is read twice, piece by piece: first it is held against its checksum, then it is sent. So nothing of it is
sent before all of it was found whole, and no more than two pieces of it are in memory. If it is another one the second
time, its last piece is not sent: the frame stays unfinished, and is not believed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hapi.arrays import IntArray
from hapi.data.dataset import Dataset
from hapi.data.reading.reader import AccessHint
from hapi.errors import BadRequestError, StoreError
from hapi.process.threads import Threads
from hapi.repository.stored import StoredModel
from hapi.server.device.host_memory import HostMemory, HostNeed
from hapi.server.prefetch import Prefetcher
from hapi.server.requests import Account, RequestClock
from hapi.server.status import Progress
from hapi.waiting import moved
from hapi.wire import messages
from hapi.wire.frames import (
    END_BYTES,
    NO_IDS,
    Buffer,
    FrameHeader,
    Pieces,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    frame_bytes,
)
from hapi.wire.samples import Samples

Frame = Iterable[Buffer]

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


@dataclass(frozen=True)
class Answering:
    """What the answer to one request works with."""

    clock: RequestClock
    cancelled: threading.Event
    progress: Progress
    latest: float
    """``time.monotonic`` until which it waits for memory."""

    def step(self) -> None:
        """Tell that the work goes on; :class:`BadRequestError` once nobody wants it."""
        if self.cancelled.is_set():
            raise BadRequestError("the client went away")
        moved()


class StoredBytes:
    """Answers requests for what is stored; thread-safe."""

    def __init__(self, account: Account, loaders: Threads, host: HostMemory) -> None:
        self._account = account
        self._loaders = loaders
        self._host = host
        self.piece_bytes = max(LEAST_FRAME, min(FRAME_BYTES, host.share // HELD))
        """Stored bytes of a frame and of a piece."""

    def samples(
        self, dataset: Dataset, ids: IntArray, near: AccessHint | None, to: Answering
    ) -> Iterator[Any]:
        """First the answer's length in bytes, then its frames. ``near`` is for :meth:`Dataset.read`."""
        begun, limit = self._account.marks(to.clock), self.piece_bytes
        places = dataset.locate(ids)
        lengths = places.length
        frames = by_bytes(lengths, limit, LONG * limit)
        headers = [_stored_header(ids[low:high], int(lengths[low:high].sum())) for low, high in frames]

        def load(frame: tuple[int, int]) -> Samples | Long:
            low, high = frame
            with self._account.busy.running(), to.clock.stage("read"):
                if lengths[low] > LONG * limit:
                    sample = int(ids[low])
                    check = dataset.checked(sample, limit, to.step)
                    return Long(int(lengths[low]), check, lambda at, out: dataset.read_part(sample, at, out))
                return dataset.read(ids[low:high], near, located=places.part(low, high))

        def frame_of(number: int, found: Samples | Long) -> Frame:
            header = headers[number]
            if isinstance(found, Samples):
                parts = (found.data, found.offsets, found.labels)
                return data_frame(header, [byte_view(part) for part in parts])
            offsets, labels = np.array([0, found.nbytes], np.int64), dataset.labels(header.ids)
            return data_frame(header, [self._pieces(found, to), byte_view(offsets), byte_view(labels)])

        def done(found: Samples | Long) -> int:
            return len(found) if isinstance(found, Samples) else 1

        yield from self._frames("samples", headers, frames, load, frame_of, done, to)
        yield self._end(len(frames), len(ids), to, begun)

    def tensors(self, model: StoredModel, names: Sequence[str], to: Answering) -> Iterator[Any]:
        """First the answer's length in bytes, then its frames, one for each tensor of ``names``."""
        begun, limit = self._account.marks(to.clock), self.piece_bytes
        headers = [FrameHeader(NO_IDS, (model.tensor_spec(name),)) for name in names]

        def load(name: str) -> Buffer | Long:
            with self._account.busy.running(), to.clock.stage("read"):
                nbytes = model.tensor_spec(name).nbytes
                if nbytes > LONG * limit:
                    check = model.checked(name, limit, to.step)
                    return Long(nbytes, check, lambda at, out: model.read_part(name, at, out))
                tensor: Buffer = model.read_tensor(name)
                return tensor

        def frame_of(number: int, found: Buffer | Long) -> Frame:
            payload = self._pieces(found, to) if isinstance(found, Long) else found
            return data_frame(headers[number], [payload])

        yield from self._frames("tensors", headers, names, load, frame_of, lambda found: 1, to)
        yield self._end(len(headers), 0, to, begun)

    def _frames(
        self,
        kind: str,
        headers: Sequence[FrameHeader],
        items: Sequence[Any],
        load: Callable[[Any], Any],
        frame_of: Callable[[int, Any], Frame],
        done: Callable[[Any], int],
        to: Answering,
    ) -> Iterator[Any]:
        """The length of the answer, then a frame for each of ``items``, within a claim of the host's memory."""
        nbytes = self._need(headers)
        with self._host.claim(kind, HostNeed(least=nbytes, most=nbytes), to.cancelled, to.latest):
            yield sum(frame_bytes(h) for h in headers) + END_BYTES
            with Prefetcher(self._loaders, load, items, to.cancelled) as loaded:
                for number, found in enumerate(loaded):
                    to.progress.done += done(found)
                    yield frame_of(number, found)

    def _need(self, headers: Sequence[FrameHeader]) -> int:
        """Bytes of two frames, the one that is sent and the one that is read ahead."""
        bound = LONG * self.piece_bytes
        whole = [h.payload_bytes for h in headers if h.tensors[0].nbytes <= bound]
        pieces = 3 if len(whole) < len(headers) else 0  # two that are sent, one that is checked
        return 2 * max(whole, default=0) + pieces * self.piece_bytes

    def _pieces(self, long: Long, to: Answering) -> Pieces:
        return Pieces(long.nbytes, self._sent(long, to))

    def _sent(self, long: Long, to: Answering) -> Iterator[Buffer]:
        size = self.piece_bytes

        def load(start: int) -> memoryview:
            piece = memoryview(bytearray(min(size, long.nbytes - start)))
            with self._account.busy.running(), to.clock.stage("read"):
                long.read(start, piece)
            return piece

        digest = xxhash.xxh3_64()
        sent = 0
        with Prefetcher(self._loaders, load, range(0, long.nbytes, size), to.cancelled) as pieces:
            for piece in pieces:
                digest.update(piece)
                sent += len(piece)
                if sent == long.nbytes and digest.intdigest() != long.digest:
                    raise StoreError("a stored object changed while it was sent; ask again")
                yield piece

    def _end(self, frames: int, samples: int, to: Answering, begun: Any) -> list[bytes]:
        report = self._account.report(begun, to.clock)
        return [end_frame(StreamEnd(frames, samples, report.to_json()))]


def _stored_header(chunk: IntArray, total: int) -> FrameHeader:
    return FrameHeader(
        chunk,
        (
            TensorSpec(messages.STORED, "uint8", (total,)),
            TensorSpec(messages.OFFSETS, "int64", (len(chunk) + 1,)),
            TensorSpec(messages.LABELS, "int64", (len(chunk),)),
        ),
    )


def by_bytes(lengths: IntArray, limit: int, alone: int) -> list[tuple[int, int]]:
    """Consecutive samples of about ``limit`` stored bytes: the first of each, and the one after the last.

    Samples of more than ``alone`` bytes share with no other.
    """
    before = np.cumsum(lengths) - lengths
    group, long = before // limit, lengths > alone
    apart = (group[1:] != group[:-1]) | long[1:] | long[:-1]
    cuts = (np.flatnonzero(apart) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(lengths)], strict=True))
