"""``hapi-train``: fine-tune a network on a dataset beside a store."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hapi import __version__
from hapi.allocator import keep_freed_memory
from hapi.cli.entry import Leaving
from hapi.cli.shared.common import EXIT_FAILED, EXIT_OK, OneLineParser, run_command
from hapi.config.fields import flag_of, flat
from hapi.config.settings import Loaded, add_flags, load, overrides_of
from hapi.errors import HapiError, UsageError
from hapi.factories import is_factory, search_here
from hapi.paths import check_outputs
from hapi.process import output as standard
from hapi.trace import Tracer
from hapi.train.callbacks import TrainingCallback
from hapi.units import format_bytes, format_count

if TYPE_CHECKING:
    from hapi.client.loading.epoch_stats import PassReport
    from hapi.client.planning.controller import SplitController
    from hapi.client.session import Session
    from hapi.train.settings import OutputSettings, TrainingSettings, TrainSettings
    from hapi.train.trainer import Trainer
    from hapi.wire.messages import DatasetDescription


VARIABLES = "HAPI_TRAIN_"
"""Prefix of the environment variables of settings."""


def parser() -> argparse.ArgumentParser:
    """The command line of ``hapi-train``."""
    from hapi.train.settings import GROUPS

    p = OneLineParser(
        prog="hapi-train",
        description="Fine-tune a network: its frozen front runs on servers beside the data, the rest here.",
        epilog="Example: hapi-train --model resnet50 --bs 1024. "
        f"Each setting may also be in the environment: --micro-batch as {VARIABLES}MICRO_BATCH. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the training diverged, 130 interrupted.",
    )
    p.add_argument("--version", action="version", version=f"hapi {__version__}")
    p.add_argument(
        "experiment", nargs="?", help="YAML file with any of the settings below; flags win over it"
    )
    for title, group in GROUPS.items():
        add_flags(p, group, title)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-train``; returns the exit code."""
    return run_command("hapi-train", lambda: _run(_parsed(argv)), goes_on=True)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    with Leaving("hapi-train"):
        return parser().parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    from hapi.train.settings import TrainSettings

    loaded: Loaded[TrainSettings] = load(
        TrainSettings, args.experiment, overrides_of(args, TrainSettings), os.environ, VARIABLES
    )
    try:
        return _train(loaded, args.experiment)
    except HapiError as error:
        error.args = (loaded.as_given(str(error)),)
        raise


