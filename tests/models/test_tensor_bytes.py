"""Tensors as bytes: of any type and stride."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.repository.sources.open import open_source


def test_a_single_element_has_bytes_whatever_its_stride() -> None:
    number = torch.tensor([1.5, 2.5]).as_strided((1, 1), (0, 7), 1)
    assert bytes(tensor_bytes(number)) == struct.pack("<f", 2.5)


@pytest.mark.parametrize("dtype", STORED_NAMES)
def test_bytes_are_the_tensors_own_where_it_is_contiguous(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    tensor_bytes(tensor)[:] = bytes(tensor_bytes(torch.ones(6, dtype=dtype)))
    assert torch.equal(tensor, torch.ones(6, dtype=dtype))
    assert bytes(tensor_bytes(tensor[::2])) == bytes(tensor_bytes(tensor))[: 3 * dtype.itemsize]


def test_what_is_negated_or_conjugated_lazily_has_the_bytes_of_its_values(tmp_path: Path) -> None:
    given = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    for lazy in (given.conj(), given.conj().imag, torch.real(given), given[:1].conj()):
        assert bytes(tensor_bytes(lazy)) == bytes(tensor_bytes(lazy.clone().resolve_conj().resolve_neg()))
    path = tmp_path / "old.pth"  # a file that is loaded whole
    state = {"a": given.conj(), "b": given.clone().conj().imag}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    found = {name: b"".join(map(bytes, t.pieces())) for name, t in open_source(path).tensors.items()}
    assert found == {"a": struct.pack("<4f", 1, -2, 3, 4), "b": struct.pack("<2f", -2, 4)}
