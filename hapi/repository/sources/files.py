"""Files of weights, read piece by piece and never mapped: whoever shortens a mapped file ends this process."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hapi.errors import ModelError
from hapi.repository.entries import PIECE_BYTES


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was described. It is open only while it is read."""

    path: Path
    size: int
    """Its bytes."""
    mark: tuple[int, ...]
    """Differs when the file was written again or another one was put in its place."""

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the file at ``path``.

        Raises:
            ModelError: there is none that can be read.
        """
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise ModelError(f"weights file {path} is not a plain file")
            with path.open("rb"):
                pass
        except (FileNotFoundError, NotADirectoryError):
            raise ModelError(f"weights file {path} does not exist") from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        return cls(path, found.st_size, _mark(found))

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start..stop`` (stop excluded); :class:`ModelError` when the file has no such bytes now."""
        return b"".join(bytes(piece) for piece in self.pieces(start, stop))

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start..stop`` in order; each piece is valid until the next one is asked for.

        Raises:
            ModelError: the file was changed since it was described, or cannot be read.
        """
        buffer = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
        with self.opened() as descriptor:
            while start < stop:
                piece = buffer[: min(len(buffer), stop - start)]
                self.fill(descriptor, start, piece)
                start += len(piece)
                yield piece

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for the block, for :meth:`fill`; :class:`ModelError` if it was changed before or within."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        try:
            self._check(descriptor)
            yield descriptor
            self._check(descriptor)
        finally:
            os.close(descriptor)

    def fill(self, descriptor: int, start: int, out: memoryview) -> None:
        """Read ``len(out)`` bytes from byte ``start`` on into ``out``."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(descriptor, [out[done:]], start + done)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if count == 0:
                raise self._changed()
            done += count

    def _check(self, descriptor: int) -> None:
        if _mark(os.fstat(descriptor)) != self.mark:
            raise self._changed()

    def _changed(self) -> ModelError:
        return ModelError(f"weights file {self.path} was changed while it was read; run the same again")


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _unreadable(path: Path, error: OSError | ValueError) -> ModelError:
    return ModelError(f"weights file {path} cannot be read: {getattr(error, 'strerror', None) or error}")
