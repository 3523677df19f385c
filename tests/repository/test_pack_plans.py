"""Any model, on any store: each tensor has one sound place, prefixes and suffixes are few ranges, little is wasted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.models.graph.digest import content_digest
from hapi.repository.entries import SourceTensor, TensorEntry
from hapi.repository.packs.index import PackIndex, tensor_ranges
from hapi.repository.packs.layout import (
    ALIGNED_BYTES,
    ALIGNMENT,
    LARGE_BYTES,
    PACK_BYTES,
    HashedLayer,
    HashedTensor,
    PackPlan,
    WritePlan,
    is_padding,
    plan_packs,
)
from hapi.repository.packs.place import pack_id

Layers = tuple[tuple[int, ...], ...]
"""Contents of the tensors of each layer, by number."""
SIZES = (
    0,
    1,
    100,
    4096,
    ALIGNED_BYTES,
    ALIGNED_BYTES + 3,
    LARGE_BYTES - 1,
    LARGE_BYTES,
    5 << 20,
    100 << 20,
    300 << 20,
)
"""Bytes of content N are those at N modulo their number. No byte is read, so that they may be any."""
HEADER_BYTES = 200
"""Most bytes of a tensor in a pack's header: its name has 65 to 84 characters."""
CONTENTS = st.integers(0, 60)
MODELS = st.lists(st.lists(CONTENTS, max_size=5).map(tuple), min_size=1, max_size=12).map(tuple)


def nbytes(content: int) -> int:
    return SIZES[content % len(SIZES)]


def never() -> Iterator[memoryview]:
    raise AssertionError("a plan reads nothing")


def hashed(layers: Layers, freeze: int | None = None) -> list[HashedLayer]:
    def tensor(layer: int, number: int, content: int) -> HashedTensor:
        source = SourceTensor(f"{layer}.{number}", "uint8", (nbytes(content),), never)
        return HashedTensor(source, content_digest(f"{content}".encode()), f"{content:016x}")

    return [
        HashedLayer(tuple(tensor(place, i, content) for i, content in enumerate(layer)), place + 1 == freeze)
        for place, layer in enumerate(layers)
    ]


def index_of(packs: Sequence[PackPlan]) -> PackIndex:
    index = PackIndex()
    for pack in packs:
        index.add(pack.id, pack.header)
    return index


def runs(entries: Sequence[TensorEntry]) -> int:
    """Ranges of bytes that hold these tensors, padding included."""
    places = sorted((entry.pack, entry.start, entry.stop) for entry in entries if entry.nbytes)
    count, at = 0, ("", 0)
    for pack, start, stop in places:
        count += pack != at[0] or start - at[1] >= ALIGNMENT
        at = (pack, max(stop, at[1] if pack == at[0] else 0))
    return count


def parts(plan: WritePlan, layers: Layers) -> Iterator[list[TensorEntry]]:
    """Every prefix and every suffix of a model, as the places of its tensors."""
    for split in range(len(layers) + 1):
        for numbers in (range(split), range(split, len(layers))):
            yield [plan.entries[f"{n}.{i}"] for n in numbers for i in range(len(layers[n]))]


def check_places(plan: WritePlan, layers: Layers, before: Sequence[PackPlan]) -> None:
    """Each tensor has one place, where a pack's header says that its very content lies."""
    assert set(plan.entries) == {f"{n}.{i}" for n, layer in enumerate(layers) for i in range(len(layer))}
    headers = {pack.id: tensor_ranges(pack.header) for pack in (*before, *plan.packs)}
    for name, entry in plan.entries.items():
        layer, number = map(int, name.split("."))
        assert entry.digest == content_digest(f"{layers[layer][number]}".encode())
        there = {
            place for held, place in headers[pack_id(entry.pack)].items() if held.endswith(f":{entry.digest}")
        }
        assert (entry.start, entry.stop) in there
    assert set(plan.found) == {pack_id(entry.pack) for entry in plan.entries.values()} - {
        p.id for p in plan.packs
    }