def _train(loaded: Loaded[TrainSettings], experiment: str | None) -> int:
    loaded = _with_report(loaded)
    settings, output = loaded.value, loaded.value.output
    session_settings = settings.session
    if session_settings.memory is None:  # with a bound, what is free is not the job's
        keep_freed_memory()
    with Leaving("hapi-train"):
        from hapi.client.session import Session
        from hapi.train.trainer import Trainer

    if session_settings.allow_model or is_factory(session_settings.model):
        search_here()
    check_together(loaded)
    check_files(loaded, experiment)
    tracer = Tracer(enabled=output.trace is not None, process="hapi-train")
    with Session.open(
        session_settings, tracer=tracer, optimizer_bytes=settings.training.optimizer_bytes
    ) as session:
        _announce(session, loaded)
        printer = ProgressPrinter(output.progress and sys.stderr.isatty(), session.planning)
        trainer = Trainer(session, settings.training, printer)
        try:
            report = trainer.run()
        except BaseException:
            _after_failure(trainer, tracer, loaded)
            raise
    failed = _write_outputs(output, tracer, report, min(_LAST_SECONDS, session_settings.patience))
    _summarise(report, trainer.trained_epochs)
    for line in failed:
        print(f"hapi-train: error: {loaded.as_given(line)}", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def _with_report(loaded: Loaded[TrainSettings]) -> Loaded[TrainSettings]:
    """The report goes into the folder of the model where no file is given for it."""
    settings = loaded.value
    if settings.training.output is None or settings.output.report is not None:
        return loaded
    report = str(Path(settings.training.output, "report.json"))
    return replace(loaded, value=replace(settings, output=replace(settings.output, report=report)))


_LAST_SECONDS = 15.0
"""Longest time of trying outputs again when a training has ended well, in seconds."""


def _write_outputs(
    settings: OutputSettings, tracer: Tracer, report: dict[str, Any], seconds: float
) -> list[str]:
    """Write each output, whatever becomes of the others; returns what failed, also after ``seconds`` of trying again.

    The report comes last and says it too.
    """
    report = {**report, "settings": {**report["settings"], **flat(settings)}}
    failed: list[str] = []
    deadline = time.monotonic() + seconds
    if settings.trace is not None:
        failed += _tried(lambda: tracer.write(str(settings.trace)), deadline)
    if settings.html is not None:
        from hapi.figures.html import write_html
        from hapi.figures.reading import Run

        failed += _tried(lambda: write_html(Run.from_json(report), str(settings.html)), deadline)
    if settings.report is not None:
        from hapi.train.report import write_report

        lost = [] if standard.current is None else standard.current.lost()
        said = {**report, "troubles": [*report["troubles"], *lost, *failed]}
        failed += _tried(lambda: write_report(str(settings.report), said), deadline)
    return failed


def _tried(write: Callable[[], None], deadline: float) -> list[str]:
    """Write, again and again until ``deadline``; the last error's line."""
    pause = 1.0
    while True:
        try:
            write()
            return []
        except HapiError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                return [str(error)]
            time.sleep(min(pause, left))
            pause *= 2


def _after_failure(trainer: Trainer, tracer: Tracer, loaded: Loaded[TrainSettings]) -> None:
    """Report and trace of what there was; the failure is what matters, so theirs are only told."""
    for line in _write_outputs(loaded.value.output, tracer, trainer.report(), 0.0):
        print(f"hapi-train: {loaded.as_given(line)}", file=sys.stderr)
    training = loaded.value.training
    if training.checkpoint_path and trainer.has_checkpoint:
        place = (
            f"--checkpoint {training.checkpoint}" if training.checkpoint else f"--output {training.output}"
        )
        print(f"go on with: --resume {place}", file=sys.stderr)


def check_together(loaded: Loaded[TrainSettings]) -> None:
    """Refuse settings that would have no effect beside the others."""
    session, training = loaded.value.session, loaded.value.training
    if training.checkpoint_path is None:
        if training.resume:
            raise UsageError("--resume needs --output DIR or --checkpoint FILE")
        for name in ("checkpoint_every", "keep"):
            if name in loaded.origins:
                raise UsageError(f"{flag_of(name)} needs --output DIR or --checkpoint FILE")
    if session.sample_cache is None and "sample_cache_size" in loaded.origins:
        raise UsageError("--sample-cache-size needs --sample-cache DIR")
    for epoch in session.profile_epoch:
        if epoch >= session.epochs and training.checkpoint_path is None:  # with one, more epochs may follow
            raise UsageError(
                f"--profile-epoch {epoch}: expected 0 to {session.epochs - 1}, the last epoch; give more --epochs"
            )


def check_files(loaded: Loaded[TrainSettings], experiment: str | None) -> None:
    """Check that output files can be written, now and not after hours of training, and make their folders.

    Each must differ from the others and from the files that are read.
    """
    from hapi.train.checkpoint_files import numbered

    session, training, output = loaded.value.session, loaded.value.training, loaded.value.output
    given = loaded.as_given
    check_outputs(
        (
            *((given("--output"), path) for path in _model_files(training)),
            (given("--report"), output.report),
            (given("--html"), output.html),
            (given("--trace"), output.trace),
            (given("--checkpoint" if training.checkpoint else "--output"), training.checkpoint_path),
            (given("--save-profile"), training.save_profile),
        ),
        (
            ("the experiment file", experiment),
            (given("--weights"), session.weights),
            (given("--profile"), session.profile),
            (given("--token-file"), session.token_file),
            (given("--ca-file"), session.ca_file),
        ),
    )
    checkpoint = training.checkpoint_path
    if checkpoint is not None and not training.resume:
        flag = "--checkpoint" if training.checkpoint else "--output"
        files = [numbered(checkpoint, n) for n in range(training.keep)]
        for path in (*files, *map(Path, _model_files(training))):
            if path.exists():
                raise UsageError(
                    f"{flag} {path}: exists; give --resume to go on with it, or remove it to begin anew"
                )


def _model_files(training: TrainingSettings) -> list[str]:
    from hapi.train.trainer import BEST_FILE, MODEL_FILE

    folder = training.output
    return [] if folder is None else [str(Path(folder, name)) for name in (MODEL_FILE, BEST_FILE)]


class ProgressPrinter(TrainingCallback):
    """A live bar on a terminal, and one line per epoch and per change of split everywhere."""

    def __init__(self, live: bool, planning: SplitController | None) -> None:
        self._live = live
        self._planning = planning
        self._reported = 0
        """Changes of split that were printed."""
        self._bar: Any = None
        self._started = 0.0

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Begin the epoch's bar."""
        if self._live:
            from tqdm import tqdm

            # A terminal that does not tell its width (0) would get no bar at all.
            unknown = shutil.get_terminal_size((80, 24)).columns == 80
            self._bar = tqdm(
                total=batches,
                initial=done,
                desc=f"epoch {epoch}",
                leave=False,
                ncols=80 if unknown else None,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}",
            )
            self._started = time.monotonic()

    def step_done(self, report: PassReport) -> None:
        """Show samples/s, wire MB/s and the share of time spent waiting."""
        if self._bar is None:
            return
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"{report.samples / seconds:.0f} samples/s, "
            f"{report.traffic.bytes_received / seconds / 1e6:.1f} MB/s, "
            f"stall {100 * report.stall_seconds / seconds:.0f}%",
            refresh=False,
        )
        self._bar.update()

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Print the epoch's line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        print(_epoch_line(entry), flush=True)
        if self._planning is None:
            return
        changes = self._planning.changes
        for change in changes[max(self._reported, self._planning.earlier_changes) :]:
            moved = (
                f"from {change.before} to {change.after}"
                if change.before != change.after
                else f"stays {change.after}"
            )
            print(f"split {moved} at epoch {change.epoch}, batch {change.batch}: {change.why}", flush=True)
        self._reported = len(changes)


