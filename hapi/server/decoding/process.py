"""The server's end of one decoding process (:mod:`hapi.server.decoding.worker`): its socket, memory and exit."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.errors import DataError, HapiError, from_problem
from hapi.server.decoding.environment import decoder_environment
from hapi.server.decoding.worker import REPLY, TASK_HEAD, receive

START_SECONDS = 120.0
"""Longest time until a process is ready; importing torch from a cold disk takes most of it."""


class Died(Exception):
    """The process is gone; the message has the reason."""


@dataclass
class DecodeTask:
    """Samples for one process."""

    document: dict[str, Any]
    data: npt.NDArray[np.uint8]
    """Their stored bytes."""
    out: npt.NDArray[np.float32]
    """Buffer for the results, [n, ...]."""
    deaths: list[str] = field(default_factory=list)
    """Reasons of processes that died of it."""

    def given_up(self) -> DataError | None:
        """Reason why it is not tried again; None while it is."""
        if len(self.deaths) < 2:
            return None
        ids = self.document["ids"]
        others = f" or of one of {len(ids) - 1} others" if len(ids) > 1 else ""
        return DataError(
            f"two processes that decode died of sample {ids[0]}{others}, one after the other: "
            f"{' and '.join(self.deaths)}"
        )


class DecoderProcess:
    """One process and its memory. Used by one thread at a time, but for :meth:`kill`."""

    def __init__(self) -> None:
        self._task: DecodeTask | None = None
        self._memory: mmap.mmap | None = None
        self._greeted = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs)
            except OSError as error:
                self._socket.close()
                raise HapiError(f"no process for decoding: {error.strerror or error}") from None

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True when the process runs."""
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        """True when a task would be begun at once."""
        poll = select.poll()  # select would refuse descriptors from 1024 on
        poll.register(self._socket, select.POLLIN)
        return self._greeted or bool(poll.poll(0))

    def greet(self) -> None:
        """Wait until the process is ready."""
        if not self._greeted:
            self._socket.settimeout(START_SECONDS)
            self._reply()
            self._socket.settimeout(None)
            self._greeted = True

    def begin(self, task: DecodeTask) -> None:
        """Hand an order over; errors show in :meth:`finish`."""
        self._task = task
        with contextlib.suppress(Died, ConnectionError):
            self.greet()
            fds = self._grow(task.out.nbytes)
            document = json.dumps(task.document).encode()
            try:
                socket.send_fds(self._socket, [TASK_HEAD.pack(len(document), task.data.nbytes)], fds)
            finally:
                for fd in fds:
                    os.close(fd)
            self._socket.sendall(document)
            self._socket.sendall(task.data.data)

    def finish(self) -> float:
        """Wait for the order's end; return its CPU seconds. Raises the sample's error, or :class:`Died`."""
        reply, task = self._reply(), self._task
        self._task = None
        if "failure" in reply:
            raise RuntimeError(f"decoding failed in its process: {reply['failure']}")
        if "problem" in reply:
            raise from_problem(reply["problem"], 500)
        if task is not None and task.out.size:
            task.out[...] = np.ndarray(task.out.shape, np.float32, buffer=self._memory)
        return float(reply["cpu"])

    def abandon(self) -> None:
        """End the process if it still works on an order that is not wanted any more."""
        if self._task is not None:
            self.kill()

    def kill(self) -> None:
        """End the process, from any thread."""
        self._process.kill()
        self._process.wait()

    def end(self) -> str:
        """Release all that it holds; return how the process ended."""
        self.kill()
        self._socket.close()
        self._memory = None
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _grow(self, nbytes: int) -> list[int]:
        """Make shared memory of at least ``nbytes``; return its descriptor, to be sent and closed, where it
        is new.
        """
        if self._memory is not None and len(self._memory) >= nbytes:
            return []
        fd = os.memfd_create("hapi-decoding")  # has no name: gone with the processes that hold it
        try:
            os.ftruncate(fd, nbytes)
            self._memory = mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return [fd]

    def _reply(self) -> dict[str, Any]:
        prefix = bytearray(REPLY.size)
        try:
            receive(self._socket, memoryview(prefix))
            document = bytearray(*REPLY.unpack(prefix))
            receive(self._socket, memoryview(document))
        except (EOFError, OSError) as error:
            if isinstance(error, EOFError):  # it is ending: let it say how
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
            raise Died(self.end()) from None
        reply: dict[str, Any] = json.loads(document)
        return reply


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A new interpreter (a fork of this one would have its locks and threads' work half done) with its socket."""
    path = dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path)  # the same modules as here
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hapi.server.decoding.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=decoder_environment(os.environ, path),
        process_group=0,  # Ctrl-C is for the server, which ends it
    )
