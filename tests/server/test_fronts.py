"""Fronts of real models over shared weights: bytes on the device, bytes read, builds, and the results to the bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.front_tools import contents, loaded_front, tuned
from support.stores import CountingStore, is_weights
from support.threads import at_once

from hapi.errors import ConflictError, HostMemoryError, StoreError, UnprocessableError
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.opening import open_model
from hapi.repository.prefix import store_reference, zoo_reference
from hapi.repository.push import push
from hapi.server.device import prefix_loader
from hapi.server.device.model_cache import FrozenPrefix, ModelCache
from hapi.server.device.prefix_loader import PrefixLoader, prefix_key
from hapi.server.settings import ServerSettings
from hapi.wire import messages
from hapi.wire.references import ModelReference

SPEC = ModelSpec(architecture="mobilenet_v3_small", weights="random:3", input_shape=(3, 32, 32))
CHANGED = 9
"""Layers from the one after this on are another job's own."""


@pytest.fixture(scope="module")
def base() -> LayeredModel:
    return build(SPEC)


@pytest.fixture(scope="module")
def other(base: LayeredModel) -> LayeredModel:
    return tuned(base, CHANGED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, base: LayeredModel, other: LayeredModel) -> Path:
    found = tmp_path_factory.mktemp("fronts")
    store = CountingStore(found, is_weights)
    for name, model in (("one", base), ("two", base), ("tuned", other)):
        push(store, name, model, SPEC)
    return found


@cache
def zoo_model(spec: ModelSpec) -> LayeredModel:
    """For what is asked of it, not for its weights: those of a loaded front are built each time."""
    return build(spec, allow_import=True)


class Bench:
    """A store, a cache and a loader; fronts by (model's name, split)."""

    def __init__(self, folder: Path, budget: int = 1 << 30, *, reuse: bool = True, **settings: Any) -> None:
        self.store = CountingStore(folder, is_weights)
        self.cache = ModelCache(budget, reuse=reuse)
        options = ServerSettings(store=str(folder), device="cpu", model_reuse=reuse, **settings)
        self.loader = PrefixLoader(options, self.store, torch.device("cpu"), self.cache)

    def request(self, name: str, split: int, spec: ModelSpec = SPEC) -> messages.ExtractRequest:
        """For a pushed model by its name, or for ``zoo``."""
        if name == "zoo":
            model = zoo_model(spec)
            reference = zoo_reference(spec, model, split)
        else:
            stored = open_model(self.store, name)
            model = stored.layered(allow_import=True)
            reference = store_reference(stored, model, split)
        return request_of(reference, split, model.layers[split - 1].name)

    def load(self, name: str, split: int, spec: ModelSpec = SPEC) -> FrozenPrefix:
        """The front, idle in the cache."""
        with self.use(self.request(name, split, spec)) as front:
            return front

    def use(self, request: messages.ExtractRequest) -> Any:
        return self.cache.prefix(prefix_key(request), lambda: self.loader.load(request, batch=4))


def request_of(reference: ModelReference, split: int, name: str) -> messages.ExtractRequest:
    return messages.ExtractRequest.from_json(
        {
            "dataset": {"name": "digits", "version": "0" * 32},
            "model": reference.to_json(),
            "split": split,
            "split_name": name,
            "ids": [0],
            "transform": None,
        }
    )


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


def check_outputs(front: FrozenPrefix, reference: ModelReference, split: int, store: Any) -> None:
    """Equal to the bit to what an unshared load computes, as a whole and layer by layer."""
    check_equal(front, loaded_front(reference, split, store, ["hapi_test_fronts"]), split)


def check_equal(front: FrozenPrefix, alone: LayeredModel, split: int) -> None:
    """Equal to the bit to what ``alone`` computes, as a whole and layer by layer."""
    x = torch.rand((3, *alone.input_shape), generator=torch.Generator().manual_seed(5))
    expected = alone.segment(0, split, frozen=True)(x)
    assert torch.equal(front.segment(x), expected)
    for layer in front.layers():
        x = layer(x)
    assert torch.equal(x, expected)


def large(bench: Bench, name: str, split: int, but: int = 0) -> list[tuple[str, int, int]]:
    """(key, start, stop) in the weights file of all stored tensors of layers but+1..split."""
    manifest = open_model(bench.store, name).manifest
    names = [n for layer in manifest.layers[but:split] for n in layer.tensors]
    entries = [manifest.tensors[n] for n in names]
    return [(e.pack, e.start, e.stop) for e in entries]


