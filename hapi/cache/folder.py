"""Folder of the cache of samples and features, shared by any number of processes of a machine.

    DIR/hapi-cache              marks the folder; a folder with other contents is left alone
    DIR/rates.json              where the disk becomes slower, once that was seen
    DIR/lock                    locked while the budget is counted and while files come, go and change their names
    DIR/NAME@VERSION/users      locked (shared) by users of this version; its time is that of the last use
    DIR/NAME@VERSION/open-T     a segment being written, locked by its writer
    DIR/NAME@VERSION/segment-T  a segment that is whole
    DIR/NAME@VERSION/key.json   of features: their whole key, and by what they were computed

VERSION is that of a dataset, or the digest of a key of features. All locks are ``flock``: the kernel frees those of a
process that dies at any moment. Such a process leaves an unlocked ``open-`` file, which the next to open the version
seals: what was put before the kill counts. An open file has its final size
from the beginning (without taking disk blocks), so the sizes of all files are the reserved bytes.

Nothing is made before something is kept: opening a folder only checks that it can be used. Files in use are never
removed. When the budget is used up, unused versions are removed, the least recently
used first; after that nothing more is admitted. An epoch uses every sample once, in an order that changes. So
any cache hits in proportion to the samples it holds: to replace one by another gains nothing and costs a
write (CoorDL's MinIO cache: Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hapi.cache.disk_rates import DiskRates, measure_disk
from hapi.cache.recovery import recover
from hapi.cache.segments import seed_of
from hapi.cache.writing.bounds import half_of
from hapi.cache.writing.fast_part import FILE as RATES
from hapi.cache.writing.fast_part import MOST_BYTES as RATES_BYTES
from hapi.cache.writing.fast_part import FastPart, WriteLog
from hapi.errors import ConflictError, UsageError
from hapi.paths import user_path
from hapi.process.file_locks import is_locked, lock_at_once
from hapi.wire.references import DatasetReference

MARKER = "hapi-cache"
_OLD_MARKER = "hapi-sample-cache"
_FORMAT = b"3\n"
_LOCK, _USERS, OPEN, SEGMENT = "lock", "users", "open-", "segment-"
LOCK_SECONDS = 2.0
"""Longest wait for a lock that is held for milliseconds: its owner may have been stopped."""
_LOCK_PAUSE = 0.005


class Reserved(NamedTuple):
    """A new open file, locked."""

    descriptor: int
    token: str
    capacity: int


@dataclass(frozen=True)
class Version:
    """Cached contents of one dataset version."""

    name: str
    """NAME@VERSION."""
    bytes: int
    used_at: float
    """Time of the last use, in seconds since 1970."""
    in_use: bool


class CacheFolder:
    """A cache folder with a budget; holds no open file."""

    def __init__(self, path: Path, budget: int) -> None:
        """Describe a folder that is in order; use :meth:`open`."""
        self.path = path
        self.budget = budget
        self._is_default = False
        """True for a budget that nobody named."""
        self._probe_lock = threading.Lock()
        self._probed: DiskRates | None = None
        self.writes = WriteLog()
        """Log of the bytes that this process has written."""
        self._fast_part: FastPart | None = None

    @classmethod
    def open(cls, path: str | Path, budget: int | None, what: str = "cache") -> CacheFolder:
        """Return the cache at ``path``, which is made when something is first kept in it.

        Args:
            path: its folder.
            budget: most bytes of all files in it; None for half of what the disk has for it, at most 100 GB.
            what: name of the setting, for messages.

        Raises:
            UsageError: the folder belongs to something else, or cannot be written.
        """
        folder = user_path(path, what).absolute()
        with _one_line(f"{what} {path}"):
            nearest = next(f for f in (folder, *folder.parents) if _is_there(f))
            with tempfile.TemporaryFile(dir=nearest):  # the rights alone do not tell
                pass
            if nearest == folder:
                _check_marker(folder, f"{what} {path}")
            found = cls(folder, 0 if budget is None else budget)
            if budget is None:
                found.budget, found._is_default = found._default_budget(nearest), True
        return found

    def _default_budget(self, nearest: Path) -> int:
        """Half of what the disk of ``nearest`` has free or in this cache: what is kept leaves as much room."""
        held = 0
        with contextlib.suppress(OSError, ConflictError):  # of one that goes away, or is in use just now
            held = sum(version.bytes for version in self.versions())
        return half_of(nearest, held)

    def _present_budget(self, held: int) -> int:
        """Bytes that versions, which have ``held``, may have; a default leaves room where others fill the disk."""
        budget = min(self.budget, half_of(self.path, held)) if self._is_default else self.budget
        own = (self.path / name for name in (MARKER, _LOCK, RATES))
        return budget - sum(path.stat().st_size for path in own if path.exists())

    def probed_rates(self) -> DiskRates:
        """Return the rates of the folder's disk by a short probe, made once; None for what could not be measured."""
        with self._probe_lock:
            if self._probed is None:
                self._probed = measure_disk(self.path)
            return self._probed

    def known_rates(self) -> DiskRates:
        """Return the rates of the probe, if it was made."""
        with self._probe_lock:
            return self._probed or DiskRates(None, None)

    def fast_part(self) -> FastPart | None:
        """Return the fast part of the disk that this process has left of it; None where none is known."""
        known = self._whole_fast_part()
        left = 0 if known is None else max(0, known.fast_bytes - self.writes.written)
        return None if known is None else replace(known, fast_bytes=left)

    def _whole_fast_part(self) -> FastPart | None:
        """The fast part as this run or one before it has found it."""
        with self._probe_lock:
            self._fast_part = self._fast_part or FastPart.load(self.path)
            return self._fast_part

    def remember(self) -> None:
        """Keep for runs to come where the disk became slower, or how far it did not."""
        known, written = self._whole_fast_part(), self.writes.written
        found = self.writes.fast_part(self.known_rates().write)
        rate = self.writes.rate
        fast = known is not None and rate is not None and rate**2 > known.write * known.slow_write
        if found is None and known is not None and fast and written > known.fast_bytes:
            found = replace(known, fast_bytes=written)
        if found is not None and found != known:
            with self._probe_lock:
                self._fast_part = found
            with contextlib.suppress(OSError, ConflictError), self.locked():
                held = sum(map(self._counted, self._versions()))
                if self._present_budget(held) - held >= RATES_BYTES:
                    found.save(self.path)

    @property
    def exists(self) -> bool:
        """True once something was kept in it."""
        return (self.path / MARKER).exists()

    def make(self) -> None:
        """Make the folder, if it is not there yet; UsageError as of :meth:`open`."""
        what = f"cache {self.path}"
        with _one_line(what):
            self.path.mkdir(parents=True, exist_ok=True)
            _check_marker(self.path, what)
            with self.locked():
                if not self.exists or not (self.path / MARKER).read_bytes():
                    (self.path / MARKER).write_bytes(_FORMAT)
                _check_marker(self.path, what)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cache's lock during the block; :class:`ConflictError` when another process does not let
        go.
        """
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while not lock_at_once(descriptor):
                if time.monotonic() > deadline:
                    raise ConflictError(
                        f"cache {self.path}: another process has held its lock for {LOCK_SECONDS:.0f} s; "
                        "look for a stopped process"
                    )
                time.sleep(_LOCK_PAUSE)
            yield
        finally:
            os.close(descriptor)

    def version(self, reference: DatasetReference) -> Path:
        """The folder of a version, which need not be there."""
        return self.path / f"{reference.name}@{reference.version}"

    def attach(self, folder: Path) -> int:
        """Make the folder of a version if it is not there; return a descriptor that marks it as used until it is
        closed.
        """
        self.make()
        try:
            with self.locked():
                folder.mkdir(exist_ok=True)
                users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(users, fcntl.LOCK_SH)  # nobody has it alone but under the lock
                os.utime(users)
        except OSError as error:
            raise UsageError(f"cache {folder}: cannot be used: {error.strerror or error}") from None
        return users

    def detach(self, folder: Path, users: int) -> None:
        """Give back what :meth:`attach` returned; a version without segments that nobody else uses is removed."""
        with contextlib.suppress(OSError):
            os.utime(users)
        os.close(users)
        with contextlib.suppress(OSError, ConflictError):
            if _is_empty(folder):
                with self.locked():
                    if _is_empty(folder):
                        self._remove(folder)

    def reserve(
        self,
        folder: Path,
        wanted: int,
        min_bytes: int,
        settle: Callable[[int], int | None] | None = None,
    ) -> Reserved | None:
        """Make a new open file in ``folder`` within the budget.

        Args:
            folder: folder of a dataset version.
            wanted: size in bytes; less if the budget leaves less.
            min_bytes: smallest useful size in bytes.
            settle: writes what belongs beside the file, in that many bytes at most, and returns by how many the folder
                has grown; None when they are too few.

        Returns:
            The locked file; None when less than ``min_bytes`` is left.
        """
        with self.locked():
            sizes = {version: self._counted(version) for version in self._versions()}
            left = self._present_budget(sum(sizes.values())) - sum(sizes.values())
            for version in sorted(sizes, key=_used_at) if left < wanted else ():
                with contextlib.suppress(OSError):  # files of others are in it
                    if left < wanted and self._remove(version):
                        left += sizes[version]
            grown = 0 if settle is None else settle(left - min_bytes)
            capacity = min(wanted, left - (grown or 0))
            if grown is None or capacity < min_bytes:
                return None
            token = secrets.token_hex(8)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(folder / f"{OPEN}{token}", flags, 0o666)
            try:
                lock_at_once(descriptor)
                os.ftruncate(descriptor, capacity)
            except BaseException:
                os.close(descriptor)
                (folder / f"{OPEN}{token}").unlink()
                raise
        return Reserved(descriptor, token, capacity)

    def seal(self, folder: Path, token: str) -> Path:
        """Turn the open file ``token`` into a segment."""
        path = folder / f"{SEGMENT}{token}"
        with self.locked():
            (folder / f"{OPEN}{token}").rename(path)
        return path

    def recover(self, folder: Path) -> int:
        """Seal the segments of a version that dead processes were writing; return how many records they have.

        Raises:
            OSError: a file cannot be read or written.
            ConflictError: the lock is not to be had.
        """
        tokens = [path.name.removeprefix(OPEN) for path in folder.glob(f"{OPEN}*")]
        found = 0
        for token in tokens:
            path = folder / f"{OPEN}{token}"
            with self.locked():
                if not path.exists() or is_locked(path):
                    continue
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                lock_at_once(descriptor)
            try:
                records = recover(descriptor, seed_of(folder.name))
                found += records
                if records:
                    self.seal(folder, token)
                else:
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return found

    def versions(self) -> list[Version]:
        """Return all cached versions, the least recently used first."""
        if not self.exists:
            return []
        with self.locked():
            return [
                Version(folder.name, self._counted(folder), _used_at(folder), _is_in_use(folder))
                for folder in sorted(self._versions(), key=_used_at)
            ]

    def clear(self, names: Collection[str] | None = None) -> list[Version]:
        """Remove every unused version, or of these only those in ``names``; return the removed ones."""
        found = [version for version in self.versions() if names is None or version.name in names]
        if not found:
            return []
        with self.locked():
            present = {folder.name for folder in self._versions()}  # others may have removed some since
            return [one for one in found if one.name in present and self._remove(self.path / one.name)]

    def _versions(self) -> list[Path]:
        with os.scandir(self.path) as entries:
            return [Path(e.path) for e in entries if "@" in e.name and e.is_dir(follow_symlinks=False)]

    def _counted(self, folder: Path) -> int:
        """Bytes of a version's files."""
        total = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a damaged segment goes without the lock
                    if not entry.is_dir(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        return total

    def _remove(self, folder: Path) -> bool:
        """Remove a version if nobody uses it. Under the lock."""
        if _is_in_use(folder):
            return False
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return True


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn errors of the file system into one line that begins with ``what``."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what}: cannot be used: {reason}; give another folder") from None


def _is_there(folder: Path) -> bool:
    """Return whether there is something at ``folder``; OSError or ValueError for a name that cannot be."""
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_marker(folder: Path, what: str) -> None:
    """Check that ``folder`` is a cache of this version of Hapi, or empty; UsageError beginning with ``what``."""
    marker = folder / MARKER
    names = {entry.name for entry in folder.iterdir()} - {_LOCK}
    # Asked again at last: another process may just have made it one.
    if names and MARKER not in names and _OLD_MARKER not in names and not marker.exists():
        raise UsageError(f"{what}: has other files in it; give a new or empty folder")
    if _OLD_MARKER in names or (marker.exists() and marker.read_bytes() not in (_FORMAT, b"")):
        raise UsageError(f"{what}: is of another version of Hapi; remove it or give another folder")


def _is_empty(folder: Path) -> bool:
    return not any(path.name.startswith((OPEN, SEGMENT)) for path in folder.iterdir())


def _is_in_use(folder: Path) -> bool:
    try:
        return is_locked(folder / _USERS)
    except FileNotFoundError:  # whoever made it died before its users file was there
        return False


def _used_at(folder: Path) -> float:
    try:
        return (folder / _USERS).stat().st_mtime
    except FileNotFoundError:
        return 0.0
