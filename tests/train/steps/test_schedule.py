"""Learning rates of every schedule are those of torch's own schedulers, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from hapi.errors import UsageError
from hapi.train.settings import TrainingSettings
from hapi.train.steps.schedule import Schedule, steps_in
from hapi.train.steps.settings import check_steps, schedule_of

BASE, TOTAL = 0.3, 40

Maker = Callable[[torch.optim.Optimizer], torch_schedulers.LRScheduler]


def torch_rates(make: Maker, warmup: int = 0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)
    if warmup:
        rising = torch_schedulers.LinearLR(optimizer, 0.01, total_iters=warmup)
        scheduler = torch_schedulers.SequentialLR(optimizer, [rising, make(optimizer)], [warmup])
    found = []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def constant(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    return torch_schedulers.ConstantLR(optimizer, 1.0)


def step(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    return torch_schedulers.StepLR(optimizer, 7, 0.5)


def cosine(steps: int) -> Maker:
    return lambda optimizer: torch_schedulers.CosineAnnealingLR(optimizer, steps, eta_min=0.02)


def one_cycle(rise: float) -> Maker:
    return lambda optimizer: torch_schedulers.OneCycleLR(
        optimizer, BASE, TOTAL, pct_start=rise, cycle_momentum=False
    )


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, lambda: torch_rates(constant)),
        ("constant", 6, lambda: torch_rates(constant, 6)),
        ("step", 0, lambda: torch_rates(step)),
        ("step", 6, lambda: torch_rates(step, 6)),
        ("cosine", 0, lambda: torch_rates(cosine(TOTAL))),
        ("cosine", 6, lambda: torch_rates(cosine(TOTAL - 6), 6)),
        ("one-cycle", 0, lambda: torch_rates(one_cycle(0.3))),
        ("one-cycle", 4, lambda: torch_rates(one_cycle(4 / TOTAL))),
        ("one-cycle", 1, lambda: [BASE, *torch_rates(one_cycle(1e-9 + 1 / TOTAL))[1:]]),
    ],
)
def test_the_rates_are_torchs(kind: str, warmup: int, expected: Callable[[], list[float]]) -> None:
    schedule = Schedule(kind=kind, total=TOTAL, warmup=warmup, every=7, factor=0.5, min_rate=0.02)
    assert [schedule.rate(BASE, n) for n in range(TOTAL)] == pytest.approx(expected(), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "step", "cosine", "one-cycle"])
@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 1000])
def test_short_trainings_have_rates_too(kind: str, total: int) -> None:
    for warmup in range(min(total, 5)):
        schedule = Schedule(kind=kind, total=total, warmup=warmup)
        assert all(0 <= schedule.rate(BASE, n) <= BASE * (1 + 1e-12) for n in range(total))


def test_a_rate_that_is_constant_is_the_very_number() -> None:
    assert Schedule(kind="constant", total=9).rate(0.1, 5) == 0.1


@pytest.mark.parametrize(
    ("length", "steps"),
    [(500, 500), ("2ep", 20), ("0.5ep", 5), ("0.01ep", 1), ("1 epoch", 10), ("3epochs", 30), ("0ep", 0), (0, 0)],
)  # fmt: skip
def test_lengths_in_steps_and_epochs(length: int | str, steps: int) -> None:
    assert steps_in(length, 10) == steps


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"warmup": "2x"}, "--warmup '2x': expected steps (500) or epochs (2ep, 0.5ep)"),
        ({"warmup": "ep"}, "--warmup 'ep': expected steps"),
        ({"schedule": "step"}, "--schedule step needs --step-every, such as 30ep"),
        ({"schedule": "step", "step_every": "7.5"}, "--step-every '7.5': expected steps"),
        ({"schedule": "step", "step_every": "0ep"}, "--step-every '0ep': expected at least one step"),
        (
            {"schedule": "step", "step_every": "0.0 epochs"},
            "--step-every '0.0 epochs': expected at least one",
        ),
        ({"step_every": 3}, "--step-every needs --schedule step, here it is constant"),
        (
            {"schedule": "cosine", "step_factor": 0.5},
            "--step-factor needs --schedule step, here it is cosine",
        ),
        ({"min_lr": 0.001}, "--min-lr needs --schedule cosine"),
        ({"schedule": "cosine", "min_lr": 0.1}, "--min-lr 0.1 is above the learning rate of 0.01"),
        ({"schedule": "cosine", "min_lr": 0.005, "head_lr": 0.001}, "above the learning rate of 0.001"),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs --optimizer sgd with --momentum above 0"),
        ({"nesterov": True, "optimizer": "adam"}, "--nesterov needs --optimizer sgd"),
        ({"betas": (0.5, 0.9)}, "--betas needs --optimizer adam or adamw, here it is sgd"),
        ({"min_improvement": 0.1}, "--min-improvement needs --early-stopping N"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_steps(TrainingSettings(**changes))  # type: ignore[arg-type]
    assert str(caught.value).startswith(line) or line in str(caught.value)


def test_a_warm_up_longer_than_the_training() -> None:
    with pytest.raises(UsageError, match=r"--warmup 3ep: the training has only 15 steps \(3 epochs of 5\)"):
        schedule_of(TrainingSettings(warmup="3ep"), 3, 5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"momentum": 0.0}, 0.0), ({}, 1.0), ({"optimizer": "adamw"}, 2.0), ({"ema": 0.9}, 2.0),
        ({"accumulate": 2}, 2.0), ({"precision": "bf16"}, 1.5),
        ({"optimizer": "adam", "ema": 0.9, "accumulate": 4, "precision": "fp16"}, 4.5),
    ],
)  # fmt: skip
def test_bytes_that_are_kept_beside_the_parameters(changes: dict[str, object], expected: float) -> None:
    assert TrainingSettings(**changes).optimizer_bytes == expected  # type: ignore[arg-type]