@pytest.mark.long_cases(
    "first1-second1",
    "first2-second2",
    "first4-second4",
    "first6-second6",
    "first7-second7",
    "first8-second8",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("one", 4), ("one", 9)),  # two splits of one model
        (("one", 9), ("one", 4)),
        (("one", 9), ("two", 9)),  # the same model under two names
        (("one", 12), ("two", 5)),
        (("one", 12), ("tuned", 12)),  # the same backbone
        (("tuned", 11), ("two", 13)),
        (("zoo", 9), ("one", 9)),  # built here and pushed
        (("one", 5), ("zoo", 9)),
        (("zoo", 4), ("zoo", 9)),
        (("zoo", 11), ("tuned", 13)),
    ],
)
def test_one_copy_of_each_content(
    bench: Bench, base: LayeredModel, other: LayeredModel, first: tuple[str, int], second: tuple[str, int]
) -> None:
    distinct: dict[str, int] = {}
    for name, split in (first, second):
        front = bench.load(name, split)
        own = contents(other if name == "tuned" else base, split)
        distinct |= own
        assert dict(front.weights) == own and len(front.weights) == len(own)
        assert bench.cache.resident_bytes == sum(distinct.values())
        request = bench.request(name, split)
        assert front.identity.startswith(request.model.digest)
        check_equal(front, other if name == "tuned" else base, split)
    assert bench.cache.misses == 2
    # Truly one copy: the addresses of all resident tensors are as many as the contents, and hold those bytes.
    memory: dict[int, int] = {}
    for name, split in (first, second):
        segment = bench.load(name, split).segment
        for tensor in (*segment.parameters(), *segment.buffers()):
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
    assert sum(memory.values()) == sum(distinct.values())


@pytest.mark.slow
def test_only_what_is_missing_is_read(bench: Bench) -> None:
    bench.load("one", 5)
    requests_of_first = len(bench.store.ranges)
    bench.store.ranges.clear()
    bench.load("two", 5)
    bench.load("one", 3)
    assert bench.store.ranges == []
    bench.load("two", 9)
    new = large(bench, "two", 9, but=5)
    assert 1 <= len(bench.store.ranges) <= requests_of_first + 1
    assert {key for key, _, _ in bench.store.ranges} <= {key for key, _, _ in new}
    assert bench.store.bytes_read <= sum(stop - start for _, start, stop in new)
    bench.store.ranges.clear()
    bench.load("tuned", CHANGED + 2)
    changed = large(bench, "tuned", CHANGED + 2, but=CHANGED)
    assert min(start for _, start, _ in bench.store.ranges) >= changed[0][1]


@pytest.mark.slow
def test_a_zoo_model_is_built_no_more_than_it_must(bench: Bench) -> None:
    bench.load("zoo", 9)
    assert bench.loader.builds.builds == 1
    for split in (4, 9, 1):
        bench.load("zoo", split)
    assert bench.loader.builds.builds == 1  # all resident
    bench.load("zoo", 11)
    assert bench.loader.builds.builds == 2
    bench.load("one", 13)
    bench.load("zoo", 13)
    assert bench.loader.builds.builds == 2  # the rest came from the store
    bench.cache.drop_idle()
    assert bench.cache.resident_bytes == 0
    request = bench.request("zoo", 9)
    check_outputs(bench.load("zoo", 9), request.model, 9, bench.store)
    assert bench.loader.builds.builds == 3


@pytest.mark.slow
def test_a_wrong_digest_is_refused_whatever_is_resident(bench: Bench) -> None:
    for name in ("zoo", "one"):
        bench.load(name, 9)
        good = bench.request(name, 9)
        before = bench.cache.resident_bytes
        wrong = request_of(replace(good.model, digest="0" * 32), 9, good.split_name)
        with pytest.raises(ConflictError, match="have digest"), bench.use(wrong):
            pass
        for split, layer in ((9, "nonsense"), (8, good.split_name)):
            bad = request_of(bench.request(name, split).model, split, layer)
            with pytest.raises(UnprocessableError), bench.use(bad):
                pass
        assert bench.cache.resident_bytes == before


