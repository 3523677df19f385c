"""Writing of packs, also of those that are complete while later tensors of their model are still hashed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
from types import TracebackType
from typing import Self

from hapi.errors import NotFoundError
from hapi.process.threads import Threads, Work
from hapi.repository.packs.layout import PackPlan
from hapi.repository.packs.mending import checked_pieces
from hapi.repository.packs.place import pack_key
from hapi.repository.packs.pushes import RunningPush
from hapi.store.base import ObjectStore

_QUEUED = 2
"""Packs that are being written or wait for it: what is hashed far ahead would have to be read from the disk again."""


class _StoppedError(Exception):
    """Ends the writing of a pack that is not needed any more."""


def write_pack(store: ObjectStore, push: RunningPush, pack: PackPlan) -> None:
    """Write a pack of ``push`` unless another push of the same content has just written it.

    Raises:
        DataError: a source has other bytes than when it was hashed.
        LeaseLostError: the push does not count as running any more.
    """
    _write(store, push, pack, _pieces(pack))


def _write(store: ObjectStore, push: RunningPush, pack: PackPlan, pieces: Iterator[memoryview]) -> None:
    push.lease.check()
    if not _has(store, pack):
        store.put_pieces(pack_key(pack.id), pack.size, pieces)


def _has(store: ObjectStore, pack: PackPlan) -> bool:
    try:
        header = memoryview(bytearray(len(pack.header)))
        if store.size(pack_key(pack.id)) != pack.size:
            return False
        store.read_into(pack_key(pack.id), 0, header)
        return header == pack.header
    except NotFoundError:
        return False


def _pieces(pack: PackPlan) -> Iterator[memoryview]:
    yield memoryview(pack.header)
    for tensor in pack.tensors:
        yield from checked_pieces(tensor)


class EarlyPacks:
    """Packs that a thread writes, one after another, before all of their model is known; a context manager.

    They are left as a push leaves them that is killed later: the plan of the whole model finds them in the store, or
    does without them. When the block ends all of them are written. After an error nothing more is.
    """

    def __init__(self, store: ObjectStore, push: RunningPush) -> None:
        self.written = 0
        """Bytes of the tensors in them."""
        self._store, self._push = store, push
        self._threads = Threads(1, "hapi-packs")
        self._running: deque[Work[int]] = deque()
        self._stopped = False

    def write(self, pack: PackPlan) -> None:
        """Have a pack written. Waits for those before it, and raises the error that one of them met."""
        while len(self._running) >= _QUEUED:
            self._collect()
        self._running.append(self._threads.submit(self._write, pack))

    def _collect(self) -> None:
        self.written += self._running.popleft().result()

    def _write(self, pack: PackPlan) -> int:
        condemned = self._push.needs({pack.id}, ())
        if condemned.is_everything or pack.id in condemned.ids.packs:
            return 0  # the plan of the whole model puts its tensors elsewhere, or waits
        _write(self._store, self._push, pack, self._until_stopped(pack))
        return pack.nbytes

    def _until_stopped(self, pack: PackPlan) -> Iterator[memoryview]:
        for piece in _pieces(pack):
            if self._stopped:
                raise _StoppedError
            yield piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._running and error is None:
                self._collect()
        finally:
            self._stopped = True
            self._threads.close()
            wait([work for work in self._running if not work.cancel()])
