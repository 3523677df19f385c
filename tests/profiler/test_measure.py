"""What is measured on this machine, and what is predicted where measuring would take too long."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from hapi.errors import ModelError
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec, structure
from hapi.profiler import measure as measure_module
from hapi.profiler.machine import Machine
from hapi.profiler.measure import Conditions, measure
from hapi.profiler.work import layer_work

MACHINE = Machine(
    identity=(),
    measured="2026-11-21T00:00:00+00:00",
    device="cpu",
    device_name="crafted",
    image_side=64,
    processors=2,
    threads=1,
    flops_per_second=5e10,
    copy_bytes_per_second=1e10,
    decode_seconds=4e-3,
    send_seconds_per_byte=2e-10,
    receive_seconds_per_byte=3e-10,
    to_device_seconds_per_byte=0.0,
    from_device_seconds_per_byte=0.0,
)


def model(name: str, side: int) -> LayeredModel:
    return structure(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))


def test_operations_are_the_published_ones() -> None:
    # torchvision gives 1.814 and 7.609 GFLOPS, counting a multiplication and its addition as one.
    for name, published in (("resnet18", 1.814e9), ("vgg11", 7.609e9)):
        work = layer_work(model(name, 224), 3)
        assert sum(w.flops for w in work) == pytest.approx(2 * published, rel=2e-3)


def test_bytes_of_single_operations() -> None:
    work = layer_work(model("alexnet", 224), 17)
    inputs, conv = 3 * 224 * 224 * 4, 64 * 55 * 55 * 4
    assert work[0].traffic_bytes == inputs + conv
    assert work[0].working_bytes == 2 * (inputs + conv)  # and in the layout that a CPU convolves in
    assert work[0].workspace_bytes == 64 * 3 * 11 * 11 * 4 and work[1].workspace_bytes == 0
    on_gpu = layer_work(model("alexnet", 224), 17, "cuda")
    assert on_gpu[0].working_bytes == inputs + conv and on_gpu[0].workspace_bytes == 0
    assert work[0].flops == 2 * 64 * 55 * 55 * 3 * 11 * 11


def test_bytes_between_operations_follow_the_graph() -> None:
    """A block's input lives until it is added at the end, and what an operation in place writes is not new."""
    work = layer_work(model("resnet18", 64), 11, "cuda")
    plain = 64 * 16 * 16 * 4
    # conv1 of a block: its input, kept for the addition, and the result; then bn1 takes one and makes one.
    assert work[4].working_bytes == pytest.approx(3 * plain, rel=0.01)
    relu = work[2]
    assert relu.working_bytes == 64 * 32 * 32 * 4  # in place


def test_bytes_kept_for_the_backward_pass() -> None:
    work = layer_work(model("alexnet", 224), 17)
    assert all(w.saved_bytes == 0 for w in work[:17])
    relu = 4096 * 4
    assert work[21].saved_bytes == 0  # nothing needs the result of the last layer
    assert work[20].saved_bytes == relu
    resnet = layer_work(model("resnet18", 64), 13)
    assert [w.saved_bytes for w in resnet] == [
        0
    ] * 14  # a linear layer keeps its input, which was there before


@pytest.mark.slow
def test_attention_and_constants_can_be_sized() -> None:
    for name in ("swin_v2_t", "vit_b_32"):
        layered = model(name, 224)
        assert len(layer_work(layered, 3)) == len(layered) > 10


def test_a_budget_of_nothing_predicts_everything() -> None:
    layered = model("resnet18", 64)
    profile = measure(layered, "resnet18", 11, Conditions(stored_bytes=None), machine=MACHINE, budget=0.0)
    assert profile.notes[0].startswith("forward seconds: 0 of 14 layers timed (0% of the work), the others")
    assert profile.notes[1].startswith("trained part: three times its forward pass")
    assert all(layer.client_seconds > 0 for layer in profile.layers)
    # 12 is without parameters: not trained, whoever runs it.
    assert profile.last_split == 11
    assert profile.step_seconds == pytest.approx(3 * sum(x.client_seconds for x in profile.layers[11:]))
    assert not profile.samples.encoded and profile.client_tier.decode_seconds == 0


def test_measuring_leaves_the_model_as_it_was() -> None:
    layered = model("resnet18", 32)
    profile = measure(
        layered, "resnet18", 11, Conditions(stored_bytes=1000, server_speed=2.0), machine=MACHINE
    )
    assert all(p.is_meta for p in layered.module.parameters())
    assert all(x.server_seconds == x.client_seconds / 2 for x in profile.layers)
    assert profile.server_tier.decode_seconds == profile.client_tier.decode_seconds / 2
    assert profile.client_tier.device == torch.device("cpu").type


class Classes(nn.Module):
    """Gives the number of a class, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).argmax(1)


@pytest.mark.parametrize(
    ("module", "said"),
    [(Classes(), "dtype"), (nn.Sequential(nn.Flatten(), nn.Linear(8, 4).half()), "same dtype")],
)
def test_a_model_that_does_not_run_or_train_is_one_line(module: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=f"cannot be timed: .*{said}") as found:
        measure(layered(module, (8,)), "odd", 0, Conditions(), machine=MACHINE)
    assert "\n" not in str(found.value)


def test_waiting_for_a_processor_is_no_work_of_one_thread() -> None:
    before = torch.get_num_threads()
    try:
        for threads, counts in ((1, False), (2, True)):
            torch.set_num_threads(threads)
            seconds = measure_module._timed(lambda: time.sleep(0.02), torch.device("cpu"))
            assert (seconds >= 0.02) is counts
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("load", "said"), [(0.5, False), (2.0, False), (9.75, True)])
def test_a_busy_machine_is_told_of(monkeypatch: pytest.MonkeyPatch, load: float, said: bool) -> None:
    monkeypatch.setattr(measure_module.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(measure_module, "processor_count", lambda: 2)
    assert any("load 9.8 on 2 processors" in line for line in measure_module._busy()) is said
