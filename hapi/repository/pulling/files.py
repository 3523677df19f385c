"""Safetensors files of pushed tensors, each there whole or not at all, and folders of them with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hapi.atomic import PARTIAL_SUFFIX, alone_in, growing, sync_folder, write_atomically
from hapi.errors import HapiError, UsageError
from hapi.models.graph.digest import ContentDigest
from hapi.paths import make_folder
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import PIECE_BYTES
from hapi.repository.pulling.reading import read_in_order
from hapi.repository.pulling.selection import FileContent, FileTensor
from hapi.repository.pulling.side_files import write_side_files
from hapi.repository.side_files import are_of_adapter
from hapi.repository.stored import StoredModel
from hapi.store.safetensors import encode_header
from hapi.units import format_bytes

SHARD_BYTES = 5 * 10**9
"""Bytes of a shard unless something else is asked for, as Hugging Face's libraries write them."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
"""Name of the one file of an adapter (PEFT), which its library looks for."""

Note = Callable[[int], None]
"""Told the bytes of tensors that are done since its last call."""


@dataclass(frozen=True)
class Pulled:
    """Files of a pull."""

    files: tuple[Path, ...]
    nbytes: int
    """Bytes of all tensors in them."""
    kept: int = 0
    """Bytes of tensors that an earlier pull had written."""


def write(
    stored: StoredModel,
    content: FileContent,
    output: Path,
    shard_bytes: int = SHARD_BYTES,
    note: Note = lambda nbytes: None,
) -> Pulled:
    """Write the tensors into ``output``: a file if it ends with ``.safetensors``, otherwise a folder, which is made.

    The other arguments and errors are those of :func:`write_file` and :func:`write_folder`.
    """
    if output.suffix == ".safetensors":
        return write_file(stored, content, output, note)
    make_folder(output, "--output")
    return write_folder(stored, content, output, shard_bytes, note)


def write_file(
    stored: StoredModel, content: FileContent, path: Path, note: Note = lambda nbytes: None
) -> Pulled:
    """Write the tensors into one safetensors file, or leave what was there.

    Until it is whole it is called ``PATH.partial``. That stays when a pull is interrupted: the next one checks it, and
    goes on behind its last whole tensor.

    Args:
        stored: the model.
        content: its tensors.
        path: of the file; its folder exists.
        note: told of progress.

    Raises:
        HapiError: the file cannot be written, or another process is writing it.
        DataError: a tensor is damaged in the store.
    """
    head = encode_header((tensor.form for tensor in content.tensors), content.metadata)
    nbytes = sum(tensor.nbytes for tensor in content.tensors)
    with _mapped(path), growing(path) as file:
        found = _count_whole(file, head, content.tensors)
        whole = content.tensors[: found or 0]
        kept = sum(tensor.nbytes for tensor in whole)
        start = 0 if found is None else len(head) + kept
        file.seek(start)
        file.truncate()
        _check_room(path, len(head) + nbytes - start)
        if found is None:
            file.write(head)
        if kept:
            note(kept)
        for piece in read_in_order(stored, content.tensors[len(whole) :]):
            file.write(piece)
            note(len(piece))
    return Pulled((path,), nbytes, kept)


def write_folder(
    stored: StoredModel,
    content: FileContent,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    note: Note = lambda nbytes: None,
) -> Pulled:
    """Write the tensors into ``folder`` as Hugging Face's libraries do: one file, or shards with an index.

    The small files that the model was pushed with come first. The index comes last: without it there is no checkpoint.
    What an interrupted pull wrote is checked, and kept as far as it is whole. Two pulls at a time would mix their
    shards, so the second one is refused. Errors are those of :func:`write_file`.

    Args:
        stored: the model.
        content: its tensors.
        folder: exists, and has no other checkpoint.
        shard_bytes: bytes of tensors in a shard; a larger tensor is alone in one.
        note: told of progress.
    """
    with _mapped(folder), alone_in(folder):
        return _write_folder(stored, content, folder, shard_bytes, note)


