"""Layers one by one: the same bits as in one piece, an input that stays as it is, and seconds for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec, build
from hapi.profiler import timing
from hapi.profiler.timing import TimedLayers, layer_segments, work_clock

CPU = torch.device("cpu")


def in_place() -> LayeredModel:
    """Every second layer changes what it is given."""
    module = nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Hardswish(inplace=True),
        nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(4 * 36, 5),
    )  # fmt: skip
    return layered(module, (3, 8, 8))


def zoo(name: str, side: int) -> LayeredModel:
    return build(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [in_place, lambda: zoo("resnet18", 32), lambda: zoo("squeezenet1_1", 64), lambda: zoo("mobilenet_v3_small", 32)],
    ids=["in place", "resnet18", "squeezenet1_1", "mobilenet_v3_small"],
)  # fmt: skip
def test_the_same_bits_as_in_one_piece(make: Callable[[], LayeredModel]) -> None:
    model = make()
    last = len(model.layers) - 1
    for start, stop in ((0, last), (0, 1), (1, last), (2, last - 1)):
        shape = model.output_shapes()[start]
        x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
        before, timed = x.clone(), TimedLayers(layer_segments(model, start, stop), CPU)
        with torch.inference_mode():
            whole = model.segment(start, stop, frozen=True)(x)
            apart = timed(x)
        assert torch.equal(whole, apart), (start, stop)
        assert torch.equal(x, before), "the input was changed"
        assert len(timed.seconds) == stop - start


def test_no_layers_give_the_input_back() -> None:
    x = torch.ones(2, 3)
    timed = TimedLayers([], CPU)
    assert timed(x) is x and timed.seconds == []


def test_seconds_are_counted_per_layer_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Takes(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += self.seconds
            return x

    monkeypatch.setattr(timing, "work_clock", lambda device: lambda: now)
    timed = TimedLayers([Takes(1.0), Takes(0.25), Takes(4.0)], CPU)  # type: ignore[list-item]
    for _ in range(3):
        timed(torch.ones(2))
        now += 100.0  # between two calls
    assert timed.seconds == [3.0, 0.75, 12.0]


def test_the_clock_of_one_thread_is_its_cpu_time() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert work_clock(CPU).__name__ == "thread_time"
        torch.set_num_threads(2)
        assert work_clock(CPU).__name__ == "perf_counter"
        assert work_clock(torch.device("cuda")).__name__ == "perf_counter"
    finally:
        torch.set_num_threads(threads)