def _epoch_line(entry: Mapping[str, Any]) -> str:
    seconds = max(entry["seconds"], 1e-9)
    line = (
        f"epoch {entry['epoch']:>3}  split {_splits(entry):>5}  {entry['seconds']:8.2f} s  "
        f"{entry['samples'] / seconds:7.0f} samples/s  wire {format_bytes(entry['bytes_received']):>10}  "
        f"{_cached(entry)}stall {100 * entry['stall_seconds'] / seconds:3.0f}%  loss {entry['loss']:.4f}  "
        f"accuracy {100 * entry['accuracy']:5.1f}%"
    )
    if "validation_loss" in entry:
        line += f"  validation {entry['validation_loss']:.4f} / {100 * entry['validation_accuracy']:.1f}%"
    return line


def _cached(entry: Mapping[str, Any]) -> str:
    """The part of the epoch's samples that came out of the sample cache, if any did."""
    cached = entry["cached_samples"]
    return f"cached {100 * cached / entry['samples']:3.0f}%  " if cached else ""


def _splits(entry: Mapping[str, Any]) -> str:
    """The splits of the epoch's batches, such as ``0/11``."""
    return "/".join(str(split) for split, _ in entry["splits"][:3]) or str(entry["split"])


def _announce(session: Session, loaded: Loaded[TrainSettings]) -> None:
    prepared, settings = session.prepared, session.settings
    model, description = prepared.model, prepared.description
    names = [layer.name for layer in model.layers]
    if prepared.strategy is None:
        at = (
            f"{session.split} ({names[session.split - 1]})"
            if session.split
            else "none (stored samples are sent)"
        )
    else:
        at = f"chosen by {prepared.strategy} after profiling"
    unasked = ""
    if settings.weights == "auto" and prepared.weights.startswith("random:"):
        unasked = " (pre-trained ones are not in reach; --weights FILE brings your own)"
    augmented = f", augmented by {','.join(settings.augment)}" if settings.augment else ""
    freeze = f"{prepared.freeze} ({names[prepared.freeze - 1]})" if prepared.freeze else "0 (nothing)"
    print(
        f"model {settings.model}, {len(names)} layers, weights {prepared.weights}{unasked}, "
        f"freeze {freeze}, split {at}\n"
        f"data  {description.reference.name}, {format_count(len(prepared.training_ids))} samples, "
        f"{len(description.classes)} classes, batch {settings.bs}, "
        f"input {'x'.join(map(str, model.input_shape))}{augmented}\n"
        f"via   {', '.join(prepared.urls)}{' (embedded)' if prepared.embedded else ''}, device {session.device}",
        flush=True,
    )
    order = prepared.order
    if order.trainers > 1 or order.shuffle.group:
        print(f"order {order.shuffle}, trainer {order.trainer} of {order.trainers}", flush=True)
    for warning in _warnings(session, loaded.value.training):
        print(f"note  {loaded.as_given(warning)}", flush=True)


