"""A checkpoint in several files with an index, as Hugging Face's libraries save what is too large for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi.errors import ModelError
from hapi.repository.entries import SourceTensor
from hapi.repository.sources.files import SourceFile
from hapi.repository.sources.safetensors_file import natural_order
from hapi.text import counted
from hapi.units import format_bytes
from hapi.wire.documents import parse_document

INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 64 << 20

ReadShard = Callable[[Path], Mapping[str, SourceTensor]]
"""Describes the tensors of one shard."""


@dataclass(frozen=True)
class ShardIndex:
    """An ``index.json``: which file has which tensor."""

    path: Path
    shards: Mapping[str, str]
    """Name of the file by name of the tensor."""
    total_bytes: int | None
    """Bytes of all tensors, where the index says them."""


def read_index(path: Path) -> ShardIndex:
    """Return the index at ``path``.

    Raises:
        ModelError: it is no index, or names a file that does not lie beside it.
    """
    file = SourceFile.at(path)
    what = f"index {path}"
    if file.size > _MAX_INDEX_BYTES:
        raise ModelError(f"{what} has {format_bytes(file.size)}; it is no index of a checkpoint")
    try:
        document = parse_document(file.read(0, file.size))
    except ValueError as error:
        raise ModelError(f"{what} is not JSON: {error}") from None
    shards = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{what} has no weight_map from tensors to files")
    for shard in shards.values():
        if Path(shard).name != shard or shard in ("", ".", "..") or set("\\\0") & set(shard):
            raise ModelError(f"{what} names the file {shard[:80]!r}; shards must lie beside their index")
    return ShardIndex(path, shards, _total_bytes(document, what))


def _total_bytes(document: Mapping[str, Any], what: str) -> int | None:
    metadata = document.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (not isinstance(total, int | float) or total != int(total)):
        raise ModelError(f"{what}: its total_size {total!r:.40} is no number of bytes")
    return None if total is None else int(total)


def read_shards(index: ShardIndex, read: ReadShard) -> dict[str, SourceTensor]:
    """Return the tensors of all shards of ``index``, by name in the order of their modules.

    Raises:
        ModelError: a shard is missing, or holds other tensors than the index says.
    """
    what = f"index {index.path}"
    found: dict[str, SourceTensor] = {}
    homes: dict[str, str] = {}
    for shard in dict.fromkeys(index.shards.values()):
        path = index.path.parent / shard
        if not _exists(path):
            count = sum(file == shard for file in index.shards.values())
            raise ModelError(
                f"{what}: {shard} is missing, with {counted(count, 'tensor')}; download it again"
            )
        for name, tensor in read(path).items():
            if name in found:
                raise ModelError(f"{what}: tensor {name[:80]!r} is in {homes[name]} and in {shard}")
            if index.shards.get(name) != shard:
                said = index.shards.get(name, "no file")
                raise ModelError(f"{what} says that tensor {name[:80]!r} is in {said}, but it is in {shard}")
            found[name], homes[name] = tensor, shard
    for name, shard in index.shards.items():
        if name not in found:
            raise ModelError(
                f"{what} says that tensor {name[:80]!r} is in {shard}, but it is in none of its files"
            )
    return dict(sorted(found.items(), key=lambda item: natural_order(item[0])))


def total_notes(index: ShardIndex, nbytes: int, tied_bytes: int) -> list[str]:
    """Return a line where the index says another number of bytes than its tensors have.

    That is no reason to refuse them: some writers count bytes of files, or keep the number of the checkpoint from which
    they took tensors.

    Args:
        index: of the shards.
        nbytes: bytes of all tensors, by their names.
        tied_bytes: those of tensors that share their storage with others, which most writers count once.
    """
    if index.total_bytes in (None, nbytes, nbytes - tied_bytes):
        return []
    line = (
        f"index {index.path} says that all tensors have {index.total_bytes} bytes, but they have {nbytes}; each that "
        "it names is there, so they are taken; if its files are of several checkpoints, download them again"
    )
    return [line]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False
