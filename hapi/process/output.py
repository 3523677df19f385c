"""Standard output and errors whose loss ends no work: a closed pipe, a full disk, a terminal that is gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import TextIO, cast

from hapi.errors import HapiError
from hapi.process.output_stream import Background, OutputStream, UnwaitingStream

_STDOUT, _STDERR = 1, 2


class Outputs:
    """Both standard streams of a command while it runs; see :func:`standard_outputs`."""

    def __init__(self, program: str, *, goes_on: bool) -> None:
        self._program, self._goes_on = program, goes_on
        self._background = list[Background]()
        self.stdout = self._stream(_STDOUT, "stdout")
        self.stderr = self._stream(_STDERR, "stderr")

    def _stream(self, descriptor: int, title: str) -> OutputStream:
        if not self._goes_on:
            return OutputStream(descriptor, title, self._lost)
        # One thread for both where they are one terminal or pipe, so that lines stay in their order.
        if not self._background or not os.path.sameopenfile(_STDOUT, descriptor):
            self._background.append(Background())
        return UnwaitingStream(
            descriptor, title, self._background[-1], partial(self._dropped, title), self._lost
        )

    def close(self) -> None:
        """Write all that is held back, for as long as a reader takes; Ctrl-C leaves it at that."""
        for stream in (self.stdout, self.stderr):
            with contextlib.suppress(OSError, HapiError):
                stream.flush()
        with contextlib.suppress(KeyboardInterrupt):
            for background in self._background:
                background.close()

    def lost(self) -> list[str]:
        """Return a line for each stream that lost text."""
        streams = (self.stdout, self.stderr)
        lost = [f"{s.title}: {s.why}; lines are missing" for s in streams if s.why]
        unread = [(s.title, s.dropped) for s in streams if isinstance(s, UnwaitingStream) and s.dropped]
        return lost + [f"{title}: nobody read it; {count} lines are missing" for title, count in unread]

    def _dropped(self, title: str, count: int) -> str:
        return f"{self._program}: nobody read {title}, so {count} lines before this one are missing\n"

    def _lost(self, stream: OutputStream, error: OSError) -> None:
        if stream is self.stdout and not self._goes_on:
            if isinstance(error, BrokenPipeError):
                raise error
            raise HapiError(f"stdout cannot be written: {stream.why}")
        other = self.stderr if stream is self.stdout else self.stdout
        if self._goes_on:
            other.write(
                f"{self._program}: {stream.title} cannot be written ({stream.why}); the work goes on\n"
            )


current: Outputs | None = None
"""Return the streams of the running command; None if there is none, or if it does not own the process's
streams.
"""


@contextlib.contextmanager
def standard_outputs(program: str, *, goes_on: bool) -> Iterator[None]:
    """Make losses of standard output harmless inside the block.

    A loss of stderr is never an error. Streams that the process does not own (in a test) stay as they are.
    Work that ``goes_on`` does not wait for a reader before its end: a stopped terminal, or a pipe that nobody empties,
    would hold up a training and all its ranks.

    Args:
        program: name of the command, for messages.
        goes_on: the command's work does not need stdout. If False, a loss of stdout raises
            :class:`HapiError`, or BrokenPipeError when the reader has gone.
    """
    global current
    _hold_descriptors()
    outputs, before = Outputs(program, goes_on=goes_on), (sys.stdout, sys.stderr, current)
    own_out, own_err = _is_own(sys.stdout, _STDOUT), _is_own(sys.stderr, _STDERR)
    try:
        for stream, replaced, own in (
            (outputs.stdout, sys.stdout, own_out),
            (outputs.stderr, sys.stderr, own_err),
        ):
            if own and replaced is None:
                stream.why = "it was closed at the start"
        sys.stdout = cast(TextIO, outputs.stdout) if own_out else sys.stdout
        sys.stderr = cast(TextIO, outputs.stderr) if own_err else sys.stderr
        current = outputs if own_out or own_err else None
        yield
    finally:
        outputs.close()
        sys.stdout, sys.stderr, current = before


def _hold_descriptors() -> None:
    """Open the null device for each closed standard descriptor, so that no other file takes its number."""
    for descriptor in (0, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def _is_own(stream: TextIO | None, descriptor: int) -> bool:
    """Return whether ``stream`` is Python's own for ``descriptor``, or None because that was closed at the
    start.
    """
    if stream is None:
        return True
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        if stream.fileno() != descriptor:
            return False
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
