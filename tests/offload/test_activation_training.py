"""Training with swapped and recomputed activations: gradients are bit by bit those of plain training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.activation_models import SmallGpt, gpt_loss, image_loss, same, train
from torch import nn

from hapi import allocator
from hapi.errors import UsageError
from hapi.offload.activations.layers import layers_of
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.planner import StateTraffic


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 8, 3, 4, 64, 256, dropout=0.1, attention_dropout=0.1, num_classes=10)


def small_resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor], int]] = {
    "gpt": (SmallGpt, gpt_loss, 5_000_000),
    "vit": (small_vit, image_loss, 6_500_000),
    "resnet18": (small_resnet, image_loss, 8_000_000),
}


@pytest.mark.slow_except("vit-swap")
@pytest.mark.long_cases("vit-recompute", "resnet18-swap", "resnet18-recompute")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("gpt", policy) for policy in ("auto", "swap", "recompute")),
        ("vit", "swap"),
        *(pytest.param(name, policy, marks=pytest.mark.slow) for name, policy in (
            ("vit", "auto"), ("vit", "recompute"),
            ("resnet18", "auto"), ("resnet18", "swap"), ("resnet18", "recompute"),
        )),
    ],
)  # fmt: skip
def test_gradients_are_those_of_plain_training(tmp_path: Path, name: str, policy: str) -> None:
    make, loss, memory = MODELS[name]
    torch.manual_seed(0)
    model = make()
    offloaded = copy.deepcopy(model)
    with ActivationOffload(offloaded, memory, [tmp_path / "a", tmp_path / "b"], policy) as offload:
        seen = train(offloaded, loss, steps=2)
        report = offload.report()
        assert report["state"] == "planned" and report["bytes_written"] > 0
        assert [entry for folder in tmp_path.iterdir() for entry in folder.iterdir()] == []
    assert same(train(model, loss, steps=2), seen)
    if policy == "recompute" and name != "resnet18":
        assert any(layer["action"] == "recompute" for layer in report["layers"])


@pytest.mark.slow
def test_accumulated_micro_batches_are_those_of_plain_training(tmp_path: Path) -> None:
    model = SmallGpt()
    offloaded = copy.deepcopy(model)
    with ActivationOffload(offloaded, 3_000_000, [tmp_path]) as offload:
        seen = train(offloaded, gpt_loss, accumulate=3)
        assert offload.report()["bytes_read"] > 0
    assert same(train(model, gpt_loss, accumulate=3), seen)


@pytest.mark.slow
def test_without_a_disk_what_does_not_fit_is_recomputed() -> None:
    model = SmallGpt()
    offloaded = copy.deepcopy(model)
    with ActivationOffload(offloaded, 3_000_000) as offload:
        seen = train(offloaded, gpt_loss)
        actions = {layer["action"] for layer in offload.report()["layers"]}
    assert "recompute" in actions and "disk" not in actions
    assert same(train(model, gpt_loss), seen)


@pytest.mark.slow
def test_layers_with_batch_norm_are_not_recomputed_and_the_report_says_why(tmp_path: Path) -> None:
    model = small_resnet()
    with ActivationOffload(model, 8_000_000, [tmp_path], "recompute") as offload:
        train(model, image_loss, steps=2)
        layers = {layer["name"]: layer for layer in offload.report()["layers"]}
    assert layers["layer1.0"]["action"] != "recompute"
    assert "BatchNorm2d in training" in layers["layer1.0"]["not_recomputed"]


def test_a_layer_that_counts_its_calls_is_not_recomputed(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x).tanh().exp()

    model = nn.Sequential(*(Counting() for _ in range(3)))
    with ActivationOffload(model, 300_000, [tmp_path], "recompute") as offload:
        train(model, lambda module: module(torch.randn(512, 64)).sum())
        assert all("changes buffers" in layer["not_recomputed"] for layer in offload.report()["layers"])
    assert [int(layer.calls) for layer in model] == [3, 3, 3]


class Average(nn.Module):
    """Statistics that each pass replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)
        self.register_buffer("average", torch.zeros(256))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.inner(values))
        self.average = 0.9 * self.average + 0.1 * found.detach().mean(0)
        return torch.tanh(found - self.average)


