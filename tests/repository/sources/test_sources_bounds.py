"""Bytes read to describe a checkpoint, and memory taken to read one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.sparse_files import memory_peak, reset_peak, write_shards, write_sparse

from hapi.repository.sources.open import open_source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts bytes and memory by /proc")

SHAPES = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "norm": (4096,)}
MLP = {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LAYERS = 16


def forms() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder of four billion parameters."""
    found = {"model.embed_tokens.weight": (128256, 4096)}
    for layer in range(LAYERS):
        for name, shape in {**SHAPES, **MLP}.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found


def read_bytes() -> int:
    """Bytes that this process has read from files so far."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.split()[1])


def test_describing_four_billion_parameters_reads_less_than_100_kb(tmp_path: Path) -> None:
    nbytes = write_sparse(tmp_path / "m.safetensors", forms())
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", forms(), 8)
    assert nbytes > 8e9
    for path in (tmp_path / "m.safetensors", tmp_path / "shards"):
        before = read_bytes()
        source = open_source(path)
        assert read_bytes() - before < 100_000
        assert source.nbytes == nbytes and len(source.tensors) == len(forms())


def test_describing_a_file_of_torch_reads_no_tensors(tmp_path: Path) -> None:
    state = {name: torch.zeros(4_000) for name in forms()}
    torch.save(state, tmp_path / "m.pth")
    open_source(tmp_path / "m.pth")  # imports what it needs
    before = read_bytes()
    source = open_source(tmp_path / "m.pth")
    assert read_bytes() - before < 100_000
    assert source.nbytes == 16_000 * len(state)


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("torch", marks=pytest.mark.slow)])
def test_reading_takes_the_memory_of_a_few_pieces(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("m.safetensors" if kind == "safetensors" else "m.pth")
    if kind == "safetensors":
        write_sparse(path, {"large": (64 << 20,), "small": (5,)})
    else:
        torch.save({"large": torch.zeros(8192, 8192, dtype=torch.bfloat16).t()}, path)
    source = open_source(path)
    before = reset_peak()
    read = sum(len(piece) for tensor in source.tensors.values() for piece in tensor.pieces())
    assert read == source.nbytes and read >= 128 << 20
    peak = memory_peak() - before
    assert peak < (40 if kind == "safetensors" else 126) << 20, peak
    path.unlink()
