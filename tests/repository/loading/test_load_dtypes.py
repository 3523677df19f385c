"""Tensors that get another type while they are copied from the staging buffers: the very numbers of ``Tensor.to``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.loading_tools import flip, write_pack

from hapi.errors import DataError, UsageError
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.repository.entries import SourceTensor
from hapi.repository.loading.load import load, plan_of, traits_of
from hapi.repository.loading.pool import LoadingPool
from hapi.repository.push import SourceLayer, push_tensors
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.open import open_store

FLOATS = [dtype for dtype in STORED_NAMES if dtype.is_floating_point]
TARGETS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{request.node.name}")


def all_patterns(dtype: torch.dtype, count: int = 5000) -> torch.Tensor:
    """Any bits: infinities, numbers too small or large, and what is no number, among them."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=random, dtype=torch.uint8).view(dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and bytes(
        tensor_bytes(found.contiguous())
    ) == bytes(tensor_bytes(expected.contiguous()))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("head", [64, 61, 3])
def test_every_type_to_every_type(store: ObjectStore, target: torch.dtype, head: int) -> None:
    tensors = [(str(dtype), all_patterns(dtype)) for dtype in STORED_NAMES]
    tensors += [("empty", torch.empty(0, 3)), ("one", torch.tensor(1.1)), ("square", torch.randn(30, 40))]
    entries = write_pack(store, tensors, head=head)
    for (entry, found), (name, given) in zip(load(store, entries, dtype=target), tensors, strict=True):
        assert entry.name == name
        assert same_bits(found, given.to(target) if given.is_floating_point() else given), name


@pytest.mark.parametrize("on", [True, False], ids=["pool", "no pool"])
@pytest.mark.parametrize("start", [64, 62, 1])
def test_elements_that_lie_in_two_ranges(tmp_path: Path, on: bool, start: int) -> None:
    """Ranges are cut at bytes, whatever the elements."""
    store = open_store(f"memory://edges-{start}-{on}")
    tensors = [
        ("a", torch.randn(3_000_001)),
        ("b", torch.randn(1_500_003, dtype=torch.float64)),
        ("c", torch.randn(7)),
    ]
    entries = write_pack(store, tensors, head=start)
    assert len(plan_of(entries, traits_of(store)).ranges) > 2
    found = load(store, entries, dtype=torch.bfloat16, pool=LoadingPool(on=on, buffers=3))
    for (_, got), (name, given) in zip(found, tensors, strict=True):
        assert same_bits(got, given.to(torch.bfloat16)), name


def test_equal_bytes_of_several_types_and_of_one(store: ObjectStore) -> None:
    given = torch.randn(4000)
    tensors = [
        ("a", given),
        ("b", given.view(torch.int32)),
        ("c", given),
        ("d", torch.ones(9)),
        ("e", torch.ones(9)),
    ]
    loaded = load(store, write_pack(store, tensors), dtype=torch.float16)
    found = {entry.name: tensor for entry, tensor in loaded}
    assert same_bits(found["a"], given.to(torch.float16)) and same_bits(found["b"], given.view(torch.int32))
    assert same_bits(found["c"], found["a"]) and found["c"].data_ptr() != found["a"].data_ptr()
    assert found["d"].data_ptr() != found["e"].data_ptr() and found["d"].dtype == torch.float16


def test_the_own_type_is_no_conversion(store: ObjectStore) -> None:
    given = torch.randn(4000)
    ((_, found),) = load(store, write_pack(store, [("a", given)]), dtype=torch.float32)
    assert same_bits(found, given)


def test_damage_is_found_before_it_is_converted(store: ObjectStore) -> None:
    entries = write_pack(store, [("a", torch.randn(70_000)), ("b", torch.randn(70_000))])
    flip(store, entries[1])
    with pytest.raises(DataError, match="tensor 'b'"):
        list(load(store, entries, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_only_floating_types(store: ObjectStore, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="no floating type"):
        load(store, [], dtype=dtype)


@pytest.mark.slow
def test_memory_is_that_of_the_new_type(tmp_path: Path) -> None:
    store, pool = LocalStore(tmp_path), LoadingPool(idle_limit=1 << 30)
    entries = write_pack(store, [(str(n), torch.randn(5_000_000)) for n in range(8)])
    kept = list(load(store, entries, dtype=torch.bfloat16, pool=pool))
    assert sum(t.nbytes for _, t in kept) == 80_000_000
    assert pool.memory.mapped_bytes < 150_000_000


def test_a_pushed_model_is_read_in_another_type(tmp_path: Path) -> None:
    given = {"w": torch.randn(300, 40), "n": torch.arange(5)}
    layers = [SourceLayer(name, (SourceTensor.of(name, tensor),)) for name, tensor in given.items()]
    stored = push_tensors(LocalStore(tmp_path), "m", layers).model
    found = dict(stored.read(given, dtype=torch.bfloat16))
    assert same_bits(found["w"], given["w"].to(torch.bfloat16)) and same_bits(found["n"], given["n"])
