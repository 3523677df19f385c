"""The typed answer to a request: its length, its frames, and the resources that they hold until they are
sent.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing

from hapi.server.context import RequestClock, RequestContext
from hapi.wire.frames import Buffer

Frame = Iterable[Buffer]
Frames = Generator[Frame, None, None]


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
