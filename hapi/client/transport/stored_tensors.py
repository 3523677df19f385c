"""Tensors of a pushed model from servers: by ranges of the packs that hold them, or as one stream of frames.

Ranges are planned, received side by side into memory that loads share, and verified while they arrive, as a server
loads from its store. A server gives packs to tenants who see all models. Others get the stream, and so does a trainer
whose server is older, or has packed the tensors anew since it described the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from hapi.client.transport.server_pool import ServerPool
from hapi.errors import DataError, NotFoundError, TooLargeError, WireError
from hapi.models.tensors import tensor_bytes
from hapi.repository.entries import TensorEntry
from hapi.repository.loading.load import IDENTITY, Loaded, load, verified
from hapi.repository.packs.place import pack_path
from hapi.repository.pushed import PushedModel
from hapi.store.http.ranges import HttpRanges
from hapi.wire import messages
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd, TensorSpec
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport


def fetch_tensors(
    servers: ServerPool, pushed: PushedModel, entries: Sequence[TensorEntry]
) -> Iterator[Loaded]:
    """Yield the tensors of ``entries``, each verified and in memory of its own.

    Features are kept under the digests that the server says, so each digest is verified.

    Raises:
        DataError: a tensor's bytes are others than those that were pushed; the message names it.
        HapiError: no server gives them.
    """
    if not entries:
        return

    def attempt(transport: Transport) -> list[Loaded] | DataError | None:
        """Return the tensors from the ranges of one server, or the damage in them; None where it gives no ranges."""
        if not isinstance(transport, HttpTransport):
            return None
        try:
            with closing(HttpRanges(transport, pack_path)) as ranges:
                return list(load(ranges, entries, verify=IDENTITY, damaged=pushed.damaged))
        except (NotFoundError, TooLargeError):
            return None
        except DataError as error:
            return error  # no fault of the connection: the request is not sent again

    found = servers.run(attempt, provider_of=pushed.reference)
    if isinstance(found, DataError):
        raise found
    if found is not None:
        yield from found
        return
    for start in range(0, len(entries), messages.MAX_SAMPLES):
        yield from _streamed(servers, pushed, entries[start : start + messages.MAX_SAMPLES])


def _streamed(servers: ServerPool, pushed: PushedModel, entries: Sequence[TensorEntry]) -> Iterator[Loaded]:
    """The tensors of ``entries`` as frames, each received straight into memory of its own."""
    request = messages.TensorsRequest(
        name=pushed.reference, digest=pushed.digest, names=tuple(e.name for e in entries)
    )
    memory = [torch.empty(e.nbytes, dtype=torch.uint8) for e in entries]
    buffers = [tensor_bytes(raw) for raw in memory]

    def receive(reader: FrameReader) -> None:
        """Read the answer's frames, one for each tensor, into the buffers in their order."""
        for entry, buffer in zip(entries, buffers, strict=True):
            expected = (TensorSpec(entry.name, entry.dtype, entry.shape),)

            def sink(
                header: FrameHeader,
                buffer: memoryview = buffer,
                expected: tuple[TensorSpec, ...] = expected,
            ) -> list[memoryview]:
                if header.tensors != expected:
                    raise WireError(f"the server sent {header.tensors[0]}, expected {expected[0]}")
                return [buffer]

            if isinstance(reader.next(sink), StreamEnd):
                raise WireError("the server sent fewer tensors than were asked for")
        if not isinstance(reader.next(lambda header: []), StreamEnd):
            raise WireError("the server sent more tensors than were asked for")

    def attempt(transport: Transport) -> None:
        transport.stream(messages.TENSORS_PATH, request.to_json(), receive)

    servers.run(attempt, provider_of=pushed.reference)
    for entry, raw in zip(entries, memory, strict=True):
        yield entry, verified(entry, raw, pushed.damaged)
