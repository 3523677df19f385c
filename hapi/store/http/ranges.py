"""A reader of ranges over HTTP: parallel requests over kept connections, bytes straight into their places."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from hapi.process.threads import Lost, Threads
from hapi.store.base import ReadPart, Then, nothing
from hapi.store.coalesce import Fetch, PartSlice, coalesced, fetch_all
from hapi.wire.transport.http import HttpTransport

PARALLEL = 4
"""Connections of one read."""
MOST_LOST = 8 * PARALLEL
"""Most threads in hung requests whose caller was given up."""
GAP_BYTES = 64 << 10
"""Ranges nearer than this are asked for as one: a request takes about as long as these bytes on a fast network."""
SLICE_BYTES = 64 << 20
"""Most bytes of one request. Each costs the server about 2 ms beside its bytes, which take it as long as 8 MB."""


class HttpRanges:
    """Reads ranges of objects from one server, as :meth:`hapi.store.base.ObjectStore.read_many` does from a store.

    The bytes are as the server sends them: the reader compares them with the checksums that it has. Thread-safe.

        reader = HttpRanges(HttpTransport("http://server:8099"), pack_path)
        reader.read_many([ReadPart(key, start, buffer)])
    """

    def __init__(
        self,
        transport: HttpTransport,
        path_of: Callable[[str], str],
        *,
        parallel: int = PARALLEL,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Read over ``transport``, which stays the caller's to close.

        Args:
            transport: the way to the server.
            path_of: returns the path at which the server gives the object of a key.
            parallel: most requests at a time.
            headers: further headers of each request.
        """
        self.transport = transport
        self.url = transport.url
        self._path_of = path_of
        self._headers = headers
        self._workers = Threads(parallel, "hapi-ranges", Lost(MOST_LOST))
        weakref.finalize(self, self._workers.close)

    def pools(self) -> Sequence[Threads]:
        """Pool of the threads in which requests run, for the watch over hung threads."""
        return (self._workers,)

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part; see :meth:`hapi.store.base.ObjectStore.read_many`.

        After an error any bytes may have come into the parts.

        Raises:
            HapiError: the server's error, or ``TransportError``.
        """
        fetch_all(
            parts,
            coalesced(parts, gap=GAP_BYTES, slice_bytes=SLICE_BYTES, apart=True),
            self._fetch,
            self._workers,
            then,
        )

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _fetch(self, fetch: Fetch, then: Then) -> None:
        places = _places(fetch)

        def filled(number: int) -> None:
            part = places[number][1]
            if part is not None and part.last:
                then(part.number)

        outs = [out for out, _ in places]
        self.transport.read_range(self._path_of(fetch.key), fetch.start, outs, self._headers, filled)


def _places(fetch: Fetch) -> list[tuple[memoryview, PartSlice | None]]:
    """Buffers for all bytes of a request, one after the other, and what each is of; those that nobody asked for have
    one too.
    """
    at, places = fetch.start, list[tuple[memoryview, PartSlice | None]]()
    for part in fetch.parts:
        if part.start > at:
            places.append((memoryview(bytearray(part.start - at)), None))
        places.append((part.out, part))
        at = part.stop
    return places
