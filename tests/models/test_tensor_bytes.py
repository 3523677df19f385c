"""Tensors as bytes: of any type and stride."""

from __future__ import annotations

import struct

import pytest
import torch

from hapi.models.tensors import STORED_NAMES, tensor_bytes


def test_a_single_element_has_bytes_whatever_its_stride() -> None:
    number = torch.tensor([1.5, 2.5]).as_strided((1, 1), (0, 7), 1)
    assert bytes(tensor_bytes(number)) == struct.pack("<f", 2.5)


@pytest.mark.parametrize("dtype", STORED_NAMES)
def test_bytes_are_the_tensors_own_where_it_is_contiguous(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    tensor_bytes(tensor)[:] = bytes(tensor_bytes(torch.ones(6, dtype=dtype)))
    assert torch.equal(tensor, torch.ones(6, dtype=dtype))
    assert bytes(tensor_bytes(tensor[::2])) == bytes(tensor_bytes(tensor))[: 3 * dtype.itemsize]
