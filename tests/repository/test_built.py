"""What is remembered of built models, tensors that are read one by one, and locks by key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.front_tools import loaded_front
from support.threads import at_once

from hapi.models.keyed_locks import KeyedLocks
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.built import BuiltModels, BuiltPrefix
from hapi.repository.prefix import zoo_reference
from hapi.repository.push import push
from hapi.store.base import ReadPart, Then, nothing
from hapi.store.local import LocalStore


def spec_of(seed: int) -> ModelSpec:
    return ModelSpec(architecture="squeezenet1_1", weights=f"random:{seed}", input_shape=(3, 32, 32))


@pytest.mark.slow
def test_the_last_builds_are_remembered_without_their_weights() -> None:
    builds = BuiltModels(kept=2)
    digests = {}
    for seed in (0, 1, 2, 0):
        model, weights = builds.build(spec_of(seed), ())
        assert set(weights) == set(model.tensors.names()) and model.resident_bytes() == 0
        digests[seed] = model.prefix_digests()
        assert digests[seed] == build(spec_of(seed)).prefix_digests()
    assert builds.builds == 4
    assert builds.find(spec_of(1)) is None
    for seed in (0, 2):
        found, again = builds.find(spec_of(seed)), builds.find(spec_of(seed))
        assert found is not None and again is not None and found.module is not again.module
        assert found.prefix_digests() == digests[seed] and found.resident_bytes() == 0
    assert builds.builds == 4


def test_keys_are_of_the_content() -> None:
    builds = BuiltModels()
    model, weights = builds.build(spec_of(0), ())
    front = BuiltPrefix(builds, spec_of(0), (), model, weights)
    first, *_, last = model.tensor_names(0, len(model))
    assert front.key(first) == f"{model.digest_of(first)} float32 64x3x3x3"
    assert front.key(first) != front.key(last)
    ((name, tensor),) = BuiltPrefix(builds, spec_of(0), (), model).read([last])  # from another build
    assert name == last and torch.equal(tensor, weights[last])


def test_a_front_of_the_zoo_is_its_own(tmp_path: Path) -> None:
    original = build(spec_of(0))
    reference = zoo_reference(spec_of(0), original, 4)
    one, two = (loaded_front(reference, 4, LocalStore(str(tmp_path))) for _ in range(2))
    name = original.tensor_names(0, 1)[0]
    with torch.no_grad():
        one.tensors.get(name).zero_()
    assert torch.equal(two.tensors.get(name), original.tensors.get(name))


def test_scattered_tensors_are_read_without_the_gaps_into_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(spec_of(0))
    store = LocalStore(str(tmp_path))
    stored = push(store, "net", model, spec_of(0)).model
    names = [n for n in model.tensor_names(0, len(model)) if n.endswith(".weight")]  # the biases are the gaps
    ranges: list[tuple[int, int]] = []
    read_many = store.read_many

    def counted(parts: Sequence[ReadPart], then: Then = nothing) -> None:
        ranges.extend((part.start, part.start + part.out.nbytes) for part in parts)
        read_many(parts, then)

    monkeypatch.setattr(store, "read_many", counted)
    for name, tensor in stored.read(names):
        assert torch.equal(tensor, model.tensors.get(name))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert sum(stop - start for start, stop in ranges) == sum(model.tensors.get(n).nbytes for n in names)
    far = [names[0], names[-1]]
    ranges.clear()
    assert {name for name, _ in stored.read(far)} == set(far)
    assert sum(stop - start for start, stop in ranges) == sum(model.tensors.get(n).nbytes for n in far)


def test_a_lock_lives_as_long_as_somebody_wants_it() -> None:
    locks, inside, order = KeyedLocks(), [0], []

    def work(number: int) -> None:
        with locks.holding("key"):
            inside[0] += 1
            order.append(inside[0])
            time.sleep(0.001)
            inside[0] -= 1
        if number % 2:
            with pytest.raises(ValueError, match="no"), locks.holding("other"):
                raise ValueError("no")

    at_once(8, work)
    assert order == [1] * 8 and len(locks) == 0