def _warnings(session: Session, training: TrainingSettings) -> Iterator[str]:
    """Warnings about settings that work, but are hardly intended."""
    from hapi.train.checkpoint_files import existing

    settings, count = session.settings, len(session.prepared.training_ids)
    if settings.bs > count:
        yield f"--bs {settings.bs} is more than the {count} samples: every epoch is one batch of {count}"
    if settings.shuffle == "full" and session.prepared.description.prefers_chunks:
        yield _full_cost(session.prepared.description)
    if settings.sample_cache is not None and not session.caches:
        yield f"--sample-cache: has no use at split {session.split}, where features cross; it keeps stored samples"
    if training.resume and training.checkpoint and not existing(training.checkpoint):
        yield f"--resume: there is no {training.checkpoint} yet, so training begins anew"


def _full_cost(description: DatasetDescription) -> str:
    """The reads of an epoch in any order from a store that is slow to read single samples, and those of the default."""
    sample, chunks = description.total_bytes / description.count, -(-description.count // description.group)
    return (
        f"--shuffle full reads {format_count(description.count)} ranges of {format_bytes(sample)} an epoch from the "
        f"object store; without it there would be {format_count(chunks)} of "
        f"{format_bytes(description.total_bytes / chunks)} (over OpenStack Swift, 128 KiB samples come at 107 MB/s "
        "in chunks and at 7 MB/s one by one)"
    )


def _summarise(report: Mapping[str, Any], trained_epochs: int) -> None:
    epochs = report["epochs"]
    if not trained_epochs:
        print(f"nothing to do: the checkpoint has {len(epochs)} epochs already; give more --epochs")
        return
    received = sum(e["bytes_received"] for e in epochs)
    print(
        f"done in {report['seconds']:.1f} s: {format_bytes(received)} over the wire, "
        f"peak memory {format_bytes(report['peak_memory_bytes'])}, retries {report['retries']}, "
        f"final loss {epochs[-1]['loss']:.4f}, accuracy {100 * epochs[-1]['accuracy']:.1f}%"
    )
    if "recheck" in report:
        found = report["recheck"]
        print(
            f"recheck: {found['samples']} samples as computed here, but for {found['largest_difference']:.1g} of the "
            f"largest feature; servers left: {', '.join(found['left']) or 'none'}"
        )
    if report["settings"]["save_profile"] and "profile" not in report.get("plan", {}):
        print("note  --save-profile: training ended before the profile was whole, so none was written")


if __name__ == "__main__":
    sys.exit(main())