def _write_folder(
    stored: StoredModel, content: FileContent, folder: Path, shard_bytes: int, note: Note
) -> Pulled:
    shards = list(_shards(content.tensors, shard_bytes))
    if len(shards) == 1:
        single = _ADAPTER if are_of_adapter(content.files) else _SINGLE
        _check_alone(folder, {single})
        small = write_side_files(stored, content.files, folder)
        alone = write_file(stored, content, folder / single, note)
        return replace(alone, files=(*alone.files, *small))
    paths = [
        folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    _check_alone(folder, {_INDEX, *(path.name for path in paths)})
    small = write_side_files(stored, content.files, folder)
    with _mapped(folder):
        (folder / _INDEX).unlink(missing_ok=True)
        sync_folder(folder)
    metadata, kept = {"format": content.metadata["format"]}, 0
    for path, shard in zip(paths, shards, strict=True):
        part = FileContent(tuple(shard), metadata)
        if _is_whole(path, part):
            whole = sum(tensor.nbytes for tensor in shard)
            kept += whole
            note(whole)
        else:
            kept += write_file(stored, part, path, note).kept
    nbytes = sum(tensor.nbytes for tensor in content.tensors)
    homes = {tensor.name: path.name for path, shard in zip(paths, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(homes.items()))}
    with _mapped(folder / _INDEX):
        write_atomically(folder / _INDEX, json.dumps(index, indent=2).encode() + b"\n")
    return Pulled((*paths, folder / _INDEX, *small), nbytes, kept)


def _shards(tensors: Sequence[FileTensor], shard_bytes: int) -> Iterator[list[FileTensor]]:
    shard: list[FileTensor] = []
    nbytes = 0
    for tensor in tensors:
        if shard and nbytes + tensor.nbytes > shard_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(tensor)
        nbytes += tensor.nbytes
    yield shard


def _check_alone(folder: Path, own: set[str]) -> None:
    """Raise :class:`UsageError` when ``folder`` has files of another checkpoint, which readers would take for parts."""
    with _mapped(folder):
        names = sorted(path.name for path in folder.iterdir())
    foreign = [
        name
        for name in names
        if name.removesuffix(PARTIAL_SUFFIX).endswith((".safetensors", ".index.json"))
        and name.removesuffix(PARTIAL_SUFFIX) not in own
    ]
    if foreign:
        raise UsageError(f"--output {folder}: has {foreign[0]} of another checkpoint; give an empty folder")


def _is_whole(path: Path, content: FileContent) -> bool:
    """Return whether the file at ``path`` has these very tensors; all of it is read."""
    head = encode_header((tensor.form for tensor in content.tensors), content.metadata)
    nbytes = sum(tensor.nbytes for tensor in content.tensors)
    try:
        if not path.is_file() or path.stat().st_size != len(head) + nbytes:
            return False
        with path.open("rb") as file:
            return _count_whole(file, head, content.tensors) == len(content.tensors)
    except OSError:
        return False


def _count_whole(file: BinaryIO, head: bytes, tensors: Sequence[FileTensor]) -> int | None:
    """Return how many of ``tensors`` follow one another, whole, behind ``head`` in ``file``; None without the head."""
    if file.read(len(head)) != head:
        return None
    return next((i for i, tensor in enumerate(tensors) if not _has(file, tensor)), len(tensors))


def _has(file: BinaryIO, tensor: FileTensor) -> bool:
    """Return whether the next bytes of a file are those of ``tensor``."""
    checksum, digest, left = TensorChecksum(), ContentDigest(), tensor.nbytes
    while left:
        data = file.read(min(PIECE_BYTES, left))
        if not data:
            return False
        (digest if tensor.entry is None else checksum).update(data)
        left -= len(data)
    if tensor.entry is None:
        return digest.hexdigest() == tensor.digest
    return checksum.hexdigest() == tensor.entry.checksum


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.absolute().parent).free
    if free < needed:
        raise HapiError(
            f"{path}: needs {format_bytes(needed)}, and {format_bytes(free)} are free there; make room and run the "
            "same again"
        )


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """Map the system's errors about ``path`` in the block to one line."""
    try:
        yield
    except OSError as error:
        raise HapiError(f"{path}: cannot be written: {error.strerror or error}") from None
