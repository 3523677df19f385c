"""The small files of a pushed checkpoint, written beside its tensors: whole, verified, over no other file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hapi.atomic import write_atomically
from hapi.errors import HapiError, UsageError
from hapi.models.tensors import tensor_bytes
from hapi.repository.entries import TensorEntry
from hapi.repository.loading.load import IDENTITY
from hapi.repository.side_files import MAX_FILES_BYTES
from hapi.repository.stored import StoredModel
from hapi.units import format_bytes


def write_side_files(stored: StoredModel, files: Mapping[str, TensorEntry], folder: Path) -> list[Path]:
    """Write ``files`` (by name) of a model into ``folder``; return where they are.

    Raises:
        UsageError: there is another file of such a name; nothing is written.
        DataError: a file is damaged in the store.
        HapiError: one cannot be written.
    """
    nbytes = sum(entry.nbytes for entry in files.values())
    if nbytes > MAX_FILES_BYTES:
        raise HapiError(
            f"model {stored.reference!r} has files of {format_bytes(nbytes)} beside its tensors, more than the "
            f"{format_bytes(MAX_FILES_BYTES)} that are written; push it again"
        )
    names = {entry.name: name for name, entry in files.items()}
    found = {names[name]: bytes(tensor_bytes(tensor)) for name, tensor in stored.read(names, IDENTITY)}
    missing = [name for name, data in found.items() if not _is_there(folder / name, data)]
    for name in missing:
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomically(folder / name, found[name])
        except OSError as error:
            raise HapiError(f"{folder / name}: cannot be written: {error.strerror or error}") from None
    return [folder / name for name in found]


def _is_there(path: Path, data: bytes) -> bool:
    """Return whether the file is there, as of an earlier pull; :class:`UsageError` where another one is."""
    try:
        if not path.exists() and not path.is_symlink():
            return False
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return True
    except OSError as error:
        raise HapiError(f"{path}: cannot be read: {error.strerror or error}") from None
    raise UsageError(f"--output {path.parent}: has another {path.name}; give an empty folder")
