"""Settings of the optimiser and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hapi.config.settings import setting
from hapi.errors import UsageError
from hapi.paths import user_path
from hapi.profiler.offload_costs import OffloadName, OffloadTerms
from hapi.text import counted
from hapi.train.steps.schedule import Schedule, check_length, steps_in
from hapi.wire.references import Precision

OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop"]
ScheduleName = Literal["constant", "cosine", "step", "one-cycle"]
OPTIMIZER_BYTES = {"sgd": 0.0, "adam": 2.0, "adamw": 2.0, "rmsprop": 2.0}
"""Bytes that torch's optimisers keep per byte of parameters, beside the gradients (sgd: without, rmsprop: with
momentum)."""
BETAS = (0.9, 0.999)
_ALMOST_ONE = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimiser, and the rates of its groups of parameters."""

    lr: float = setting("learning rate", default=0.01, above=0, high=1e6, flags=("--learning-rate",))
    head_lr: float | None = setting(
        "learning rate of the head, the last layer of 'hapi layers' that has parameters; that of --lr unless given",
        default=None,
        above=0,
        high=1e6,
    )
    backbone_lr: float | None = setting(
        "learning rate of the trained layers before the head; that of --lr unless given",
        default=None,
        above=0,
        high=1e6,
    )
    optimizer: OptimizerName = setting("optimiser", default="sgd")
    momentum: float = setting("momentum of sgd and rmsprop", default=0.9, low=0, high=1)
    nesterov: bool = setting("Nesterov's momentum, of sgd", default=False)
    betas: tuple[float, float] = setting(
        "decay of the averages of adam and adamw", default=BETAS, low=0, high=_ALMOST_ONE, metavar="X,X"
    )
    weight_decay: float = setting("weight decay", default=0.0, low=0, high=1e3)
    decay_norm_bias: bool = setting(
        "weight decay also on biases and norms (parameters of one dimension)", default=True
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate over the steps of a training."""

    schedule: ScheduleName = setting(
        "learning rate over the training: cosine falls to --min-lr; step falls by --step-factor after each "
        "--step-every; one-cycle rises from 1/25 over --warmup (30% of the steps unless given), then falls to nearly "
        "nothing",
        default="constant",
    )
    warmup: int | str = setting(
        "first steps (500) or epochs (2ep, 0.5ep) in which the rate rises from a hundredth; a step and cosine schedule "
        "begin after them",
        default=0,
        low=0,
        high=1 << 40,
        metavar="N|Nep",
    )
    step_every: int | str | None = setting(
        "steps (500) or epochs (30ep) after which a step schedule lowers the rate",
        default=None,
        low=1,
        high=1 << 40,
        metavar="N|Nep",
    )
    step_factor: float | None = setting(
        "factor of a step schedule: 0.1 unless given", default=None, above=0, high=1
    )
    min_lr: float = setting("rate at the end of a cosine schedule", default=0.0, low=0, high=1e6)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How gradients become steps, and when to stop."""

    accumulate: int = setting(
        "training batches whose gradients make one optimiser step, as one large batch would; an epoch's last step may "
        "have fewer",
        default=1,
        low=1,
        high=1 << 20,
    )
    clip_norm: float | None = setting(
        "largest norm of the gradient over all trained parameters: longer ones are scaled to it, and the report "
        "has the norms",
        default=None,
        above=0,
        high=1e9,
    )
    ema: float | None = setting(
        "decay (0.999) of an exponential moving average of the trained layers, which is what is validated and written "
        "as the model",
        default=None,
        above=0,
        high=_ALMOST_ONE,
        metavar="DECAY",
    )
    precision: Precision = setting(
        "arithmetic of the trained layers: torch's autocast to bf16 or fp16, with a scaled loss for fp16",
        default="fp32",
    )
    early_stopping: int | None = setting(
        "epochs without a new best one (see --output) after which training stops",
        default=None,
        low=1,
        high=1 << 31,
    )
    sync_batchnorm: bool = setting(
        "under torchrun: take BatchNorm's statistics over the whole batch, not each rank's part of it (GPUs only)",
        default=False,
    )
    min_improvement: float = setting(
        "difference that an epoch must exceed to count as better, for --early-stopping",
        default=0.0,
        low=0,
        high=1e9,
    )


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Where the optimiser's states are."""

    offload: OffloadName = setting(
        "place of the states of adamw, adam and sgd: off is the memory of the trained layers, host the machine's (for "
        "a GPU), disk a folder; auto takes the disk where the training does not fit the memory, or is faster so by a "
        "given profile. The steps are bitwise the same",
        default="auto",
    )
    offload_dir: tuple[str, ...] = setting(
        "folder of --offload disk, one for each drive; may be repeated (default: the run folder, or without one "
        "$XDG_CACHE_HOME/hapi)",
        default=(),
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class AllStepSettings(OffloadSettings, StepSettings, ScheduleSettings, OptimizerSettings):
    """All settings of this module."""

    @property
    def optimizer_bytes(self) -> float:
        """Bytes kept per byte of trained parameters, beside them and the gradients of one batch.

        These are the optimiser's state, the moving average, gradients that wait for more batches, and the copies of
        the weights in 16 bits.
        """
        return (
            self._own_bytes
            + (self.ema is not None)
            + (self.accumulate > 1)
            + 0.5 * (self.precision != "fp32")
        )

    @property
    def checkpoint_factor(self) -> float:
        """Bytes of a checkpoint per byte of trained parameters: these, as they are and as they were at their best, the
        optimiser's state, and the moving average.
        """
        return 2 + self._own_bytes + (self.ema is not None)

    @property
    def offload_terms(self) -> OffloadTerms | None:
        """States that may be offloaded; None where all must stay in memory."""
        if self.offload == "off" or self.optimizer == "rmsprop":
            return None
        drives = max(1, len(self.offload_dir))
        return OffloadTerms(wanted=self.offload, states=int(self._own_bytes), drives=drives)

    @property
    def _own_bytes(self) -> float:
        return 1.0 if self.optimizer == "sgd" and self.momentum else OPTIMIZER_BYTES[self.optimizer]


def check_steps(settings: AllStepSettings) -> None:
    """Raise :class:`UsageError` for settings that contradict each other, or would have no effect."""
    s = settings
    check_length(s.warmup, "--warmup")
    if s.step_every is not None:
        check_length(s.step_every, "--step-every")
        if not steps_in(s.step_every, 1):
            raise UsageError(f"--step-every {s.step_every!r}: expected at least one step")
    if s.schedule == "step" and s.step_every is None:
        raise UsageError("--schedule step needs --step-every, such as 30ep for every 30 epochs")
    for needed, found, line in (
        ("step", s.step_every is not None, "--step-every"),
        ("step", s.step_factor is not None, "--step-factor"),
        ("cosine", bool(s.min_lr), "--min-lr"),
    ):
        if found and s.schedule != needed:
            raise UsageError(f"{line} needs --schedule {needed}, here it is {s.schedule}")
    smallest = min(rate for rate in (s.lr, s.head_lr, s.backbone_lr) if rate is not None)
    if s.min_lr > smallest:
        raise UsageError(f"--min-lr {s.min_lr:g} is above the learning rate of {smallest:g}")
    if s.nesterov and (s.optimizer != "sgd" or not s.momentum):
        raise UsageError("--nesterov needs --optimizer sgd with --momentum above 0")
    if s.betas != BETAS and s.optimizer not in ("adam", "adamw"):
        raise UsageError(f"--betas needs --optimizer adam or adamw, here it is {s.optimizer}")
    if s.offload_dir and s.offload not in ("auto", "disk"):
        raise UsageError(f"--offload-dir needs --offload disk or auto, here it is {s.offload}")
    folders = [user_path(folder, "--offload-dir").resolve() for folder in s.offload_dir]
    if len(set(folders)) < len(folders):
        raise UsageError("--offload-dir: each drive has one folder; name each once")
    if s.offload in ("host", "disk") and s.optimizer == "rmsprop":
        raise UsageError(f"--offload {s.offload} needs --optimizer adamw, adam or sgd, here it is rmsprop")
    if s.min_improvement and s.early_stopping is None:
        raise UsageError("--min-improvement needs --early-stopping N")


def schedule_of(settings: ScheduleSettings, epochs: int, steps_per_epoch: int) -> Schedule:
    """Return the schedule of a training.

    Args:
        settings: of the schedule, checked.
        epochs: of the whole training.
        steps_per_epoch: optimiser steps of an epoch.

    Raises:
        UsageError: the warm-up takes the whole training.
    """
    total, warmup = epochs * steps_per_epoch, steps_in(settings.warmup, steps_per_epoch)
    if warmup >= max(1, total):
        raise UsageError(
            f"--warmup {settings.warmup}: the training has only {counted(total, 'step')} "
            f"({counted(epochs, 'epoch')} of {steps_per_epoch}); give fewer"
        )
    return Schedule(
        kind=settings.schedule,
        total=total,
        warmup=warmup,
        every=steps_in(settings.step_every or 1, steps_per_epoch),
        factor=0.1 if settings.step_factor is None else settings.step_factor,
        min_rate=settings.min_lr,
    )
