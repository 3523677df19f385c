"""Loads to a GPU, through pinned staging buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.loading_tools import flip, some_tensors, write_pack

from hapi.errors import DataError
from hapi.repository.loading.load import load
from hapi.repository.loading.pool import LoadingPool
from hapi.store.open import open_store


@pytest.mark.gpu
def test_a_gpu_gets_the_very_bytes(tmp_path: Path) -> None:
    store, pool = open_store(str(tmp_path)), LoadingPool(buffers=3)
    tensors = [
        *some_tensors(40, most=300_000),
        ("large", torch.randn(20_000_000)),
        ("half", torch.ones(3).half()),
    ]
    entries = write_pack(store, tensors)
    assert pool.staging(torch.device("cuda")) is pool.staging(torch.device("cuda"))
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            loaded = list(load(store, entries, "cuda", pool))
            assert all(
                got.is_cuda and got.dtype == t.dtype for (_, got), (_, t) in zip(loaded, tensors, strict=True)
            )
            assert all(torch.equal(got.cpu(), t) for (_, got), (_, t) in zip(loaded, tensors, strict=True))
    flip(store, entries[40])
    with pytest.raises(DataError, match="'large'"):
        list(load(store, entries, "cuda", pool))


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 61])
def test_a_gpu_gets_another_type(tmp_path: Path, head: int) -> None:
    store, pool = open_store(str(tmp_path)), LoadingPool(buffers=3)
    tensors = [*some_tensors(40, most=300_000), ("large", torch.randn(9_000_001)), ("n", torch.arange(9))]
    entries = write_pack(store, tensors, head=head)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with torch.cuda.stream(torch.cuda.Stream()):
            for (_, got), (name, given) in zip(
                load(store, entries, "cuda", pool, dtype=dtype), tensors, strict=True
            ):
                expected = given.to(dtype) if given.is_floating_point() else given
                assert got.is_cuda and got.dtype == expected.dtype and torch.equal(got.cpu(), expected), name
