"""A folder for the states of one job at a time: its lock, what it was made for, its room."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hapi.atomic import replacing
from hapi.errors import HapiError, UsageError
from hapi.offload.states.commit_file import has_commit
from hapi.paths import read_bounded
from hapi.process.file_locks import close_own, is_locked, keep_from_children, lock_at_once
from hapi.units import format_bytes
from hapi.wire.documents import parse_document

NAME = "hapi-offload"
"""Folder that is made in the one that the user names; it is removed at the end."""
LACKING = "gradient-lacked"
"""File that is there after an end because a gradient was not kept: the next process keeps them."""
_ENDED = "ended"
"""File that a rank's folder has when that rank ended in order: it is removed with the last one's."""
_FILES = ("states", "gradients", "commit", "job.json", LACKING, _ENDED, "lock")
_FORMAT = 2
_RANK = re.compile(r"hapi-rank\d+")


def rank_folder(folder: Path, rank: int, ranks: int) -> Path:
    """Return where this process keeps its share in a folder that all ranks name; it is removed at the end, too."""
    return folder / f"hapi-rank{rank}" if ranks > 1 else folder


def discard(parent: Path) -> None:
    """Remove what a killed job left in ``parent`` that does not go on from there.

    Nothing of a process that has the folder, and nothing of a loop that does.
    """
    with suppress(OSError, UsageError):
        if (parent / NAME).is_dir():
            OffloadFolder(parent, "", 0, 1, resumes=False).close(remove=True)


def holds(folders: Sequence[Path], signature: str) -> bool:
    """Return whether a killed job of this signature can go on from ``folders``, which no process has."""
    for number, parent in enumerate(folders):
        path = parent / NAME
        if _found(path) != _job(signature, number, len(folders), resumes=True) or is_locked(path / "lock"):
            return False
    return bool(folders) and has_commit(folders[0] / NAME / "commit")


class OffloadFolder:
    """The folder :data:`NAME` in one that the user named, locked for this process."""

    def __init__(self, parent: Path, signature: str, number: int, drives: int, *, resumes: bool) -> None:
        """Make and lock the folder.

        Args:
            parent: named by the user; made if it is missing.
            signature: of the job.
            number: of this drive, from 0.
            drives: number of all drives.
            resumes: whether the job goes on from these files after a kill; otherwise they are of no use then.

        Raises:
            UsageError: it cannot be written, another process has it, or it holds the states of another job.
        """
        self.path = parent / NAME
        self._job = _job(signature, number, drives, resumes=resumes)
        self._lock = -1
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = keep_from_children(lock)
        except OSError as error:
            raise UsageError(
                f"offloading to {parent}: {error.strerror}; name a folder that can be written"
            ) from None
        if not lock_at_once(self._lock) or not self._is_lock_in_place():
            self.close(remove=False)
            raise UsageError(
                f"{self.path} is in use by another job, or by an optimizer of this process that was not closed; "
                "name another folder, or wait for its end"
            )
        found = _found(self.path)
        self.is_new = found is None or not (resumes or found.get("resumes", True))
        """Whether there is nothing to go on from."""
        if self.is_new:
            _remove_files(
                self.path
            )  # of a process that was killed while it began or ended, or does not go on
        elif found != self._job:
            self.close(remove=False)
            raise UsageError(
                f"{self.path} holds the states of another job, which was killed; remove that folder, or name another"
            )
        (self.path / _ENDED).unlink(missing_ok=True)

    def check_room(self, nbytes: int) -> None:
        """Raise UsageError unless the disk has ``nbytes``, those of this folder's own files included."""
        files = [self.path / name for name in _FILES]
        own = sum(file.stat().st_blocks * 512 for file in files if file.exists())
        free = shutil.disk_usage(self.path).free
        if own + free < nbytes:
            raise UsageError(
                f"offloading to {self.path.parent} needs {format_bytes(nbytes)} ({nbytes} bytes), and its disk has "
                f"{format_bytes(own + free)} free; make room, or name a folder on a larger disk"
            )

    def mark(self) -> None:
        """Note what the folder is for, once its files are there. Raises OSError."""
        if _found(self.path) is None:
            with replacing(self.path / "job.json") as file:
                file.write(json.dumps(self._job).encode())

    def close(self, *, remove: bool) -> None:
        """Unlock; with ``remove`` the files go first, what the job was for before its states.

        Those of a rank stay until all ranks of its job that keep theirs beside it have ended in order, and go then.
        """
        removed = self._ended() if remove else []
        for path in removed:
            _remove_files(path)
            (path / "lock").unlink(missing_ok=True)
        if self._lock >= 0:
            close_own(self._lock)
            self._lock = -1
        for path in removed:
            with suppress(OSError):  # another process began, or a user put something there
                path.rmdir()
                if _RANK.fullmatch(path.parent.name):
                    path.parent.rmdir()

    def _ended(self) -> list[Path]:
        """Return the folders that are not needed any more when this one is not."""
        job = _found(self.path)
        if job is None or not _RANK.fullmatch(self.path.parent.name):
            return [self.path]
        with suppress(OSError):
            (self.path / _ENDED).touch()
        paths = [rank / NAME for rank in self.path.parent.parent.iterdir() if _RANK.fullmatch(rank.name)]
        ranks = [path for path in paths if _found(path) == job]
        return ranks if all((path / _ENDED).exists() for path in ranks) else []

    def _is_lock_in_place(self) -> bool:
        """Whether the locked file is the one of that name: the process before may just have removed it."""
        try:
            found = (self.path / "lock").stat()
        except OSError:
            return False
        return found.st_ino == os.fstat(self._lock).st_ino


def _remove_files(path: Path) -> None:
    for name in reversed(_FILES[:-1]):
        (path / name).unlink(missing_ok=True)


def _job(signature: str, number: int, drives: int, *, resumes: bool) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "signature": signature,
        "drive": number,
        "drives": drives,
        "resumes": resumes,
    }


def _found(path: Path) -> dict[str, Any] | None:
    """Facts of the job that a folder is for; None where there is none, and no facts where they cannot be read."""
    path /= "job.json"
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = parse_document(read_bounded(path, 1 << 16, "the offload folder's job"))
    except (ValueError, HapiError):
        return {}
    return found
