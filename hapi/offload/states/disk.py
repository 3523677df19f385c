"""States on one or several disks, striped piece by piece."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hapi.arrays import Bytes
from hapi.errors import UsageError
from hapi.offload.pieces import Layout, StatePiece
from hapi.offload.states.base import Commit
from hapi.offload.states.commit_file import CommitFile
from hapi.offload.states.drive import Drive
from hapi.offload.states.folder import LACKING, OffloadFolder
from hapi.process.direct_io import ALIGNMENT, read_whole, write_whole
from hapi.process.file_locks import close_own, keep_from_children
from hapi.units import format_bytes


class DiskStates:
    """A :class:`~hapi.offload.states.base.StateStore` in folders, one for each drive.

    A second process on one of the folders is refused. What a killed process left is taken over where it belongs to
    the same job.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        layout: Layout,
        *,
        parameters: int,
        gradient_bytes: int,
        extra_bytes: int,
        signature: str,
        resumes: bool = True,
    ) -> None:
        """Open the folders and take their room.

        Args:
            folders: one for each drive of the layout; made where they are missing.
            layout: pieces of the training.
            parameters: number of parameters.
            gradient_bytes: most bytes of gradients that are kept.
            extra_bytes: of the extra state in each commit.
            signature: of the job; states of another one are refused.
            resumes: see :class:`~hapi.offload.states.folder.OffloadFolder`.

        Raises:
            UsageError: a folder cannot be used, is in use, holds another job's states, or has too little room.
        """
        sizes = [2 * nbytes for nbytes in layout.slot_bytes]
        sizes[0] += gradient_bytes + ALIGNMENT
        self._folders: list[OffloadFolder] = []
        self._drives: list[Drive] = []
        self._descriptors: list[int] = []
        try:
            for number, folder in enumerate(folders):
                self._folders.append(OffloadFolder(folder, signature, number, len(folders), resumes=resumes))
            for own, nbytes in zip(self._folders, sizes, strict=True):
                own.check_room(nbytes)
            for own, nbytes in zip(self._folders, layout.slot_bytes, strict=True):
                self._drives.append(Drive(own.path / "states", 2 * nbytes))
            first = self._folders[0].path
            self._gradients = self._open(first / "gradients", gradient_bytes)
            commits = self._open(first / "commit", 0)
            self._commits = CommitFile(commits, len(layout.pieces), parameters, extra_bytes)
            os.posix_fallocate(commits, 0, self._commits.nbytes)
            for own in self._folders:
                own.mark()
        except OSError as error:
            self._give_up()
            needed = format_bytes(sum(sizes))
            raise UsageError(
                f"offloading to {error.filename or folders[0]}: {error.strerror}; it needs {needed} in all, "
                "give a folder on a disk that has them"
            ) from None
        except BaseException:
            self._give_up()
            raise
        self._slot_bytes = layout.slot_bytes

    @property
    def committed(self) -> Commit | None:
        """Last state that was committed; None in new folders."""
        return self._commits.newest

    def go_back(self, steps: int) -> bool:
        """Look for the commit of so many steps among the last two."""
        return self._commits.go_back(steps)

    def place(self, piece: StatePiece, slot: int, buffer: Bytes) -> Bytes:
        """Return ``buffer``."""
        return buffer

    def read(self, piece: StatePiece, slot: int, buffer: Bytes, start: int, stop: int) -> None:
        """Read a part of a record; ``start`` and ``stop`` are multiples of ``ALIGNMENT``."""
        self._drives[piece.drive].read(self._at(piece, slot) + start, buffer[start:stop])

    def write(self, piece: StatePiece, slot: int, buffer: Bytes, start: int = 0) -> None:
        """Write a record from ``start`` on, a multiple of ``ALIGNMENT``."""
        self._drives[piece.drive].write(self._at(piece, slot) + start, buffer[start : piece.nbytes])

    def commit(self, commit: Commit) -> None:
        """Make the slots durable, then the commit."""
        for drive in self._drives:
            drive.sync()
        self._commits.write(commit)

    def scratch(self, nbytes: int) -> Bytes:
        """Return memory of an unnamed file in the first folder. Raises OSError."""
        with tempfile.TemporaryFile(dir=self._folders[0].path) as file:
            if not nbytes:
                return np.empty(0, np.uint8)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)

    def write_gradient(self, at: int, values: Bytes) -> None:
        """Keep a gradient; through the page cache, because most are read again at once."""
        write_whole(self._gradients, at, values)

    def read_gradient(self, at: int, values: Bytes) -> None:
        """Read a kept gradient."""
        read_whole(self._gradients, at, values)

    @property
    def lacked_gradient(self) -> bool:
        """Whether the file of that name is there."""
        return (self._folders[0].path / LACKING).exists()

    def note_lacking_gradient(self) -> None:
        """Make a file that the next process finds. Raises OSError."""
        for folder in self._folders[:1]:
            (folder.path / LACKING).touch()

    def close(self, *, remove: bool) -> None:
        """Close the files; ``remove`` them and give the disks' room back."""
        for drive in self._drives:
            drive.close()
        for descriptor in self._descriptors:
            close_own(descriptor)
        for folder in self._folders:
            folder.close(remove=remove)
        self._drives, self._descriptors, self._folders = [], [], []

    def _give_up(self) -> None:
        """Close all, and remove what is new."""
        for folder in self._folders:
            if folder.is_new:
                folder.close(remove=True)
        self.close(remove=False)

    def _open(self, path: Path, nbytes: int) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(keep_from_children(descriptor))
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
        return descriptor

    def _at(self, piece: StatePiece, slot: int) -> int:
        return slot * self._slot_bytes[piece.drive] + piece.at
