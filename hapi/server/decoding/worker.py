"""A process that decodes samples for a server: stored bytes in by a socket, float32 out by shared memory.

Started by :mod:`hapi.server.decoding.pool`, one task at a time. It reads nothing from the store and outlives its
server by one task at most: the socket's end is its own.

A task is :data:`TASK_HEAD` (length of the document, length of the bytes), a JSON document and the samples' bytes; a
reply is :data:`REPLY` (length of the document) and a JSON document. The first reply is sent unasked, when all is
imported. The memory comes as a file descriptor beside the first task that uses it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np
import torch

from hapi.data.manifest import SampleLayout
from hapi.data.transforms.decode_limits import NO_LIMITS, DecodeLimits
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.errors import HapiError, HostMemoryError
from hapi.process.memory_errors import is_out_of_memory
from hapi.server.device.host_memory import ImageRoom
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples

TASK_HEAD = struct.Struct("<IQ")
REPLY = struct.Struct("<I")


def task_document(
    samples: Samples,
    layout: SampleLayout,
    transform: TransformSpec | None,
    threads: int,
    limits: DecodeLimits = NO_LIMITS,
) -> dict[str, Any]:
    """The document of a task for ``samples``, without their bytes."""
    room = limits.room if isinstance(limits.room, ImageRoom) else None
    return {
        "limits": [limits.pixels, limits.flag, room and [room.nbytes, room.processes]],
        "ids": samples.ids.tolist(),
        "offsets": samples.offsets.tolist(),
        "layout": layout.to_json(),
        "transform": None if transform is None else transform.to_json(),
        "threads": threads,
    }


def receive(sock: socket.socket, out: memoryview) -> None:
    """Fill ``out`` from the socket; :class:`EOFError` when the other side is gone."""
    try:
        while len(out):
            count = sock.recv_into(out)
            if not count:
                raise EOFError
            out = out[count:]
    except ConnectionError:
        raise EOFError from None


def main() -> int:
    """``python -m hapi.server.decoding.worker FD``: decode until the socket ``FD`` closes."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # the server's log has lines of its own form
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which finishes what runs
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(EOFError, ConnectionError):
        _serve(sock)
    return 0


def _serve(sock: socket.socket) -> None:
    memory: mmap.mmap | None = None
    cpu = time.process_time()
    _reply(sock, {})
    while True:
        prefix, fds, _, _ = socket.recv_fds(sock, TASK_HEAD.size, 1, socket.MSG_WAITALL)
        if len(prefix) < TASK_HEAD.size:
            raise EOFError
        for fd in fds:
            memory = mmap.mmap(fd, os.fstat(fd).st_size)
            os.close(fd)
        length, nbytes = TASK_HEAD.unpack(prefix)
        document, data = bytearray(length), np.empty(nbytes, np.uint8)
        receive(sock, memoryview(document))
        receive(sock, data.data)
        reply = decoded(json.loads(document), data, memory)
        before, cpu = cpu, time.process_time()
        _reply(sock, {**reply, "cpu": cpu - before})


def decoded(task: dict[str, Any], data: np.ndarray[Any, Any], memory: mmap.mmap | None) -> dict[str, Any]:
    """Carry out a task; return its error, if any."""
    try:
        ids = np.array(task["ids"], np.int64)
        samples = Samples(ids, data, np.array(task["offsets"], np.int64), np.zeros_like(ids))
        layout = SampleLayout.from_json(task["layout"])
        given = task["transform"]
        transform = None if given is None else TransformSpec.from_json(given, random=True)
        shape = (len(samples), *input_shape(layout, transform))
        out = np.ndarray(shape, np.float32, buffer=memory)
        input_batch(samples, layout, transform, task["threads"], out, _limits(*task["limits"]))
    except HapiError as error:
        return {"problem": error.to_problem()}
    except Exception as error:
        if is_out_of_memory(error):
            short = HostMemoryError("a process that decodes ran out of memory; ask again, or another server")
            return {"problem": short.to_problem()}
        # A defect: for the server's log, as if it had happened there.
        return {"failure": traceback.format_exc()}
    return {}


def _limits(pixels: int | None, flag: str, room: list[int] | None) -> DecodeLimits:
    return DecodeLimits(pixels, flag, ImageRoom(*room) if room else None)


def _reply(sock: socket.socket, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    sock.sendall(REPLY.pack(len(body)) + body)


if __name__ == "__main__":
    sys.exit(main())
