"""Bytes of packs on their way: a file's range goes by the kernel, others piece by piece through bounded memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack

from hapi.errors import StoreError
from hapi.process.threads import Threads
from hapi.repository.packs.place import pack_key
from hapi.server.account import Account
from hapi.server.context import RequestContext
from hapi.server.frame_stream import FileRange, Frames, FrameStream
from hapi.server.prefetch import Prefetcher
from hapi.store.base import ObjectStore

STREAMS = 6
"""Packs sent at a time to clients, and as many to other servers. Both have slots and threads of their own: whoever
holds one of another kind may wait for a pack of another server, which must not wait for this one in turn."""
PIECE_BYTES = 2 << 20
"""Bytes read at a time where there is no file."""
FILE_BYTES = 32 << 20
"""Bytes handed to the kernel at a time where there is one."""
STREAM_MEMORY = 2 * STREAMS * 3 * PIECE_BYTES
"""Bytes of all streams together: of each a piece that is sent, one that is ready, one that is read."""
SIZES_KEPT = 4096


class PackStreams:
    """Reads packs for answers; thread-safe, every method may block."""

    def __init__(
        self, store: ObjectStore, own: ObjectStore, account: Account, threads: Callable[[str], Threads]
    ) -> None:
        """Read packs.

        Args:
            store: for a client; may ask other servers.
            own: for another server; asks none.
            account: of the server.
            threads: makes a pool of a name, for reading ahead.
        """
        self._stores = {False: store, True: own}
        self._account = account
        self._loaders = {False: threads("hapi-pack-read"), True: threads("hapi-peer-read")}
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        """Stop the threads."""
        for loaders in self._loaders.values():
            loaders.close()

    def size(self, pack: str, needed: int = 0) -> int:
        """Return the bytes of a pack; ``NotFoundError`` for an unknown id.

        Args:
            pack: its id.
            needed: bytes that it should have: one that was shorter may have been repaired since.
        """
        with self._lock:
            known = self._sizes.get(pack)
        if known is None or known < needed:
            known = self._stores[True].size(pack_key(pack))
            with self._lock:
                self._sizes[pack] = known
                if len(self._sizes) > SIZES_KEPT:
                    self._sizes.popitem(last=False)
        return known

    def stream(
        self, pack: str, start: int, stop: int, context: RequestContext, *, peer: bool, plain: bool
    ) -> FrameStream:
        """Return the bytes ``start..stop`` (excluded) of a pack.

        Args:
            pack: its id.
            start: first byte.
            stop: end, excluded.
            context: of the request.
            peer: another server asks, so that no third is asked.
            plain: the connection is not encrypted, so that the kernel can send files.
        """
        store, key = self._stores[peer], pack_key(pack)
        context.clock.begin()
        with ExitStack() as resources:
            descriptor = store.open_file(key) if plain else None
            if descriptor is None:
                frames = self._read(
                    store, self._loaders[peer], key, range(start, stop, PIECE_BYTES), stop, context
                )
            else:
                resources.callback(os.close, descriptor)
                if os.fstat(descriptor).st_size < stop:
                    raise StoreError(f"{key} ends before byte {stop}")
                frames = _of_file(descriptor, start, stop)
            return FrameStream(context, stop - start, frames, samples=0, resources=resources.pop_all())

    def _read(
        self,
        store: ObjectStore,
        loaders: Threads,
        key: str,
        starts: range,
        stop: int,
        context: RequestContext,
    ) -> Frames:
        def load(at: int) -> memoryview:
            piece = memoryview(bytearray(min(PIECE_BYTES, stop - at)))
            with self._account.busy.running(), context.clock.stage("read"):
                context.step()
                store.read_into(key, at, piece)
            return piece

        with Prefetcher(loaders, load, starts, context.interest) as pieces:
            for piece in pieces:
                yield [piece]


def _of_file(descriptor: int, start: int, stop: int) -> Frames:
    for at in range(start, stop, FILE_BYTES):
        yield FileRange(descriptor, at, min(FILE_BYTES, stop - at))