class Drawing(nn.Module):
    """Leaves its work out by a generator that is not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(256, 256), draw

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(values * self.draw()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Average, "its forward pass changes buffers"),
        (lambda: Drawing(random.random), "it draws from Python's or NumPy's generator"),
        (lambda: Drawing(np.random.random), "it draws from Python's or NumPy's generator"),
    ],
    ids=["buffer", "random", "numpy"],
)
def test_a_layer_that_would_do_otherwise_a_second_time_is_not_recomputed(
    make: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        random.seed(1)
        np.random.seed(1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).square().mean().backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 256), make(), nn.Linear(256, 256))

    expected = gradients(model())
    twin = model()
    with ActivationOffload(twin, 1 << 20, [tmp_path], "recompute") as offload:
        found = gradients(twin)
        layers = {layer["name"]: layer for layer in offload.report()["layers"]}
    assert all(map(torch.equal, expected, found))
    assert layers["1"]["action"] != "recompute" and layers["1"]["not_recomputed"].startswith(why)


@pytest.mark.slow
def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    model = SmallGpt()
    with ActivationOffload(model, 1 << 30, [tmp_path]) as offload:
        train(model, gpt_loss)
        report = offload.report()
        stored = report["tensors_stored"]
        train(model, gpt_loss)
        assert offload.report()["tensors_stored"] == stored  # no tensor passes a hook any more
    assert report["case"] == "everything fits" and report["bytes_written"] == 0


@pytest.mark.slow_except("fits")
@pytest.mark.parametrize("end", ["fits", "closed"])
def test_a_process_that_keeps_freed_memory_does_so_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    options: dict[int, int] = {}

    def mallopt(option: int, value: int) -> int:
        options[option] = value
        return 1

    monkeypatch.setattr(allocator, "_keeps_all", False)
    monkeypatch.setattr(allocator, "_function", lambda name: mallopt if name == "mallopt" else None)
    assert allocator.keep_freed_memory({})
    asked = dict(options)
    model = SmallGpt()
    offload = ActivationOffload(model, 1 << 30 if end == "fits" else 3_000_000, [tmp_path]).install()
    assert options[allocator._MMAP_MAX] and options[allocator._TRIM_THRESHOLD] > 0
    train(model, gpt_loss)
    if end == "closed":
        assert options[allocator._MMAP_MAX]
        offload.close()
    assert {option: options[option] for option in asked} == asked
    offload.close()


def test_activations_that_stay_give_back_large_blocks_beside_states_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[int, int] = {}

    def mallopt(option: int, value: int) -> int:
        options[option] = value
        return 1

    monkeypatch.setattr(allocator, "_function", lambda name: mallopt if name == "mallopt" else None)
    traffic = StateTraffic(backward_disk_read=1, backward_disk_write=1)
    alone = ActivationOffload(SmallGpt(), 1 << 30, [tmp_path], "keep").install()
    assert not options
    alone.close()
    with ActivationOffload(SmallGpt(), 1 << 30, [tmp_path], "keep", traffic=traffic):
        assert options[allocator._MMAP_THRESHOLD] == allocator._LARGE
    assert options[allocator._MMAP_THRESHOLD] == allocator._GLIBC_LARGEST


@pytest.mark.slow
def test_a_larger_batch_is_measured_anew(tmp_path: Path) -> None:
    model = SmallGpt()
    with ActivationOffload(model, 6_000_000, [tmp_path]) as offload:
        for batch in (1, 1, 8, 8):
            tokens = torch.randint(0, 101, (batch, 48))
            model(tokens).sum().backward()
        offload.step_done()
        assert offload.report()["case"] != "everything fits" and offload.report()["swapped_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", pytest.param("swap", marks=pytest.mark.long)])
def test_saved_bytes_stay_within_the_prediction(tmp_path: Path, policy: str) -> None:
    model = SmallGpt(width=128, depth=10)
    with ActivationOffload(model, 14_000_000, [tmp_path], policy) as offload:
        train(model, gpt_loss, steps=2)
        offload.reset_peak()
        train(model, gpt_loss, steps=2)
        report = offload.report()
    assert report["predicted_peak_bytes"] <= 14_000_000
    assert report["peak_bytes"] <= report["predicted_peak_bytes"]
    assert report["swapped_bytes"] > 0


def test_layers_are_the_blocks_wherever_they_are() -> None:
    assert [name for name, _ in layers_of(SmallGpt(depth=2))] == [
        "body.embedding",
        "body.blocks.0",
        "body.blocks.1",
        "body.after",
        "head",
    ]
    assert [name for name, _ in layers_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))] == ["0", "1"]
    assert [name for name, _ in layers_of(nn.Linear(1, 1))] == ["model"]
    names = [name for name, _ in layers_of(small_vit())]
    assert "encoder.layers.encoder_layer_2" in names and "conv_proj" in names
    assert "layer4.1" in [name for name, _ in layers_of(small_resnet())]


@pytest.mark.slow
def test_a_copy_of_the_model_is_a_plain_model(tmp_path: Path) -> None:
    model = SmallGpt()
    with ActivationOffload(model, 3_000_000, [tmp_path], "swap") as offload:
        train(model, gpt_loss, steps=2)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        stored = offload.report()["tensors_stored"]
        assert copied(torch.randint(0, 101, (2, 8))).abs().max() == 0
        assert offload.report()["tensors_stored"] == stored


@pytest.mark.slow
def test_closing_gives_the_model_back(tmp_path: Path) -> None:
    model = SmallGpt()
    keys = [sorted(vars(module)) for module in model.modules()]
    offload = ActivationOffload(model, 3_000_000, [tmp_path], "swap").install()
    train(model, gpt_loss, steps=2)
    offload.close()
    offload.close()
    assert [sorted(vars(module)) for module in model.modules()] == keys
    assert not model._forward_pre_hooks


def test_an_unknown_policy_and_a_folder_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="activations='all'"):
        ActivationOffload(SmallGpt(), 1, None, "all")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be swapped to"):
        ActivationOffload(SmallGpt(), 1, [tmp_path / "file"])
