"""Notes that ``hapi-train`` prints before it trains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hapi.config.settings import Loaded
from hapi.text import counted, printable
from hapi.units import format_bytes, format_count

if TYPE_CHECKING:
    from hapi.client.session import Session
    from hapi.train.settings import TrainSettings
    from hapi.wire.messages import DatasetDescription

STORE_VARIABLE = "HAPI_STORE"
"""Variable of ``--store``, which is usual beside ``--server``."""


def notes(session: Session, loaded: Loaded[TrainSettings]) -> Iterator[str]:
    """Yield a line for each setting that works, but is hardly intended."""
    from hapi.train.checkpoints.checkpoint_files import existing
    from hapi.train.distributed.batch_norm import has_batch_norm

    training = loaded.value
    settings, count = session.settings, len(session.job_context.training_ids)
    rounding = session.job_context.frozen.rounding
    if rounding is not None and rounding.arithmetic != rounding.features:
        yield (
            f"--frozen-precision: {session.device} has no units for {settings.frozen_precision}, so layers "
            "compute in float32 and are rounded: half the bytes on the wire, no more speed here"
        )
    data, held_out = session.job_context.description.reference, session.job_context.held_out.reference
    if isinstance(settings.validation, str) and held_out.version == data.version:
        yield f"--validation {settings.validation}: it has the training samples themselves; 0.1 holds others out"
    if settings.server and loaded.origins.get("store", STORE_VARIABLE) != STORE_VARIABLE:
        yield from _unused_store(session, loaded)
    if settings.bs > count:
        yield f"--bs {settings.bs} is more than the {counted(count, 'sample')}: every epoch is one batch of {count}"
    form, classes = session.job_context.description.label_form, session.job_context.description.classes
    if form.kind == "single" and form.classes == 1:
        yield (
            f"--dataset {data.name}: all its samples are of one class, {printable(classes[0])}, so there is nothing to "
            "learn; 'hapi pack' takes the folder that holds a folder for each class"
        )
    if session.ranks.size > 1 and has_batch_norm(session.trained):
        yield (
            f"BatchNorm in the trained layers takes the statistics of each rank's part, of {settings.bs} samples over "
            f"{session.ranks.size} ranks, so losses differ from those of one rank (--sync-batchnorm on GPUs)"
        )
    if not training.init_from:
        yield from _random_weights(session)
    if settings.shuffle == "full" and session.job_context.description.prefers_chunks:
        yield _full_cost(session.job_context.description)
    if training.resume and training.checkpoint and not existing(training.checkpoint):
        yield f"--resume: there is no {training.checkpoint} yet, so training begins anew"


def room_notes(session: Session, training: TrainSettings) -> Iterator[str]:
    """Yield a line where the disk of the run folder has no room for the run's files, hours before its last one."""
    from hapi.train.outputs.model_out import missing_bytes

    if training.output is None:
        return
    try:
        free, needed = shutil.disk_usage(training.output).free, missing_bytes(session, training)
    except OSError:
        return
    if needed > free:
        yield (
            f"--output {printable(training.output)}: its disk has {format_bytes(free)} free, and model files and "
            f"checkpoint take {format_bytes(needed)}; make room before the end, else no model is written"
        )


def _unused_store(session: Session, loaded: Loaded[TrainSettings]) -> Iterator[str]:
    """A warning about a store beside servers, unless weights are pushed into it or a checkpoint finds them there."""
    if session.job_context.client_model.pushed is None:
        servers = loaded.origins.get("server", "--server")
        yield (
            f"--store {session.settings.store}: not used, because {servers} names servers, which have their own; "
            f"leave --store or {servers} out"
        )


def _random_weights(session: Session) -> Iterator[str]:
    """A warning about random weights that nobody asked for, or that are frozen."""
    settings, freeze = session.settings, session.job_context.freeze
    if not session.job_context.weights.startswith("random:"):
        return
    frozen = f"layers 1 to {freeze} are frozen and keep their random weights"
    if settings.weights == "auto":
        kept = f" ({frozen})" if freeze else ""
        yield (
            f"--weights auto: no pre-trained weights of {settings.model} are in reach, so random ones are used{kept}; "
            "--weights FILE brings your own"
        )
    elif freeze:
        yield f"--weights {settings.weights}: {frozen}; give pre-trained weights, or --freeze 0 to train all layers"


def _full_cost(description: DatasetDescription) -> str:
    """The reads of an epoch in any order from a store that is slow to read single samples, and those of the default."""
    sample, chunks = description.total_bytes / description.count, -(-description.count // description.group)
    return (
        f"--shuffle full reads {format_count(description.count)} ranges of {format_bytes(sample)} an epoch from the "
        f"object store; without it there would be {format_count(chunks)} of "
        f"{format_bytes(description.total_bytes / chunks)} (over OpenStack Swift, 128 KiB samples come at 107 MB/s "
        "in chunks and at 7 MB/s one by one)"
    )
