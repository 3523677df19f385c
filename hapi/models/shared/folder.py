"""Folder of packs of weights, shared by the processes of one user on one machine.

    DIR/lock       locked while files come, go and change their names
    DIR/open-T     a pack being written, locked by the process that loads its tensors
    DIR/pack-T     a whole pack, read-only, locked (shared) by each process that maps it; its time is its last use

All locks are ``flock``, which the kernel frees with the process, however it ends. A pack that no process locks is
*idle*; an ``open-`` file without a lock was left by a killed process. A process that looks for weights, or ends,
removes both, of idle packs the least recently used ones beyond the budget.

Nothing may shorten a mapped file: its readers would be ended by SIGBUS. The folder is the user's own (mode 0700,
checked each time it is opened, and never followed through a link), a whole pack has mode 0400, and Hapi only ever
unlinks packs, which leaves mappings as they are. Another process of the same user, or root, could shorten one, but
these can kill as well. (A sealed memfd would withstand them, but it has no name by which unrelated processes find it.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hapi.errors import DataError
from hapi.models.shared.pack import (
    PACK_BYTES,
    PackWriter,
    Ranges,
    TensorRange,
    divided,
    layout,
    mapped,
    read_ranges,
    size_of,
)
from hapi.process.file_locks import lock_at_once, share_at_once, unlock

IDLE_PART = 8
"""One in so many bytes of the budget may be idle."""
LOCK_SECONDS = 2.0
"""Longest wait for the lock, which is held for milliseconds: its owner may have been stopped."""
_PAUSE = 0.002
_OPEN, _PACK = "open-", "pack-"


MakeWriter = Callable[[int, bytes, Ranges], PackWriter]


class FoundPack(NamedTuple):
    """A whole pack that this process uses from now on, until the mapping is gone."""

    token: str
    mapping: mmap.mmap


@dataclass
class Division:
    """Answer to a process that wants weights."""

    found: dict[str, tuple[FoundPack, TensorRange]] = field(default_factory=dict)
    """Resident ones, with their pack."""
    mine: list[OpenPack] = field(default_factory=list)
    """Packs for some of the others, to be loaded by the caller."""
    busy: set[str] = field(default_factory=set)
    """Names of packs with others, which other processes are loading."""
    refused: list[str] = field(default_factory=list)
    """Keys for which there is no room."""


class WeightsFolder:
    """A folder of packs; thread-safe. Every method may raise OSError: the folder is then of no use."""

    def __init__(
        self,
        path: Path,
        budget: int | None,
        *,
        keeps_idle: bool = True,
        pack_bytes: int = PACK_BYTES,
        make_writer: MakeWriter = PackWriter,
    ) -> None:
        """Use a folder.

        Args:
            path: of the folder.
            budget: most bytes of all packs; None for half of what is free or held there.
            keeps_idle: whether a pack outlives its users; False where its bytes are in their memory, and not in the
                file, which has its header alone.
            pack_bytes: size from which on tensors go into another pack.
            make_writer: writes a pack, into its open file or elsewhere.
        """
        self.path = path
        self._budget = budget
        self._keeps_idle, self._pack_bytes, self._make_writer = keeps_idle, pack_bytes, make_writer
        self._known: dict[str, Ranges] = {}
        """Ranges by name of pack: names are never used again."""

    def divide(self, wanted: Mapping[str, int]) -> Division:
        """Map what is there of ``wanted`` (key to bytes), and begin packs for what nobody is loading."""
        division, missing = Division(), dict(wanted)
        with self._locked() as folder:
            names = self._clean(folder)
            for name in sorted(names, key=lambda name: name.startswith(_OPEN)):  # whole ones first
                ranges = self._known[name]
                if missing.keys().isdisjoint(ranges):
                    continue
                keys = [key for key in missing if key in ranges and ranges[key].nbytes == missing[key]]
                if name.startswith(_OPEN):
                    division.busy.add(name)
                else:
                    pack = FoundPack(name.removeprefix(_PACK), _shared(folder, name))
                    division.found |= {key: (pack, ranges[key]) for key in keys}
                for key in keys:
                    del missing[key]
            self._trim(folder, sum(missing.values()))
            self._begin(folder, missing, division)
        return division

    def _begin(self, folder: int, missing: Mapping[str, int], division: Division) -> None:
        left = self._limit(folder) - self._held(folder)
        for wanted in divided(missing.items(), self._pack_bytes):
            head, ranges = layout(wanted)
            pack = None
            if size_of(head, ranges) <= left:
                with contextlib.suppress(OSError):
                    pack = OpenPack(self, secrets.token_hex(8), folder, head, ranges, self._make_writer)
            if pack is None:
                division.refused += wanted
                continue
            left -= pack.writer.size
            division.mine.append(pack)

    def sign_of_life(self, name: str) -> float | None:
        """Return the Unix time at which the process that loads an open pack last gave a sign of life; None where none
        loads it any more.
        """
        with self._open_folder() as folder:
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                return None
            try:
                # Shared, so that a look is in the way of nobody who maps the pack just now.
                return None if share_at_once(descriptor) else os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)

    def usage(self) -> tuple[int, int]:
        """Return the bytes of all packs, and those of idle ones among them."""
        if not self.path.exists():
            return 0, 0
        with self._locked() as folder:
            names = self._clean(folder)
            idle = sum(_size(folder, name) for name in names if _is_idle(folder, name))
            return self._held(folder), idle

    def clear(self) -> int:
        """Remove every idle pack; return their bytes."""
        if not self.path.exists():
            return 0
        with self._locked() as folder:
            before = self._held(folder)
            for name in self._clean(folder):
                _remove_idle(folder, name)
            return before - self._held(folder)

    def leave(self) -> None:
        """Give up the packs that this process maps, and remove what is idle beyond the budget: the process ends.

        Its mappings stay as they are. What was loaded by a fork of this process counts as its own.
        """
        if not self.path.exists():
            return
        with self._locked() as folder:
            _unlock_own(folder)
            self._clean(folder)
            self._trim(folder, 0)

    # -- inside ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise PermissionError(f"{self.path} is not this user's own folder (mode 0700)")
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        with self._open_folder() as folder:
            lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                deadline = time.monotonic() + LOCK_SECONDS
                while not lock_at_once(lock):
                    if time.monotonic() > deadline:
                        raise BlockingIOError(f"a process has held {self.path}/lock for {LOCK_SECONDS:.0f} s")
                    time.sleep(_PAUSE)
                yield folder
            finally:
                os.close(lock)

    def _clean(self, folder: int) -> list[str]:
        """Names of the packs with known ranges; what dead processes left, and what is none, is removed."""
        names = []
        for name in _names(folder):
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:  # abandoned just now
                continue
            try:
                left = (name.startswith(_OPEN) or not self._keeps_idle) and lock_at_once(descriptor)
                if not left and name not in self._known:
                    self._known[name] = read_ranges(descriptor)
            except DataError:
                left = lock_at_once(descriptor)
            finally:
                os.close(descriptor)
            if left:
                _unlink(folder, name)
            elif name in self._known:
                names.append(name)
        self._known = {name: self._known[name] for name in names}
        return names

    def _trim(self, folder: int, coming: int) -> None:
        """Remove idle packs, the least recently used first, until they and ``coming`` bytes keep to the budget."""
        limit, held = self._limit(folder), self._held(folder)
        idle = [
            name
            for name in sorted(_names(folder), key=lambda n: _used_at(folder, n))
            if _is_idle(folder, name)
        ]
        idle_bytes = sum(_size(folder, name) for name in idle)
        for name in idle:
            if idle_bytes <= limit // IDLE_PART and held + coming <= limit:
                return
            size = _size(folder, name)
            if _remove_idle(folder, name):
                idle_bytes, held = idle_bytes - size, held - size

    def _limit(self, folder: int) -> int:
        if self._budget is not None:
            return self._budget
        disk = os.fstatvfs(folder)
        return (disk.f_bavail * disk.f_frsize + self._held(folder)) // 2

    @staticmethod
    def _held(folder: int) -> int:
        return sum(_size(folder, name) for name in _names(folder))

    def finish(self, pack: OpenPack) -> mmap.mmap:
        """Give a pack that was written and checked its name; return its mapping."""
        name = f"{_PACK}{pack.token}"
        with self._locked() as folder:
            os.fchmod(pack.writer.descriptor, 0o400)
            os.rename(pack.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            unlock(pack.writer.descriptor)
            return _shared(folder, name)

    def forget(self, pack: FoundPack) -> None:
        """Remove a whole pack whose bytes are not to be had any more."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            os.unlink(f"{_PACK}{pack.token}", dir_fd=folder)

    def abandon(self, pack: OpenPack) -> None:
        """Remove a pack that is not written to its end."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            os.unlink(pack.name, dir_fd=folder)


class OpenPack:
    """A pack that this process has begun."""

    def __init__(
        self,
        folder: WeightsFolder,
        token: str,
        descriptor: int,
        head: bytes,
        ranges: Ranges,
        make_writer: MakeWriter,
    ) -> None:
        """Make the file, locked, in the open folder ``descriptor``. Under the folder's lock."""
        self._folder, self.token, self.name = folder, token, f"{_OPEN}{token}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(self.name, flags, 0o600, dir_fd=descriptor)
        try:
            lock_at_once(file)
            self.writer = make_writer(file, head, ranges)
        except BaseException:
            os.close(file)
            os.unlink(self.name, dir_fd=descriptor)
            raise

    def seal(self) -> mmap.mmap:
        """Check what was written, and give it over to all processes; return this one's mapping."""
        self.writer.check()
        try:
            mapping = self._folder.finish(self)
        except (
            OSError
        ):  # somebody removed the folder: the file has no name any more, and is this process's alone
            mapping = mapped(self.writer.descriptor)
        os.close(self.writer.descriptor)
        return mapping

    def abandon(self) -> None:
        """Remove it."""
        try:
            self._folder.abandon(self)
        finally:
            os.close(self.writer.descriptor)


