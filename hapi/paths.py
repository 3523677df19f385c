"""Paths as users write them, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hapi.atomic import write_atomically
from hapi.errors import UsageError

Named = tuple[str, str | None]
_PIECE = 1 << 20
_OPEN_PIPES = ("/proc/", "/dev/fd/")


def user_path(text: str | Path, what: str) -> Path:
    """Return ``text`` as a path with ``~`` or ``~NAME`` expanded.

    Raises:
        UsageError: ``~NAME`` is an unknown user; the message begins with ``what``.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{what} {text}: there is no user of this name; write the folder's full path"
        ) from None


def is_folder(path: str | Path) -> bool:
    """Return whether there is a folder at ``path``; False also for what no path can be."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def user_cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/hapi`` or ``~/.cache/hapi``; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():  # a relative one is invalid by the XDG specification
        return Path(given) / "hapi"
    try:
        return Path.home() / ".cache" / "hapi"
    except RuntimeError:
        return None


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading, or a pipe that is open already, such as a shell's ``<(command)``.

    Raises:
        OSError: it cannot be opened, or is a named pipe or a device, which would be waited for.
    """
    kind = os.stat(path).st_mode  # noqa: PTH116  before it is opened, which may wait
    named_pipe = stat.S_ISFIFO(kind) and not os.path.realpath(path).startswith(_OPEN_PIPES)
    if named_pipe or stat.S_ISCHR(kind):
        raise OSError(errno.ESPIPE, "it is a named pipe or a device, which may never end; give a file")
    return Path(path).open("rb")


def read_bounded(path: str | Path, max_bytes: int, what: str) -> bytes:
    """Return the content of a file or open pipe that a person named; never read more than ``max_bytes`` bytes.

    Args:
        path: its path.
        max_bytes: largest sensible content in bytes.
        what: name for messages: ``"--labels x.txt"``.

    Raises:
        UsageError: it cannot be read, or has more bytes.
    """
    try:
        data = bytearray()
        with open_file(path) as file:
            # In pieces: one read would take memory for all that is allowed, whatever there is.
            while len(data) <= max_bytes and (part := file.read(min(_PIECE, max_bytes + 1 - len(data)))):
                data += part
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > max_bytes:
        raise UsageError(f"{what}: has more than {max_bytes} bytes, too many for this; name another file")
    return bytes(data)


def check_output(flag: str, path: str) -> list[Path]:
    """Check that a file can be written at ``path``, and make its folder.

    Returns the folders that were made, the outermost first, for :func:`remove_empty`.

    Raises:
        UsageError: it cannot be written; the message names ``flag``.
    """
    target, made = Path(path), list[Path]()
    try:
        with suppress(FileNotFoundError):
            target.lstat()  # unlike exists, it tells of names that cannot be
        # Files are written beside their place and moved there; that would put a file where a device was.
        if target.exists() and not target.is_file():
            raise UsageError(f"{flag} {path}: is not a plain file; give another name")
        parent = target.absolute().parent
        made = [folder for folder in reversed((parent, *parent.parents)) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        _try_writing(parent)
    except (OSError, ValueError) as error:
        remove_empty(made)
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {path}: cannot be written there: {reason}") from None
    return made


def check_folder(path: str | Path, advice: str) -> None:
    """Check that files can be written in a folder at ``path``, which is not made.

    Raises:
        UsageError: they cannot; the message ends with ``advice``.
    """
    target = Path(path).absolute()
    try:
        nearest = next(folder for folder in (target, *target.parents) if folder.exists())
        _try_writing(nearest)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written there: {error.strerror or error}; {advice}") from None


def _try_writing(folder: Path) -> None:
    """Write a little in ``folder``, which a full disk refuses too; OSError when that fails."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of ``folders`` that are empty; each stands after the one that holds it."""
    for folder in reversed(list(folders)):
        with suppress(OSError):
            folder.rmdir()


def check_outputs(outputs: Iterable[Named], inputs: Iterable[Named] = ()) -> list[Path]:
    """Check each of ``outputs`` with :func:`check_output`, and that no file is used twice.

    Returns the folders that were made; none stays when a check fails.

    Args:
        outputs: pairs of a name for messages and a path; None for no file.
        inputs: pairs of the same form, of files that are read.

    Raises:
        UsageError: an output cannot be written, or is another output or an input.
    """
    taken = {
        os.path.realpath(path): name for name, path in inputs if path is not None and os.path.lexists(path)
    }
    made: list[Path] = []
    try:
        for name, path in outputs:
            if path is None:
                continue
            made += check_output(name, path)
            other = taken.setdefault(os.path.realpath(path), name)
            if other != name:
                raise UsageError(f"{name} {path}: it is the same file as {other}; give another name")
    except UsageError:
        remove_empty(made)
        raise
    return made


def make_folder(path: str | Path, flag: str) -> None:
    """Make the folder at ``path`` and those above it; :class:`UsageError` naming ``flag`` when that fails."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {path}: cannot be made: {reason}") from None


def write_whole(path: str, text: str, flag: str = "") -> None:
    """Write ``text`` to ``path``, whole or not at all.

    Raises:
        UsageError: it cannot be written; the message names ``flag``.
    """
    try:
        write_atomically(path, text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {path}: cannot be written: {reason}".lstrip()) from None
