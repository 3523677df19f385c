"""Each feature of the trainer's steps equals a plain PyTorch loop with torch's own tool for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.local_job import open_session, trainer_of
from support.plain_steps import Twin, twin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hapi.errors import UsageError
from hapi.train.steps.ema import MovingAverage
from hapi.train.steps.optimizer import head_names
from hapi.wire.transport.http import Handler


def sgd(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.01, "momentum": 0.9, **more})


@pytest.mark.slow
def test_the_defaults_are_the_plain_loop(remembered: Handler) -> None:
    with twin(remembered) as job:
        optimizer = sgd(job.module)
        losses = []
        for epoch, _, features, labels in job.batches():
            optimizer.zero_grad()
            loss = cross_entropy(job.module(features), labels)
            loss.backward()
            optimizer.step()
            losses.append((epoch, loss.item() * len(labels)))
        report = job.trainer.run()
        job.check()
        for entry in report["epochs"]:
            assert entry["loss"] == sum(loss for epoch, loss in losses if epoch == entry["epoch"]) / 46
            assert entry["learning_rate"] == 0.01


def test_a_schedule_with_warm_up(remembered: Handler) -> None:
    with twin(remembered, schedule="cosine", warmup="0.6ep", min_lr=1e-4, freeze=12) as job:
        optimizer = sgd(job.module)
        schedulers = torch.optim.lr_scheduler
        schedule = schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, 0.01, total_iters=3),
                schedulers.CosineAnnealingLR(optimizer, 7, eta_min=1e-4),
            ],
            [3],
        )
        rates = []
        for _, _, features, labels in job.batches():
            optimizer.zero_grad()
            cross_entropy(job.module(features), labels).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        report = job.trainer.run()
        job.check(rtol=1e-6, atol=1e-8)
        assert [e["learning_rate"] for e in report["epochs"]] == pytest.approx([rates[4], rates[9]])


def test_clipped_gradients(remembered: Handler) -> None:
    with twin(remembered, clip_norm=12.0) as job:
        optimizer = sgd(job.module)
        norms: list[list[float]] = [[], []]
        for epoch, _, features, labels in job.batches():
            optimizer.zero_grad()
            cross_entropy(job.module(features), labels).backward()
            norms[epoch].append(nn.utils.clip_grad_norm_(job.module.parameters(), 12.0).item())
            optimizer.step()
        report = job.trainer.run()
        job.check()
        for entry, found in zip(report["epochs"], norms, strict=True):
            assert entry["gradient_norm"] == pytest.approx(sum(found) / 5)
            assert entry["largest_gradient_norm"] == max(found)
            assert entry["clipped_steps"] == sum(norm > 12.0 for norm in found) / 5
        assert max(norms[0]) > 12.0 > min(norms[1])


@pytest.mark.parametrize("together", [2, 3, 4, 5, 9])
def test_accumulated_batches_are_one_large_batch(remembered: Handler, together: int) -> None:
    """46 samples in batches of 10: the last batch, and the last step of an epoch, have fewer."""
    with twin(remembered, accumulate=together, freeze=12, clip_norm=100.0, schedule="one-cycle") as job:
        steps = -(-5 // together)
        optimizer = sgd(job.module)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 2 * steps, cycle_momentum=False)
        norms = []
        for batches in job.epochs:
            for first in range(0, 5, together):
                features, labels = (
                    torch.cat(t) for t in zip(*batches[first : first + together], strict=True)
                )
                optimizer.zero_grad()
                cross_entropy(job.module(features), labels).backward()
                norms.append(nn.utils.clip_grad_norm_(job.module.parameters(), 100.0).item())
                optimizer.step()
                schedule.step()
        report = job.trainer.run()
        job.check(rtol=1e-5, atol=1e-7)
        found = [entry["gradient_norm"] for entry in report["epochs"]]
        assert found == pytest.approx([sum(norms[:steps]) / steps, sum(norms[steps:]) / steps])


def test_accumulated_batches_with_class_weights(remembered: Handler, tmp_path: Path) -> None:
    """Their mean is divided by the weights of the samples, not by their number."""
    weights = {"0": 1.0, "1": 5.0, "2": 0.5, "3": 2.0}
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    with twin(
        remembered, accumulate=3, freeze=12, class_weights=str(tmp_path / "weights.json"), label_smoothing=0.1
    ) as job:
        optimizer = sgd(job.module)
        tensor = torch.tensor([*weights.values()])
        for batches in job.epochs:
            for first in range(0, 5, 3):
                features, labels = (torch.cat(t) for t in zip(*batches[first : first + 3], strict=True))
                optimizer.zero_grad()
                cross_entropy(job.module(features), labels, weight=tensor, label_smoothing=0.1).backward()
                optimizer.step()
        job.trainer.run()
        job.check(rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_an_average_is_torchs_and_is_what_is_kept(remembered: Handler, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with twin(remembered, ema=0.8, validation=0.2, output=str(output)) as job:
        optimizer = sgd(job.module)
        average = AveragedModel(job.module, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        for _, _, features, labels in job.batches():
            optimizer.zero_grad()
            cross_entropy(job.module(features), labels).backward()
            optimizer.step()
            average.update_parameters(job.module)
        report = job.trainer.run()
        job.check()
        found = average.module
        kept = load_file(output / "model.safetensors")
        for name, value in found.state_dict().items():
            if value.is_floating_point():
                assert torch.equal(kept[name], value), name
        assert not torch.equal(kept["fc.weight"], job.module.state_dict()["fc.weight"])
        found.eval()
        with torch.no_grad():
            pairs = [(found(features), labels) for features, labels in job.session.validation()]
        total = sum(cross_entropy(outputs, labels, reduction="sum").item() for outputs, labels in pairs)
        assert report["epochs"][-1]["validation_loss"] == pytest.approx(total / 9, rel=1e-6)


def test_a_buffer_that_is_assigned_anew_is_averaged_too() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(()))
    average = MovingAverage(module, 0.9)
    for number in (1.0, 2.0):
        module.seen = torch.tensor(number)
        average.update()
    assert average.module.get_buffer("seen").item() == pytest.approx(0.9 * 1 + 0.1 * 2)


def test_layers_with_a_computed_attribute_are_averaged() -> None:
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    average = MovingAverage(module, 0.9)
    average.update()
    assert torch.equal(average.module(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert average.module.get_parameter("0.weight_g") is not module.get_parameter("0.weight_g")


def test_counters_and_masks_are_not_averaged() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    module.register_buffer("index", torch.arange(9))
    average = MovingAverage(module, 0.9)
    for _ in range(3):
        average.update()
    assert torch.equal(average.module.get_buffer("mask"), module.get_buffer("mask"))
    assert torch.equal(average.module.get_buffer("index"), torch.arange(9))
    with pytest.raises(ValueError, match="number of updates"):
        average.load_state_dict({"updates": -1, "module": module.state_dict()})


@pytest.mark.slow
def test_rates_and_decay_by_group(remembered: Handler) -> None:
    changes = {
        "head_lr": 0.1,
        "backbone_lr": 0.001,
        "weight_decay": 0.05,
        "decay_norm_bias": False,
        "optimizer": "adamw",
        "betas": (0.8, 0.9),
    }
    with twin(remembered, **changes) as job:
        named = dict(job.module.named_parameters())
        assert head_names(job.session.job_context.model) == {"fc.weight", "fc.bias"}
        head, bias = [named.pop("fc.weight")], [named.pop("fc.bias")]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in named.values() if p.ndim > 1], "lr": 0.001, "weight_decay": 0.05},
                {"params": [p for p in named.values() if p.ndim == 1], "lr": 0.001, "weight_decay": 0.0},
                {"params": head, "lr": 0.1, "weight_decay": 0.05},
                {"params": bias, "lr": 0.1, "weight_decay": 0.0},
            ],
            betas=(0.8, 0.9),
        )
        for _, _, features, labels in job.batches():
            optimizer.zero_grad()
            cross_entropy(job.module(features), labels).backward()
            optimizer.step()
        (entry, _) = job.trainer.run()["epochs"]
        job.check()
        assert (entry["learning_rate"], entry["head_learning_rate"]) == (0.001, 0.1)
        norms = job.trainer.optimizer.param_groups[1]["params"]
        assert len(norms) == 4 and all(p.ndim == 1 for p in norms)


def test_nesterov(remembered: Handler) -> None:
    with twin(remembered, nesterov=True, freeze=12) as job:
        optimizer = sgd(job.module, nesterov=True)
        for _, _, features, labels in job.batches():
            optimizer.zero_grad()
            cross_entropy(job.module(features), labels).backward()
            optimizer.step()
        job.trainer.run()
        job.check()


def test_rates_for_what_is_not_trained(remembered: Handler) -> None:
    with (
        open_session(remembered, freeze=12) as session,
        pytest.raises(UsageError, match="only the head is trained"),
    ):
        trainer_of(session, backbone_lr=0.1)


def autocast_loop(job: Twin, dtype: torch.dtype, scaler: torch.amp.GradScaler | None) -> list[float]:
    """Scales of the loss after each step."""
    optimizer, scales = sgd(job.module, lr=0.001), []
    for _, _, features, labels in job.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            outputs = job.module(features)
        loss = cross_entropy(outputs.float(), labels)
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(job.module.parameters(), 1.0)
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.slow
def test_bf16(remembered: Handler) -> None:
    with twin(remembered, precision="bf16", clip_norm=1.0, freeze=12, lr=0.001, validation=0.2) as job:
        autocast_loop(job, torch.bfloat16, None)
        report = job.trainer.run()
        job.check()
        job.module.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            pairs = [(job.module(features), labels) for features, labels in job.session.validation()]
        total = sum(
            cross_entropy(outputs.float(), labels, reduction="sum").item() for outputs, labels in pairs
        )
        assert report["epochs"][-1]["validation_loss"] == pytest.approx(total / 9, rel=1e-6)


@pytest.mark.parametrize("first_scale", [2.0**6, 2.0**30])
def test_fp16_scales_its_loss(remembered: Handler, first_scale: float) -> None:
    """With the larger scale gradients overflow: those steps are left out, and the scale falls."""
    with twin(remembered, precision="fp16", clip_norm=1.0, freeze=12, lr=0.001) as job:
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        scales = [first_scale, *autocast_loop(job, torch.float16, scaler)]
        own = job.trainer._step.precision
        state = own.state_dict()
        own.load_state_dict({**state, "scaler": {**state["scaler"], "scale": first_scale}})
        report = job.trainer.run()
        job.check()
        assert own.state_dict()["scaler"] == scaler.state_dict()
        falls = [b < a for a, b in itertools.pairwise(scales)]
        assert [e["skipped_steps"] for e in report["epochs"]] == [sum(falls[:5]), sum(falls[5:])]
        assert any(falls) == (first_scale == 2.0**30)
