"""Checkpoints of zeros that take no room on the disk, and the memory that reading them takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_sparse(path: Path, tensors: dict[str, tuple[int, ...]], dtype: str = "BF16", item: int = 2) -> int:
    """Write a safetensors file of zeros that takes no room on the disk; return the tensors' bytes."""
    header, position = {}, 0
    for name, shape in tensors.items():
        size = item
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return position


def write_shards(folder: Path, tensors: dict[str, tuple[int, ...]], count: int) -> None:
    """Write them as a sharded checkpoint."""
    homes, names = {}, list(tensors)
    per = -(-len(names) // count)
    for number, start in enumerate(range(0, len(names), per), start=1):
        shard = f"model-{number:05}-of-{count:05}.safetensors"
        homes |= dict.fromkeys(names[start : start + per], shard)
        write_sparse(folder / shard, {name: tensors[name] for name in names[start : start + per]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def memory_peak() -> int:
    """Largest resident memory in bytes since it was reset by :func:`reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> int:
    """Forget the peak; return the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_peak()
