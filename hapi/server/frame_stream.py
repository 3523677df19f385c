"""The typed answer to a request: its length, its frames, and the resources that they hold until they are
sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

from hapi.errors import StoreError
from hapi.server.context import RequestClock, RequestContext
from hapi.wire.frames import SLICE_BYTES, Buffer

Frame = Iterable[Buffer]
Frames = Generator[Frame, None, None]


@dataclass(frozen=True)
class FileRange(Iterable[Buffer]):
    """A frame that is a range of a file: the kernel sends it, or it is read in pieces where it cannot."""

    descriptor: int
    start: int
    nbytes: int

    def __iter__(self) -> Iterator[Buffer]:
        for done in range(0, self.nbytes, SLICE_BYTES):
            data = os.pread(self.descriptor, min(SLICE_BYTES, self.nbytes - done), self.start + done)
            if not data:
                raise self._shorter()
            yield data

    def sender(self, sock: socket.socket) -> Callable[[int], int]:
        """Return the function that sends some bytes from a given one on, and returns how many."""

        def send(done: int) -> int:
            """Hand the kernel what is left from byte ``done`` on."""
            count = os.sendfile(sock.fileno(), self.descriptor, self.start + done, self.nbytes - done)
            if not count:
                raise self._shorter()
            return count

        return send

    def _shorter(self) -> StoreError:
        return StoreError("a stored object became shorter while it was sent; ask again")


class FrameStream:
    """An answer; close it when it is not read to its end. Used by one thread at a time.

    Until its last frame, an error, or :meth:`close` it holds its resources: resident layers, reservations of
    memory.
    """

    def __init__(
        self,
        context: RequestContext,
        max_bytes: int,
        frames: Frames,
        *,
        samples: int,
        encoded: bool = False,
        resources: ExitStack | None = None,
    ) -> None:
        """Wrap ``frames``, which have not begun.

        Args:
            context: of the request; its clock is told of the first frame.
            max_bytes: bytes of all frames, raw.
            frames: each an iterable of buffers.
            samples: samples that it answers for; 0 for tensors.
            encoded: frames may be shorter, which is not known beforehand.
            resources: left at the end. They see the error that ends the frames, and may exchange it.
        """
        self.context = context
        self.max_bytes = max_bytes
        self.content_length = None if encoded else max_bytes
        """Bytes of all frames; None if it is known only when the last one is made."""
        self.samples = samples
        self._resources = ExitStack() if resources is None else resources
        self.frames = _timed(frames, context.clock, self._resources)

    def close(self) -> None:
        """Release the stream's resources."""
        self.frames.close()
        self._resources.close()  # of frames that have not begun, whose generator has nothing to end


def _timed(frames: Frames, clock: RequestClock, resources: ExitStack) -> Frames:
    def timed(frame: Frame) -> Frame:
        clock.frame_made()
        return frame

    with resources, closing(frames):
        yield from map(
            timed, frames
        )  # keeps no frame: the one that is sent and the one that is made are enough
