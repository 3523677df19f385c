"""One safetensors file as a source: the library's own files, order, and headers that lie."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from hapi.errors import ModelError
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.repository.sources.open import open_source
from hapi.repository.sources.safetensors_file import natural_order


def content(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Forms and bytes of the tensors of a checkpoint, as the source reads them."""
    return {
        name: (tensor.dtype, tensor.shape, b"".join(bytes(piece) for piece in tensor.pieces()))
        for name, tensor in open_source(path).tensors.items()
    }


def expected(state: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The same of tensors in memory."""
    return {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), bytes(tensor_bytes(t)))
        for name, t in state.items()
    }


def raw(path: Path, header: Any, size: int) -> Path:
    """Write a file of this header and ``size`` bytes of tensors."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


def is_written(dtype: torch.dtype) -> bool:
    """Whether the installed library writes the type; older ones know fewer."""
    try:
        save({"a": torch.zeros(1).to(dtype)})
    except KeyError:
        return False
    return True


def test_every_type_and_shape_of_the_library_is_read(tmp_path: Path) -> None:
    types = [dtype for dtype in STORED_NAMES if is_written(dtype)]
    assert len(types) > 12
    state = {f"layer.{i}.{str(dtype)[6:]}": torch.arange(7).to(dtype) for i, dtype in enumerate(types)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "matrix": torch.randn(33, 17)}
    save_file(state, tmp_path / "all.safetensors", {"format": "pt", "made": "by hand"})
    source = open_source(tmp_path / "all.safetensors")
    assert content(tmp_path / "all.safetensors") == expected(state)
    assert source.metadata == {"format": "pt", "made": "by hand"} and source.files == 1
    assert source.nbytes == sum(t.nbytes for t in state.values())


def test_the_librarys_alphabetical_order_gives_way_to_that_of_layers(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{kind}.weight" for i in range(12) for kind in ("attn", "mlp")]
    state = {name: torch.zeros(2, dtype=torch.float16 if "mlp" in name else torch.float32) for name in names}
    save_file(state, tmp_path / "m.safetensors")
    assert list(open_source(tmp_path / "m.safetensors").tensors) == names


def test_a_chosen_order_stays(tmp_path: Path) -> None:
    chosen = ["stem.weight", "blocks.1.weight", "blocks.0.weight", "head.weight"]
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(chosen)
    }
    assert list(open_source(raw(tmp_path / "m.safetensors", header, 4)).tensors) == chosen


def test_layers_are_the_modules_of_the_names(tmp_path: Path) -> None:
    save_file(
        {n: torch.zeros(1) for n in ("a.b.weight", "a.b.bias", "a.c.weight", "scale")},
        tmp_path / "m.safetensors",
    )
    layers = open_source(tmp_path / "m.safetensors").layers()
    assert [(name, [t.name for t in tensors]) for name, tensors in layers] == [
        ("scale", ["scale"]), ("a.b", ["a.b.bias", "a.b.weight"]), ("a.c", ["a.c.weight"])
    ]  # fmt: skip


def test_the_wrapper_of_dataparallel_is_taken_off(tmp_path: Path) -> None:
    save_file(
        {"module.fc.weight": torch.ones(2), "module.fc.bias": torch.ones(1)}, tmp_path / "m.safetensors"
    )
    tensors = open_source(tmp_path / "m.safetensors").tensors
    assert {name: tensor.name for name, tensor in tensors.items()} == {n: n for n in ("fc.bias", "fc.weight")}


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


LIES = {
    "overlaps": ({"a": entry(0, 4), "b": entry(2, 6)}, 6),
    "leaves a gap": ({"a": entry(0, 4), "b": entry(5, 6)}, 6),
    "cut or extended": ({"a": entry(0, 4)}, 3),
    "cut or extended ": ({"a": entry(0, 4)}, 5),
    "its shape needs 16": ({"a": entry(0, 4, [4], "F32")}, 4),
    "has type 'F4'": ({"a": entry(0, 4, [8], "F4")}, 4),
    "can hold the name": (b'{"a\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', 1),
    "is not described by": ({"a": {"dtype": "U8", "shape": [1]}}, 1),
    "no pair of numbers": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, True]}}, 1),
    "more than 2^40 elements": ({"a": entry(0, 4, [2**40, 2**40, 0])}, 4),
    "metadata are no table": ({"__metadata__": {"a": 1}}, 0),
    "no table": ([], 0),
    "given twice": (b'{"a": {}, "a": {}}', 0),
    "damaged or no safetensors": (b"\xff\xfe", 0),
    "a side": ({"a": entry(0, 4, [-4])}, 4),
}


@pytest.mark.parametrize("words", LIES)
def test_a_header_that_lies_is_refused_in_one_line(tmp_path: Path, words: str) -> None:
    header, size = LIES[words]
    path = raw(tmp_path / "m.safetensors", header, size)
    with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert words == "a side" or words.strip() in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff" * 8, struct.pack("<Q", 1 << 40) + b"{}"])
def test_files_without_room_for_their_header_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.safetensors is no safetensors file"):
        open_source(tmp_path / "m.safetensors")


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((10**10).to_bytes(8, "little"))
        file.truncate(11 * 10**9)  # sparse
    with pytest.raises(ModelError, match="its header has 10000000008 bytes, more than 104857600"):
        open_source(path)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="not a plain file"):
        open_source(tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="does not exist"):
        open_source(tmp_path / "other.safetensors")


@pytest.mark.parametrize("change", ["shortened", "replaced", "written"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(5 << 20)}, path)
    tensor = open_source(path).tensors["a"]
    pieces = tensor.pieces()
    next(pieces)
    if change == "shortened":
        os.truncate(path, 1 << 20)
    elif change == "written":
        os.utime(path, ns=(1, 1))
    else:
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").rename(path)
        assert sum(len(piece) for piece in pieces) > 0  # the file that was opened is still whole
        pieces = tensor.pieces()
    with pytest.raises(ModelError, match="was changed while it was read; run the same again"):
        list(pieces)


@given(st.lists(st.integers(0, 120), min_size=2, max_size=20, unique=True))
def test_modules_are_sorted_by_their_numbers(numbers: list[int]) -> None:
    names = [f"layers.{n}.weight" for n in numbers]
    assert sorted(names, key=natural_order) == [f"layers.{n}.weight" for n in sorted(numbers)]


@pytest.mark.parametrize(
    "modules",
    [
        ["a", "\u0663"],
        ["0", "00", "a"],
        ["9", "10", "9" * 5000, "1" + "0" * 5000],
        ["l2", "l\u00b2", "l\u0662"],
    ],
    ids=["digits of another script", "zeros", "long numbers", "look-alikes"],
)
def test_modules_of_any_name_have_an_order(tmp_path: Path, modules: list[str]) -> None:
    names = [f"{module}.weight" for module in modules]
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i, name in enumerate(sorted(names))
    }
    path = raw(tmp_path / "m.safetensors", header, len(names))
    assert list(open_source(path).tensors) == names
