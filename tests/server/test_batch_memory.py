"""What a COS batch takes: lines above a convex peak, what is learned from observed peaks, and real forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hapi.errors import UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.profiler.work import LayerWork, layer_work
from hapi.server.batching.forward_memory import (
    BATCH_SIZES,
    HEALTHY_PASSES,
    KEYS,
    UNIT_BYTES,
    WINDOW,
    ForwardMemory,
    Key,
    ObservedMemory,
    forward_memory,
)

KEY: Key = ("model", 3, (3, 64, 64))
forwards = st.builds(
    ForwardMemory,
    layers=st.lists(st.tuples(st.integers(0, 10**8), st.integers(1, 10**7)), min_size=1, max_size=5).map(
        tuple
    ),
)
ranges = st.tuples(st.integers(1, 300), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair)))


@given(forwards, ranges)
def test_a_line_is_nowhere_below_the_peak(forward: ForwardMemory, ends: tuple[int, int]) -> None:
    line = forward.line(*ends)
    assert line.fixed_bytes >= 0
    assert line.sample_bytes % UNIT_BYTES == 0
    for batch in {*ends, sum(ends) // 2, (3 * ends[0] + ends[1]) // 4}:
        assert line.of(batch) >= forward.of(batch) * (1 - 1e-12)


def test_a_line_through_proportional_memory_is_exact() -> None:
    forward = ForwardMemory(layers=((0, 4096), (0, 1024)))
    assert (forward.line(1, 64).fixed_bytes, forward.line(1, 64).sample_bytes) == (0, 4096)
    convex = ForwardMemory(layers=((1 << 20, 512), (0, 1 << 16)))
    line = convex.line(17, 256)  # from where the second layer needs more on
    assert (line.fixed_bytes, line.sample_bytes) == (0, 1 << 16)


observations = st.lists(
    st.tuples(st.integers(1, 256), st.floats(0.2, 5.0), st.integers(0, 10**7)), min_size=1, max_size=60
)


@given(forwards, observations)
def test_no_remembered_peak_is_above_the_correction(
    forward: ForwardMemory, seen: list[tuple[int, float, int]]
) -> None:
    memory = ObservedMemory()
    peaks = [(batch, int(factor * forward.of(batch)) + more + 1) for batch, factor, more in seen]
    for batch, peak in peaks:
        memory.observe(KEY, forward, batch, peak)
    latest = [batch for batch, _ in peaks[-WINDOW:]]
    for batch, peak in peaks[-WINDOW:]:
        if len(set(latest)) <= BATCH_SIZES:
            assert memory.predict(KEY, forward, batch) >= peak * (1 - 1e-9)
    line = memory.line(KEY, forward, 1, 256)
    assert all(line.of(b) >= memory.predict(KEY, forward, b) * (1 - 1e-9) for b in (1, 2, 77, 256))


@given(st.floats(0.3, 3.0), st.integers(0, 10**8), st.sets(st.integers(1, 256), min_size=1, max_size=10))
def test_over_estimation_is_bounded_by_the_constant(factor: float, more: int, batches: set[int]) -> None:
    forward, memory = ForwardMemory(layers=((1000, 100_000),)), ObservedMemory()
    for batch in batches:
        memory.observe(KEY, forward, batch, round(factor * forward.of(batch)) + more)
    largest = max(batches)
    truth = factor * forward.of(largest) + more
    assert truth * (1 - 1e-4) <= memory.predict(KEY, forward, largest) <= (truth + 2 * more) * (1 + 1e-4)


def test_a_factor_serves_batches_that_were_never_seen() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    assert memory.correction(KEY) == (1.0, 0.0)
    memory.observe(KEY, forward, 16, 24_000)
    assert memory.correction(KEY) == (1.5, 0.0)
    assert memory.predict(KEY, forward, 128) == 192_000
    assert memory.predict(("model", 4, (3, 64, 64)), forward, 128) == 128_000


def test_an_unusual_peak_is_forgotten() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    memory.observe(KEY, forward, 16, 160_000)
    for _ in range(WINDOW):
        assert memory.correction(KEY)[0] == 10.0
        memory.observe(KEY, forward, 16, 16_000)
    assert memory.correction(KEY) == (1.0, 0.0)


def test_the_report_compares_with_what_was_predicted_before() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    memory.observe(KEY, forward, 10, 8_000)  # 10,000 was predicted
    memory.observe(KEY, forward, 10, 10_000)  # 8,000
    memory.observe(KEY, forward, 10, 10_000)  # 10,000
    report = memory.report()
    assert (report.observations, report.under, report.out_of_memory) == (3, 1, 0)
    assert report.worst_under == pytest.approx(0.2)
    assert report.worst_over == pytest.approx(0.25)
    assert report.mean_over == pytest.approx(20_000 / 18_000 - 1)


def test_batches_that_ran_out_of_memory_are_halved_until_all_goes_well() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    assert memory.ceiling(KEY, 64) == 64
    assert memory.out_of_memory(KEY, 64) == 32
    assert memory.out_of_memory(KEY, 64) == 16  # begun before the first one failed
    assert memory.ceiling(KEY, 64) == 16
    assert memory.ceiling(KEY, 8) == 8
    for passes in range(2 * HEALTHY_PASSES):  # twice as many after the second time
        assert memory.ceiling(KEY, 64) == 16, passes
        memory.observe(KEY, forward, 8, 8_000)  # says nothing of 16
        memory.observe(KEY, forward, 16, 16_000)
    assert memory.ceiling(KEY, 64) == 32
    assert [memory.out_of_memory(KEY, 1) for _ in range(2)] == [1, 1]
    assert memory.report().out_of_memory == 4


def test_what_is_remembered_is_bounded() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    memory.observe(KEY, forward, 1, 9_000)
    for batch in range(2, 2 + BATCH_SIZES):
        memory.observe(KEY, forward, batch, 1000 * batch)
    assert memory.correction(KEY) == (1.0, 0.0)
    memory.out_of_memory(KEY, 8)
    for number in range(KEYS):
        memory.out_of_memory(("other", number, ()), 8)
    assert memory.ceiling(KEY, 8) == 8


def test_bad_input_is_refused() -> None:
    forward, memory = ForwardMemory(layers=((0, 1000),)), ObservedMemory()
    with pytest.raises(UsageError, match="a peak of 0 bytes"):
        memory.observe(KEY, forward, 1, 0)
    with pytest.raises(UsageError, match="0 samples cannot run out"):
        memory.out_of_memory(KEY, 0)
    with pytest.raises(UsageError, match="batches of 3 to 2"):
        forward.line(3, 2)
    with pytest.raises(UsageError, match="0 layers"):
        forward_memory([], 1, 1, "cpu")
    work = LayerWork(flops=1, traffic_bytes=1, working_bytes=1, saved_bytes=0, workspace_bytes=0)
    with pytest.raises(UsageError, match="on 'tpu'"):
        forward_memory([work], 1, 1, "tpu")


class _Alive(TorchDispatchMode):
    """Most bytes of new tensors alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "densenet121"])
def test_the_prediction_covers_real_forward_passes(name: str) -> None:
    """By tensors that are alive, without oneDNN's copies, as on a GPU; weights are not counted."""
    model = build(ModelSpec(architecture=name, weights="random:0", input_shape=(3, 64, 64)))
    works, sizes = layer_work(model, len(model.layers), "cuda"), model.output_bytes()
    for split in (1, 5, len(model.layers) // 2, len(model.layers) - 1):
        forward = forward_memory(works[:split], sizes[0], sizes[split], "cuda")
        segment, x = model.segment(0, split, frozen=True), torch.zeros(4, 3, 64, 64)
        with torch.no_grad(), _Alive() as alive:
            segment(x)
        needed = alive.most + x.nbytes + 4 * sizes[split]  # and the results of the pass before
        assert needed <= forward.of(4) <= 1.15 * needed, (split, needed, forward.of(4))
