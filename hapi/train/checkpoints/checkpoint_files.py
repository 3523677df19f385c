"""Files of a checkpoint: ``FILE`` is the newest, ``FILE.1`` the one before it, ``FILE.2`` the one before
that.

At whatever moment a process dies, each name holds a whole checkpoint or does not exist, ``FILE`` exists once
it was written (but on file systems without hard links), and a lower number is newer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hapi.atomic import partial_name
from hapi.errors import UsageError
from hapi.train.outputs.run_folder import BEST_FILE, MODEL_FILE

if TYPE_CHECKING:
    from hapi.train.settings import CheckpointSettings


def existing(path: str | Path) -> list[Path]:
    """Return the files that exist, the newest first; OSError when their folder cannot be read."""
    target = Path(path).absolute()
    found: dict[int, Path] = {}
    try:
        entries = list(target.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        number = entry.name.removeprefix(f"{target.name}.")
        if entry.name == target.name:
            found[0] = Path(path)
        elif number != entry.name and number.isdecimal() and number.isascii() and number[0] != "0":
            found[int(number)] = numbered(path, int(number))
    return [found[number] for number in sorted(found)]


def goes_on(path: str | None, resume: bool) -> bool:
    """Return whether a training with these settings has a checkpoint to go on from."""
    try:
        return resume and path is not None and bool(existing(path))
    except OSError:
        return False  # who reads it says so


def check_unused(settings: CheckpointSettings) -> None:
    """Check that a training that does not go on overwrites no other's checkpoints and model files.

    Raises:
        UsageError: one of its files exists.
    """
    path, folder = settings.checkpoint_path, settings.output
    if settings.resume or path is None:
        return
    models = [] if folder is None else [Path(folder, MODEL_FILE), Path(folder, BEST_FILE)]
    for file in (*(numbered(path, n) for n in range(settings.keep)), *models):
        if file.exists():
            flag = "--checkpoint" if settings.checkpoint else "--output"
            raise UsageError(
                f"{flag} {file}: exists; give --resume to go on with it, or remove it to begin anew"
            )


def numbered(path: str | Path, number: int) -> Path:
    """Return the name of the file that is ``number`` checkpoints older than the newest, ``path``."""
    return Path(f"{path}.{number}") if number else Path(path)


def make_way(path: Path, keep: int) -> None:
    """Shift the checkpoint at ``path`` to ``path.1`` and older ones likewise, so that a new one can replace
    it.

    At most ``keep - 1`` of them stay. OSError when that fails.
    """
    previous = numbered(path, 1)
    # The same file under both names: a process died between this and its new file.
    if keep <= 1 or not path.exists() or (previous.exists() and path.samefile(previous)):
        return
    free = next((n for n in range(1, keep - 1) if not numbered(path, n).exists()), keep - 1)
    for number in range(free, 1, -1):
        numbered(path, number - 1).replace(numbered(path, number))
    _name_also(path, previous)


def _name_also(path: Path, other: Path) -> None:
    """Make ``other`` a name of the file at ``path`` too, in place of what it named."""
    link = path.with_name(partial_name(other.name))
    try:
        link.hardlink_to(path)
    except OSError:  # a file system without hard links
        path.replace(other)
        return
    try:
        link.replace(other)
    finally:
        link.unlink(missing_ok=True)
