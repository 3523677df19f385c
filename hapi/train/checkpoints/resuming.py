"""Settings that a resumed training may change, and those that it did change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hapi.client.job_context import JobContext
from hapi.client.settings import NetworkSettings, PlanningSettings, SessionSettings
from hapi.config.fields import flag_of, settings_fields
from hapi.train.settings import CheckpointSettings, OutputSettings, TrainingSettings

log = logging.getLogger("hapi.client")

FOLLOWING = frozenset(("epochs", "lr", "head_lr", "backbone_lr"))
"""Settings that may change, and count from where the training goes on; the report says from when."""
FREE = frozenset(
    (
        *("allow_model", "device", "threads", "micro_batch", "memory", "metric"),
        *("offload", "offload_dir"),
        *("early_stopping", "min_improvement"),
        *(
            field.name
            for group in (NetworkSettings, PlanningSettings, CheckpointSettings, OutputSettings)
            for field in settings_fields(group)
            if field.name != "wire_codec"
        ),
    )
)
"""Settings that may change: where and how fast the same is computed, and what is written of it."""
BY_MEANING = frozenset(
    [
        "model",
        "weights",
        "blocks",
        "freeze",
        "dataset",
        "image_size",
        "augment",
        "validation",
        "shuffle",
        "trainers",
        "trainer",
        "loss",
        "class_weights",
        "wire_codec",
    ]
)
"""Settings compared in what they stand for (the files and layers they name): see :func:`identity_of`."""
# All other settings must be as they were when the training began, also those that this table has never heard of.


def identity_of(session: SessionSettings, training: TrainingSettings, job: JobContext) -> dict[str, Any]:
    """Return all that must be equal for a resumed run to be the same training; the split may differ.

    Settings of :data:`FOLLOWING` are under ``following``.
    """
    values = {
        field.name: getattr(owner, field.name)
        for owner, group in ((session, SessionSettings), (training, TrainingSettings))
        for field in settings_fields(group)
    }
    return {
        **{name: values[name] for name in sorted(values.keys() - FOLLOWING - FREE - BY_MEANING)},
        "model": session.model,
        **meanings_of(job),
        "following": {name: values[name] for name in sorted(FOLLOWING)},
    }


def meanings_of(job: JobContext) -> dict[str, Any]:
    """Return what the settings of :data:`BY_MEANING` stand for in a job, by names of an identity."""
    transform = job.transforms[0]
    return {
        "weights": job.weights,
        "dataset": job.description.reference.version,
        "training samples": len(job.training_ids),
        "freeze": job.freeze,
        **job.order.identity(),
        "transform": None if transform is None else transform.to_json(),
        "frozen layers": job.prefix_digest,
        "rounding on the wire": job.wire_rounding,
    }


@dataclass(frozen=True)
class Change:
    """A setting that has another value from a step on."""

    epoch: int
    batch: int
    """The first step with it."""
    setting: str
    before: Any
    after: Any


class Changes:
    """Changes of a training's settings, over all its processes."""

    def __init__(self) -> None:
        self.entries: list[Change] = []

    def add(self, changes: Sequence[Change]) -> None:
        """Add ``changes``, with a line for each that changes a step."""
        self.entries += changes
        for change in changes:
            if change.setting != "epochs":
                log.warning(
                    "from epoch %d, batch %d on, %s is %s and no longer %s",
                    change.epoch, change.batch, flag_of(change.setting), change.after, change.before,
                )  # fmt: skip

    def to_json(self) -> list[dict[str, Any]]:
        """Return the changes in their order."""
        return [asdict(change) for change in self.entries]

    def state_dict(self) -> dict[str, Any]:
        """State of it for a checkpoint."""
        return {"entries": self.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.entries = [Change(**entry) for entry in state["entries"]]


def changes_of(kept: Mapping[str, Any], own: Mapping[str, Any], epoch: int, batch: int) -> list[Change]:
    """Return what differs between the ``following`` settings of two identities, from the step at this position on."""
    return [
        Change(epoch, batch, name, kept.get(name), value)
        for name, value in own.items()
        if kept.get(name) != value
    ]
