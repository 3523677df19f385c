"""``hapi-train``: fine-tune a network on a dataset beside a store."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hapi import __version__
from hapi.allocator import keep_freed_memory
from hapi.cli.entry import Leaving
from hapi.cli.shared.common import EXIT_CODES, EXIT_DIVERGED, EXIT_FAILED, EXIT_OK, OneLineParser, run_command
from hapi.cli.shared.lines import print_parts, print_wrapped
from hapi.cli.shared.pushing import check_push, push_best
from hapi.cli.shared.ranks import along, check_launch, going_on, ranks_of, silent, train_along, watch_torchrun
from hapi.cli.shared.resumed import as_kept, run_folder
from hapi.cli.shared.run_log import RunLog
from hapi.cli.shared.run_outputs import LAST_SECONDS, RunFiles, absent_files, wants_folder, write_outputs
from hapi.cli.shared.settings_file import (
    add_settings_file,
    print_settings,
    settings_file,
    tell_unknown_variables,
)
from hapi.cli.shared.training_notes import notes, room_notes
from hapi.cli.shared.training_progress import ProgressPrinter
from hapi.config.fields import flag_of
from hapi.config.settings import Loaded, add_flags, load, overrides_of
from hapi.errors import HapiError, UsageError
from hapi.factories import is_factory, search_here
from hapi.paths import check_folder, user_path
from hapi.process.telemetry import open_tracer
from hapi.text import counted, printable
from hapi.trace import Tracer
from hapi.train.distributed.launch import Launch, launched
from hapi.train.loggers.choose import check_loggers, make_loggers
from hapi.train.outputs.run_folder import BEST_FILE
from hapi.units import format_bytes, format_count, format_money

if TYPE_CHECKING:
    from hapi.client.joint.ranks import Ranks
    from hapi.client.session import Session
    from hapi.train.loggers.base import MetricLogger
    from hapi.train.settings import TrainSettings
    from hapi.train.trainer import Trainer


VARIABLES = "HAPI_TRAIN_"
"""Prefix of the environment variables of settings."""


def parser() -> argparse.ArgumentParser:
    """The command line of ``hapi-train``."""
    from hapi.train.settings import GROUPS

    p = OneLineParser(
        prog="hapi-train",
        description="Fine-tune a network: its frozen prefix runs on servers beside the data, all else here.",
        epilog="Example: hapi-train --model resnet50 --bs 1024. "
        f"Each setting may also be in the environment: --micro-batch as {VARIABLES}MICRO_BATCH. "
        f"{EXIT_CODES[:-1]}, {EXIT_DIVERGED} the training diverged.",
    )
    p.add_argument("--version", action="version", version=f"hapi {__version__}")
    add_settings_file(p, "experiment")
    for title, group in GROUPS.items():
        add_flags(p, group, title)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-train``; returns the exit code."""
    return run_command("hapi-train", lambda: _begun(argv), goes_on=True)


def _begun(argv: Sequence[str] | None) -> int:
    launch = launched()
    if launch is not None:
        watch_torchrun(launch)
    if launch is None or launch.rank == 0:
        return _run(_parsed(argv), launch)
    with silent():
        return along(lambda: _along(argv, launch), "hapi-train", launch)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    with Leaving("hapi-train"):
        return parser().parse_args(argv)


def _loaded(args: argparse.Namespace, launch: Launch | None) -> tuple[Loaded[TrainSettings], str | None]:
    """Return the settings, which suit ``launch``, and the experiment file."""
    from hapi.train.settings import TrainSettings

    experiment, overrides = run_folder(settings_file(args, "experiment"), overrides_of(args, TrainSettings))
    loaded: Loaded[TrainSettings] = load(TrainSettings, experiment, overrides, os.environ, VARIABLES)
    loaded = as_kept(loaded)
    check_launch(loaded.value, launch)
    return loaded, experiment


def _run(args: argparse.Namespace, launch: Launch | None) -> int:
    loaded, experiment = _loaded(args, launch)
    tell_unknown_variables("hapi-train", type(loaded.value), os.environ, VARIABLES)
    if args.print_config:
        print_settings(loaded)
        return EXIT_OK
    with RunLog("hapi-train") as log:
        try:
            loaded = _ready(loaded)
            with ranks_of(launch, loaded.value) as ranks:
                loaded = replace(loaded, value=going_on(loaded.value, ranks))
                traced = loaded.value.trace is not None
                with (
                    RunFiles(loaded, experiment, log) as files,
                    open_tracer("hapi-train", os.environ, enabled=traced) as tracer,
                ):
                    return _train_into(files, loaded, ranks, tracer)
        except HapiError as error:
            error.args = (loaded.as_given(str(error)),)
            raise


def _along(argv: Sequence[str] | None, launch: Launch) -> int:
    """Train as one of the other ranks, which print and write nothing."""
    with redirect_stderr(sys.stdout):  # nowhere: the first rank says what is wrong with the arguments
        args = _parsed(argv)
    loaded, _ = _loaded(args, launch)
    if args.print_config:
        return EXIT_OK
    loaded = _ready(loaded)
    with ranks_of(launch, loaded.value) as ranks:
        train_along(going_on(loaded.value, ranks), ranks)
    return EXIT_OK