@pytest.mark.slow
def test_without_reuse_nothing_is_kept_or_shared(folder: Path) -> None:
    bench = Bench(folder, reuse=False)
    for name in ("one", "zoo"):
        request = bench.request(name, 5)
        bench.store.ranges.clear()
        with bench.use(request) as one, bench.use(request) as two:
            assert next(one.segment.parameters()).data_ptr() != next(two.segment.parameters()).data_ptr()
            check_outputs(two, request.model, 5, bench.store)
        assert bench.cache.resident_bytes == 0 and bench.cache.misses >= 2
    assert bench.loader.builds.builds == 2


def test_a_device_without_room_gives_up_idle_fronts_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [0]
    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args == (torch.device("cpu"),) and bench.cache.resident_bytes > room[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return moved(tensor, *args, **kwargs)

    requests = [bench.request("zoo", 9), bench.request("tuned", CHANGED + 2)]
    with bench.use(requests[0]):
        pass
    room[0] = bench.cache.resident_bytes // 2
    monkeypatch.setattr(torch.Tensor, "to", to)
    with bench.use(bench.request("tuned", 2)) as small:
        with pytest.raises(HostMemoryError, match="do not fit cpu"), bench.use(requests[1]):
            pass
        assert bench.cache.resident_bytes == small.nbytes
    assert bench.cache.loading_bytes == 0


@pytest.mark.slow
def test_many_threads_at_once(bench: Bench, base: LayeredModel, other: LayeredModel) -> None:
    names = ("one", "two", "tuned", "zoo")
    requests = {(n, s): bench.request(n, s) for n in names for s in (3, 6, 8)}
    barrier = threading.Barrier(12)
    expected = {split: contents(base, split) for split in (3, 6, 8)}

    def work(seed: int) -> None:
        wanted = list(requests)
        random.Random(seed).shuffle(wanted)
        barrier.wait()
        for key in wanted:
            with bench.use(requests[key]) as front:
                assert dict(front.weights) == expected[key[1]]

    at_once(12, work)
    assert bench.cache.misses == len(requests)  # each front was loaded once
    assert bench.cache.resident_bytes == sum(expected[8].values())
    assert bench.loader.builds.builds <= 3
    # No content was read twice, under whatever name.
    manifests = [open_model(bench.store, n).manifest for n in names[:3]]
    for entry in manifests[0].tensors.values():
        if entry.nbytes > 64 << 10:
            entries = [m.tensors[entry.name] for m in manifests]
            same = {(e.pack, e.start, e.stop) for e in entries if e.digest == entry.digest}
            read = [
                r
                for r in bench.store.ranges
                for key, start, stop in same
                if r[0] == key and r[1] < stop and start < r[2]
            ]
            assert len(read) <= 1, entry.name


@pytest.mark.slow
def test_many_threads_over_a_store_that_fails(folder: Path) -> None:
    bench = Bench(folder, budget=1 << 20)
    dice = random.Random(7)
    bench.store.fail = lambda: dice.random() < 0.3
    requests = [bench.request(n, s) for n in ("one", "two", "tuned") for s in (4, 10, 12)]
    served = [0]

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(12):
            try:
                with bench.use(order.choice(requests)) as front:
                    front.segment(torch.zeros(1, 3, 32, 32))
                    served[0] += 1
            except StoreError:
                pass

    at_once(6, work)
    assert served[0] > 10
    assert bench.cache.loading_bytes == 0 and bench.cache.resident_bytes <= 1 << 20
    bench.cache.drop_idle()
    assert bench.cache.resident_bytes == 0
    bench.store.fail = lambda: False
    check_outputs(bench.load("tuned", 12), requests[8].model, 12, bench.store)


MODULES = """
import torch
from torch import nn

class Table(nn.Module):
    '''Adds a constant of the graph.'''
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(64, width)
        self.end = nn.Linear(width, 4)
    def forward(self, x):
        x = x * torch.linspace(0, 1, 64)
        return self.end(self.fc(x))

def narrow():
    return Table(8)

def wide():
    return Table(16)

class Noise(nn.Module):
    '''A tensor that is neither parameter nor buffer, in a module that cannot be traced.'''
    def __init__(self):
        super().__init__()
        self.noise = torch.rand(())
    def forward(self, x):
        for _ in range(x.dim() - 1):
            x = x + self.noise
        return x

def noisy():
    return nn.Sequential(nn.Linear(64, 64), Noise(), nn.Linear(64, 4))

def last():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)).to(
        memory_format=torch.channels_last)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    (tmp_path / "hapi_test_fronts.py").write_text(MODULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Bench(tmp_path / "store", allow_model=("hapi_test_fronts",))


def spec_of(name: str, shape: tuple[int, ...] = (64,), seed: int = 0) -> ModelSpec:
    return ModelSpec(architecture=f"hapi_test_fronts:{name}", input_shape=shape, weights=f"random:{seed}")


def test_constants_of_graphs_are_shared(factories: Bench) -> None:
    bench, held = factories, {}
    for name in ("narrow", "wide"):
        model = build(spec_of(name), allow_import=True)
        split = len(model) - 1
        own = contents(model, split)
        assert any(nbytes == 256 for nbytes in own.values())
        held |= own
        front = bench.load("zoo", split, spec_of(name))
        assert dict(front.weights) == own and bench.cache.resident_bytes == sum(held.values())
        check_outputs(front, bench.request("zoo", split, spec_of(name)).model, split, bench.store)
    assert sum(held.values()) == 256 + (64 + 1) * (8 + 16) * 4


def test_tensors_that_are_plain_attributes_stay_the_seeds_own(factories: Bench) -> None:
    for seed in (5, 6):
        spec = spec_of("noisy", seed=seed)
        factories.load("zoo", 2, spec)
        factories.load("zoo", 1, spec)  # from what is remembered
        factories.cache.drop_idle()
        for split in (1, 2):
            request = factories.request("zoo", split, spec)
            check_outputs(factories.load("zoo", split, spec), request.model, split, factories.store)
    assert factories.loader.builds.builds == 4  # each seed anew after the drop


def test_another_memory_layout_is_another_content(factories: Bench) -> None:
    spec = spec_of("last", (3, 8, 8))
    model = build(spec, allow_import=True)
    push(factories.store, "last", model, spec)
    zoo, pushed = factories.load("zoo", 2, spec), factories.load("last", 2)
    assert next(zoo.segment.parameters()).is_contiguous(memory_format=torch.channels_last)
    assert next(pushed.segment.parameters()).is_contiguous()
    shared = {key for key, _ in zoo.weights} & {key for key, _ in pushed.weights}
    assert len(shared) == 2  # the biases
    for name, front in (("zoo", zoo), ("last", pushed)):
        check_outputs(front, factories.request(name, 2, spec).model, 2, factories.store)


def test_a_factory_that_is_not_deterministic_is_refused(
    tmp_path: Path, factories: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hapi_test_fronts  # type: ignore[import-not-found]

    request = factories.request("zoo", 1, spec_of("narrow"))
    larger = factories.request("zoo", 2, spec_of("narrow"))
    with factories.use(request):
        pass
    make = hapi_test_fronts.narrow

    def otherwise() -> Any:
        made = make()
        torch.nn.init.ones_(made.end.weight)
        return made

    monkeypatch.setattr(hapi_test_fronts, "narrow", otherwise)
    before = factories.cache.resident_bytes
    with pytest.raises(ConflictError, match="differs from that of an earlier build"), factories.use(larger):
        pass
    with pytest.raises(ConflictError, match="have digest"), factories.use(larger):
        pass
    assert factories.cache.resident_bytes == before


@pytest.mark.slow
def test_fronts_in_use_survive_any_eviction(bench: Bench) -> None:
    with ExitStack() as stack:
        fronts = [stack.enter_context(bench.use(bench.request(n, 9))) for n in ("one", "tuned")]
        bench.load("two", 12)
        held = sum(dict(w for f in fronts for w in f.weights).values())
        assert bench.cache.drop_idle() > 0
        assert bench.cache.resident_bytes == held
        for name, front in zip(("one", "tuned"), fronts, strict=True):
            check_outputs(front, bench.request(name, 9).model, 9, bench.store)


def test_the_layers_after_the_split_of_a_built_model_leave_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(prefix_loader, "give_back_freed_memory", lambda: given.append(1))
    bench = Bench(tmp_path)
    bench.load("zoo", 2)
    assert len(given) == bench.loader.builds.builds == 1
    bench.load("zoo", 1)
    assert len(given) == 1, "nothing was built"