def check_packs(plan: WritePlan) -> None:
    """Packs are of bounded size, and hold little but tensors."""
    for pack in plan.packs:
        own = [
            t.source.nbytes for name, t in zip(pack.names, pack.tensors, strict=True) if not is_padding(name)
        ]
        assert len(own) == 1 or sum(own) <= PACK_BYTES
        aligned = sum(size >= ALIGNED_BYTES for size in own)
        assert pack.size - len(pack.header) - sum(own) < ALIGNMENT * max(aligned, 1)
        assert len(pack.header) <= HEADER_BYTES * (len(pack.names) + 1)
        assert tensor_ranges(pack.header).keys() == set(pack.names)


@given(MODELS, st.integers(0, 12))
def test_a_model_on_an_empty_store(layers: Layers, freeze: int) -> None:
    plan = plan_packs(hashed(layers, freeze), PackIndex())
    check_places(plan, layers, ())
    check_packs(plan)
    contents = [content for layer in layers for content in layer]
    once = sum(nbytes(content) for content in set(contents))
    twice = sum(nbytes(content) for content in contents if nbytes(content) < LARGE_BYTES)
    assert once <= plan.nbytes <= once + twice  # large ones are written once, whatever layer they are of
    for pack in plan.packs:  # none has tensors of both sides of the freeze, but those that both have
        own = {
            t.source.name for name, t in zip(pack.names, pack.tensors, strict=True) if not is_padding(name)
        }
        assert len({int(name.partition(".")[0]) < freeze for name in own}) == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 12))
def test_prefixes_and_suffixes_of_different_tensors_are_a_range_of_each_pack(
    counts: list[int], freeze: int
) -> None:
    layers = tuple(tuple(range(sum(counts[:n]), sum(counts[: n + 1]))) for n in range(len(counts)))
    plan = plan_packs(hashed(layers, freeze), PackIndex())
    assert len(plan.packs) <= 2 + 2 * sum(nbytes(c) for layer in layers for c in layer) // PACK_BYTES
    for part in parts(plan, layers):
        assert runs(part) == len({entry.pack for entry in part if entry.nbytes})


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_a_fine_tuned_model_takes_its_changed_layers_and_a_range_more_for_each(
    counts: list[int], data: st.DataObject
) -> None:
    base = tuple(tuple(range(sum(counts[:n]), sum(counts[: n + 1]))) for n in range(len(counts)))
    changed = data.draw(st.sets(st.integers(0, len(base) - 1)))
    tuned = tuple(
        tuple(content + len(SIZES) * 100 for content in layer) if number in changed else layer
        for number, layer in enumerate(base)
    )
    first = plan_packs(hashed(base), PackIndex())
    second = plan_packs(hashed(tuned), index_of(first.packs))
    check_places(second, tuned, first.packs)
    assert second.nbytes == sum(nbytes(content) for number in changed for content in tuned[number])
    assert not plan_packs(hashed(base), index_of((*first.packs, *second.packs))).packs
    most = len(first.packs) + len(second.packs) + 2 * len(changed)
    assert all(runs(part) <= most for part in parts(second, tuned))


@pytest.mark.slow
@given(st.lists(MODELS, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_models_one_after_the_other_share_what_they_can(models: list[Layers], random: object) -> None:
    there: list[PackPlan] = []
    for layers in models:
        index = index_of(there)
        condemned = {pack.id for pack in there if random.random() < 0.2}  # type: ignore[attr-defined]
        known = index_of([pack for pack in there if pack.id not in condemned])
        plan = plan_packs(hashed(layers), known, condemned)
        check_places(plan, layers, there)
        check_packs(plan)
        assert not condemned & ({pack.id for pack in plan.packs} | plan.found.keys())
        new = [
            t
            for pack in plan.packs
            for name, t in zip(pack.names, pack.tensors, strict=True)
            if not is_padding(name)
        ]
        large = [t.digest for t in new if t.source.nbytes >= LARGE_BYTES]
        assert len(set(large)) == len(large) and not set(large) & known.tensors.keys()
        there += [pack for pack in plan.packs if pack.id not in index.sizes]
        again = plan_packs(hashed(layers), index_of(there))
        assert not again.packs and again.nbytes == 0