def _shared(folder: int, name: str) -> mmap.mmap:
    """Map a whole pack, and mark it as used. Under the folder's lock, in which alone a pack is locked otherwise."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        share_at_once(descriptor)
        os.utime(descriptor)
        return mapped(descriptor)
    finally:
        os.close(descriptor)


def _unlock_own(folder: int) -> None:
    """Let go of the locks of the packs in ``folder`` that this process has open, which are those of its mappings."""
    packs = set()
    for name in _names(folder):
        with contextlib.suppress(FileNotFoundError):  # abandoned just now
            found = os.stat(name, dir_fd=folder)
            packs.add((found.st_dev, found.st_ino))
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found = os.fstat(int(path.name))
            if (found.st_dev, found.st_ino) in packs:
                unlock(int(path.name))


def _names(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith((_OPEN, _PACK))]


def _is_idle(folder: int, name: str) -> bool:
    """Whether no process uses a pack; one that was abandoned just now is none."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        return lock_at_once(descriptor)
    finally:
        os.close(descriptor)


def _remove_idle(folder: int, name: str) -> bool:
    idle = _is_idle(folder, name)
    if idle:
        _unlink(folder, name)
    return idle


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _size(folder: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return 0


def _used_at(folder: int, name: str) -> float:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    return 0.0
