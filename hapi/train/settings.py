"""Settings of a training: those of its session, of the trainer itself, and of what ``hapi-train`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hapi.client.settings import (
    DataSettings,
    ModelSettings,
    NetworkSettings,
    PlanningSettings,
    SessionSettings,
)
from hapi.config.settings import setting, with_other_names
from hapi.train.loggers.choose import LoggerName
from hapi.train.objective.names import BestName, LossName, MetricName
from hapi.train.steps.settings import (
    AllStepSettings,
    OffloadSettings,
    OptimizerSettings,
    ScheduleSettings,
    StepSettings,
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The loss, its targets, and what is measured on the validation samples."""

    loss: LossName = setting(
        "auto: cross-entropy for one class per sample, bce for several, mse for numbers (or l1, huber)",
        default="auto",
    )
    huber_delta: float = setting("error from which huber is linear", default=1.0, above=0, high=1e9)
    label_smoothing: float = setting(
        "share of the target that is spread over all classes (the validation loss is without)",
        default=0.0,
        low=0,
        high=0.999,
    )
    class_weights: str = setting(
        "none, balanced (samples / (classes x samples of the class), as scikit-learn has it, counted over the "
        "training samples; with several labels per sample: negative per positive ones), or a JSON file of a number by "
        "class",
        default="none",
        metavar="none|balanced|FILE",
    )
    feature_mixup: float | None = setting(
        "alpha of mixup in feature space: inputs of the trained layers and targets of each batch are mixed in pairs, "
        "by a share from Beta(alpha, alpha)",
        default=None,
        above=0,
        high=1000,
    )
    mixup: float | None = setting(
        "refused: the server runs the frozen layers on single images; use --feature-mixup",
        default=None,
        low=0,
        high=1000,
    )
    cutmix: float | None = setting(
        "refused for the same reason; use --feature-mixup", default=None, low=0, high=1000
    )
    metric: tuple[MetricName, ...] = setting(
        "metric of the validation samples; may be repeated. f1, precision, recall, auroc and average_precision are "
        "means over the classes (default: accuracy, and top5 from 6 classes on; accuracy, f1 and auroc for several "
        "labels per sample; mae and rmse for numbers)",
        default=(),
    )
    best: BestName = setting(
        "metric that the best epoch is chosen by (auto: accuracy, otherwise the loss), of the validation samples",
        default="auto",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """The run folder, checkpoints, and where a training goes on from."""

    output: str | None = setting(
        "run folder: the trained model (model.safetensors, best.safetensors of the best epoch), log, and checkpoint "
        "and report where no file is given for them (hapi-train's default: a new folder in runs/)",
        default=None,
        flags=("--output-dir",),
        metavar="DIR",
        none_help="no run folder; nothing is written but the files that are named",
    )
    checkpoint: str | None = setting(
        "file that training is saved to after each epoch and on Ctrl-C",
        default=None,
        metavar="FILE",
    )
    checkpoint_every: int | None = setting(
        "batches between checkpoints inside an epoch", default=None, low=1, high=1 << 40
    )
    keep: int = setting(
        "checkpoints that are left: FILE, FILE.1 (the one before) and so on; --resume takes the newest that is whole",
        default=1,
        low=1,
        high=1000,
    )
    resume: bool = setting(
        "go on from the checkpoint of --checkpoint or --output when it exists, with its settings where none are given "
        "('--resume DIR' names a run folder, too)",
        default=False,
    )
    init_from: str | None = setting(
        "model file or checkpoint of another training to begin from; model, frozen weights and freeze are its own "
        "where none are given, and the head is new where the classes are others",
        default=None,
        metavar="FILE",
    )
    save_profile: str | None = setting(
        "file for the profile that was measured (JSON)", default=None, metavar="FILE"
    )

    @property
    def checkpoint_path(self) -> str | None:
        """The file of the checkpoint: the one given, else one in the folder for the model, else None."""
        if self.checkpoint is not None or self.output is None:
            return self.checkpoint
        return str(Path(self.output, "checkpoint.pt"))

    @property
    def checkpoint_flag(self) -> str:
        """The flag and place that name the checkpoint, for messages."""
        return f"--output {self.output}" if self.checkpoint is None else f"--checkpoint {self.checkpoint}"


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(CheckpointSettings, ObjectiveSettings, AllStepSettings):
    """Optimiser, steps, objective, checkpoints and model files of a :class:`hapi.Trainer`, which checks them."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Files and lines that ``hapi-train`` writes about a training."""

    report: str | None = setting("file for the JSON report", default=None, metavar="FILE")
    html: str | None = setting(
        "file for the report as a page: stages, split, loss, plan", default=None, metavar="FILE"
    )
    trace: str | None = setting("file for a trace that Perfetto opens", default=None, metavar="FILE")
    log: tuple[LoggerName, ...] = setting(
        "where the figures of epochs and steps go too, in or from the run folder; may be repeated", default=()
    )
    log_every: int = setting("steps between two entries of steps of --log", default=10, low=1, high=1 << 40)
    progress: bool = setting("live progress bar", default=True)
    push: str | None = setting(
        "push the best epoch's model there at the end, as hapi push does: its trained layers, and of the frozen ones "
        "what the store does not have",
        default=None,
        metavar="STORE/NAME",
    )


@with_other_names
@dataclass(frozen=True, kw_only=True)
class TrainSettings(OutputSettings, TrainingSettings, SessionSettings):
    """All settings of ``hapi-train``, for a session and a trainer alike; ``hapi-train --help`` describes each.

    >>> import hapi
    >>> settings = hapi.TrainSettings(model="resnet18", optimizer="adamw", lr=1e-4, output="runs/flowers")
    >>> settings.checkpoint_path
    'runs/flowers/checkpoint.pt'
    """


GROUPS = {
    "model": ModelSettings,
    "data": DataSettings,
    "split": PlanningSettings,
    "network": NetworkSettings,
    "optimiser": OptimizerSettings,
    "learning-rate schedule": ScheduleSettings,
    "steps": StepSettings,
    "memory": OffloadSettings,
    "objective": ObjectiveSettings,
    "model files and checkpoints": CheckpointSettings,
    "output": OutputSettings,
}
"""Headings of ``hapi-train --help``, and the settings below them: all of :class:`TrainSettings`."""