def _ready(loaded: Loaded[TrainSettings]) -> Loaded[TrainSettings]:
    """Return the settings, checked, with those of what training begins from; the process is made ready for them."""
    from hapi.client.early_checks import check_names

    settings = loaded.value
    if settings.allow_model or settings.init_from or is_factory(settings.model):
        search_here()
    check_names(settings)
    if settings.memory is None:  # with a bound, what is free is not the job's
        keep_freed_memory()
    with Leaving("hapi-train"):
        from hapi.train.init_from import started

    loaded = replace(loaded, value=started(settings, has_model="model" in loaded.origins))
    check_together(loaded)
    return loaded


def _train_into(files: RunFiles, loaded: Loaded[TrainSettings], ranks: Ranks, tracer: Tracer) -> int:
    with Leaving("hapi-train"):
        from hapi.client.session import Session
        from hapi.train.steps.offloading import offload_terms
        from hapi.train.trainer import Trainer

    settings = loaded.value
    with Session.open(
        settings,
        tracer=tracer,
        optimizer_bytes=settings.optimizer_bytes,
        offload=offload_terms(settings),
        ranks=ranks,
    ) as session:
        settings = files.begin(session.job_context.description.reference.name, settings.model)
        ranks.gathered(settings.output)
        _announce(session, loaded, settings)
        printer = ProgressPrinter(settings.progress and sys.stderr.isatty(), session.planning)
        absent = absent_files(settings)
        trainer = Trainer(session, settings, [files.log_opener(settings), printer, *_loggers(settings)])
        try:
            report = trainer.run()
        except BaseException:
            _after_failure(trainer, tracer, loaded, settings)
            raise
    failed = write_outputs(settings, tracer, report, min(LAST_SECONDS, settings.patience))
    _summarise(report, trainer.trained_epochs, settings, absent)
    failed += push_best(settings)
    for line in failed:
        print(f"hapi-train: error: {loaded.as_given(line)}", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def _loggers(settings: TrainSettings) -> list[MetricLogger]:
    """The loggers of the run folder; none without one."""
    return [] if settings.output is None else make_loggers(settings.log, settings.output, settings.log_every)


def _after_failure(
    trainer: Trainer, tracer: Tracer, loaded: Loaded[TrainSettings], training: TrainSettings
) -> None:
    """Report and trace of what there was; the failure is what matters, so theirs are only told.

    A training that never began leaves its files alone: they may be those of the run that it should go on with, or of
    one that is still at work.
    """
    if not trainer.began:
        return
    for line in write_outputs(training, tracer, trainer.report(), 0.0):
        print(f"hapi-train: {loaded.as_given(line)}", file=sys.stderr)
    if training.checkpoint_path and trainer.has_checkpoint:
        place = shlex.quote(str(training.checkpoint or training.output))
        print(
            f"go on with: --resume {'--checkpoint ' if training.checkpoint else ''}{place}", file=sys.stderr
        )


def check_together(loaded: Loaded[TrainSettings]) -> None:
    """Refuse settings that would have no effect beside the others."""
    from hapi.client.early_checks import fixed_split, is_fixed
    from hapi.train.objective.checks import check_objective
    from hapi.train.steps.settings import check_steps

    settings = loaded.value
    if settings.trainers > 1:
        raise UsageError(
            f"--trainers {settings.trainers}: hapi-train averages no gradients between them, so each would train a "
            f"model of its own; start torchrun --no-python --nproc-per-node {settings.trainers} hapi-train, where "
            "--bs is the whole batch, or share epochs in a loop of your own over hapi.Session"
        )
    if settings.save_profile is not None and is_fixed(settings.split):
        raise UsageError(f"--save-profile {fixed_split(settings)}")
    check_steps(settings)
    for folder in settings.offload_dir:
        check_folder(user_path(folder, "--offload-dir"), "name another --offload-dir")
    if settings.checkpoint_path is None and settings.resume:
        raise UsageError(
            "--resume needs the folder of the run to go on with (--resume DIR), or --checkpoint FILE"
        )
    if settings.checkpoint_path is None and not wants_folder(loaded):
        for name in ("checkpoint_every", "keep"):
            if name in loaded.origins:
                raise UsageError(f"{flag_of(name)} needs --checkpoint FILE or --output DIR")
    check_objective(settings, validated=settings.validation is not None)
    check_push(settings.push, wants_folder(loaded))
    if settings.log and not wants_folder(loaded):
        raise UsageError("--log: needs a run folder; leave --no-output out")
    check_loggers(settings.log)
    for name in ("cache_dir", "cache_size", "cache_codec", "cache_memory") if settings.cache == "off" else ():
        if name in loaded.origins:
            raise UsageError(f"{flag_of(name)}: has no effect with --cache off")
    for epoch in settings.profile_epoch:
        if epoch >= settings.epochs and settings.checkpoint_path is None:  # with one, more epochs may follow
            raise UsageError(
                f"--profile-epoch {epoch}: expected 0 to {settings.epochs - 1}, the last epoch; give more --epochs"
            )


def _announce(session: Session, loaded: Loaded[TrainSettings], training: TrainSettings) -> None:
    job_context, settings = session.job_context, session.settings
    model, description = job_context.model, job_context.description
    names = [layer.name for layer in model.layers]
    if job_context.strategy is None:
        at = (
            f"{session.split} ({names[session.split - 1]})"
            if session.split
            else "none (stored samples are sent)"
        )
    else:
        at = f"chosen by {job_context.strategy} after profiling"
    augmented = f", augmented by {','.join(settings.augment)}" if settings.augment else ""
    augmented += "" if settings.augment_views is None else f" ({settings.augment_views} views)"
    freeze = (
        f"{job_context.freeze} ({names[job_context.freeze - 1]})" if job_context.freeze else "0 (nothing)"
    )
    freeze += "" if settings.frozen_precision == "fp32" else f" in {settings.frozen_precision}"
    embedded = " (embedded)" if job_context.embedded else ""
    print_parts(
        "model", settings.model, counted(len(names), "layer"), f"weights {job_context.weights}",
        f"freeze {freeze}", f"split {at}",
    )  # fmt: skip
    if training.init_from:
        print_parts("from", training.init_from)
    samples = len(job_context.training_ids)
    print_parts(
        "data", description.reference.name, counted(samples, "sample", format_count(samples)),
        description.label_form.summary, f"batch {settings.bs}{_shared(session)}",
        f"input {'x'.join(map(str, model.input_shape))}{augmented}",
    )  # fmt: skip
    rounding = job_context.wire_rounding
    rounded = [] if rounding == "none" else [f"features rounded to {rounding}"]
    names, count = job_context.urls, job_context.servers.size
    servers = ", ".join(names) + (f" ({count} servers)" if count > len(names) else "")
    print_parts("via", f"{servers}{embedded}", f"device {session.device}", *rounded)
    if training.output is not None:
        print(f"run   {printable(training.output)}", flush=True)
    if job_context.order.shuffle.group:
        print(f"order {job_context.order.shuffle}", flush=True)
    for note in (*notes(session, loaded), *room_notes(session, training)):
        print_wrapped(f"note  {loaded.as_given(note)}")


def _shared(session: Session) -> str:
    """How several ranks share a batch; nothing of one."""
    ranks = session.ranks
    if ranks.size == 1:
        return ""
    return f" ({ranks.largest_part(session.settings.bs)} on each of {ranks.size} ranks)"


def _summarise(
    report: Mapping[str, Any], trained_epochs: int, training: TrainSettings, absent: Sequence[str]
) -> None:
    from hapi.train.objective.names import metrics_text
    from hapi.train.report_facts import kept_text, offload_text

    epochs = report["epochs"]
    ended = report["ended"]
    saved = [name for name in absent if name not in absent_files(training)]
    if not trained_epochs and saved:
        print(f"the training had ended; saved what was missing of it: {', '.join(saved)}")
        _say_next(training)
        return
    if not trained_epochs:
        if ended["how"] == "stopped early":
            print(f"nothing to do: training stopped early, {ended['detail']}; give a larger --early-stopping")
        else:
            print(
                f"nothing to do: the checkpoint has {counted(len(epochs), 'epoch')} already; give more --epochs"
            )
        return
    if ended["how"] == "stopped early":
        print(f"stopped early: {ended['detail']}")
    received = sum(e["bytes_received"] for e in epochs)
    share = epochs[-1]["accuracy"]
    money = sum(e.get("money", 0.0) for e in epochs)
    print_wrapped(
        f"done in {report['seconds']:.1f} s: {format_bytes(received)} over the wire, "
        f"{f'money {format_money(money)}, ' if money else ''}"
        f"peak memory {format_bytes(report['peak_memory_bytes'])}, retries {report['retries']}, "
        f"final loss {epochs[-1]['loss']:.4f}{'' if share is None else f', accuracy {100 * share:.1f}%'}"
    )
    measured = metrics_text(epochs[-1], "validation_")
    if measured:
        print_wrapped(f"validation: {measured}")
    if cached := kept_text(report):
        print_wrapped(cached)
    if offloaded := offload_text(report):
        print_wrapped(offloaded)
    if "recheck" in report:
        found = report["recheck"]
        print_wrapped(
            f"recheck: {counted(found['samples'], 'sample')} as computed here, but for "
            f"{found['largest_difference']:.1g} of the largest feature; servers left: "
            f"{', '.join(found['left']) or 'none'}"
        )
    if report["settings"]["save_profile"] and "profile" not in report.get("plan", {}):
        print("note  --save-profile: training ended before the profile was whole, so none was written")
    _say_next(training)


def _say_next(training: TrainSettings) -> None:
    if training.output is not None:
        factories = (training.model,) if is_factory(training.model) else training.allow_model
        allowed = "".join(f" --allow-model {shlex.quote(name)}" for name in factories)
        best = shlex.quote(f"{training.output}/{BEST_FILE}")
        print(f"run   {printable(training.output)}\nnext  hapi predict {best} IMAGE{allowed}")


if __name__ == "__main__":
    sys.exit(main())
