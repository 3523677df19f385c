"""Hashing of a model's tensors, each by one thread and several side by side, in the order in which they are stored."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from itertools import islice

from hapi.errors import DataError
from hapi.models.graph.digest import ContentDigest
from hapi.process.processors import processor_count
from hapi.process.threads import Threads, Work
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import SourceTensor
from hapi.repository.packs.layout import HashedLayer, HashedTensor

HashProgress = Callable[[int, int], None]
"""Called with the bytes that were hashed and those of all tensors, by several threads, one at a time."""
MOST_THREADS = 8
"""Each holds a piece of a file in memory."""
_BATCH_BYTES = 4 << 20
"""Bytes of tensors that a thread gets at once, but for a larger one: it hashes them in 10 ms, and a hand-over takes a
few hundredths of that."""
_AHEAD = 2
"""Batches for each thread that are under way or done before they are needed."""


class _StoppedError(Exception):
    """Ends a thread whose tensors are not needed any more."""


class _Count:
    """Bytes that were hashed so far, by all threads."""

    def __init__(self, total: int, progress: HashProgress) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()
        self._stopped = False

    def add(self, nbytes: int) -> None:
        """Count bytes; :class:`_StoppedError` after :meth:`stop`."""
        with self._lock:
            if self._stopped:
                raise _StoppedError
            self._done += nbytes
            self._progress(self._done, self._total)

    def stop(self) -> None:
        """Let no thread go on, and report nothing more."""
        with self._lock:
            self._stopped = True


def hashed_layers(
    layers: Sequence[Sequence[SourceTensor]], freeze: int | None, progress: HashProgress
) -> Generator[HashedLayer, None, None]:
    """Yield layers with the digests of their tensors, in their order. Once it is closed, nothing is read any more.

    Args:
        layers: tensors by layer, each once.
        freeze: number of the layer after which a pack ends, from 1; None for no such layer.
        progress: told of it.

    Raises:
        DataError: a tensor has more or fewer bytes than its form says.
    """
    with closing(_hashed([tensor for layer in layers for tensor in layer], progress)) as tensors:
        for number, layer in enumerate(layers, start=1):
            yield HashedLayer(tuple(islice(tensors, len(layer))), ends_pack=number == freeze)


def _hashed(tensors: Sequence[SourceTensor], progress: HashProgress) -> Generator[HashedTensor, None, None]:
    count = _Count(sum(tensor.nbytes for tensor in tensors), progress)
    batches = list(_batches(tensors))
    size = min(processor_count(), MOST_THREADS, len(batches))
    if size < 2:
        yield from (_hash(tensor, count) for tensor in tensors)
        return
    threads = Threads(size, "hapi-hashing")
    running: deque[Work[list[HashedTensor]]] = deque()
    try:
        for batch in batches:
            running.append(threads.submit(_hash_all, batch, count))
            if len(running) >= _AHEAD * size:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    finally:
        count.stop()
        threads.close()
        wait([work for work in running if not work.cancel()])


def _batches(tensors: Sequence[SourceTensor]) -> Iterator[list[SourceTensor]]:
    batch: list[SourceTensor] = []
    nbytes = 0
    for tensor in tensors:
        if batch and nbytes + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _hash_all(tensors: Sequence[SourceTensor], count: _Count) -> list[HashedTensor]:
    return [_hash(tensor, count) for tensor in tensors]


def _hash(tensor: SourceTensor, count: _Count) -> HashedTensor:
    digest, checksum, nbytes = ContentDigest(), TensorChecksum(), 0
    for piece in tensor.pieces():
        digest.update(piece)
        checksum.update(piece)
        nbytes += len(piece)
        count.add(len(piece))
    if nbytes != tensor.nbytes:
        raise DataError(f"tensor {tensor.name!r} has {nbytes} bytes, {tensor.nbytes} were expected")
    return HashedTensor(tensor, digest.hexdigest(), checksum.hexdigest())
