"""``hapi-train``: fine-tune a network on a data set beside a store."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hapi import __version__
from hapi.cli.common import read_token, run_command
from hapi.config import Loaded, add_flags, load, overrides_of
from hapi.trace import Tracer
from hapi.units import format_bytes, format_count

if TYPE_CHECKING:
    from hapi.client.session import PassReport, Session
    from hapi.client.settings import TrainSettings


def parser() -> argparse.ArgumentParser:
    """The command line of ``hapi-train``."""
    from hapi.client.settings import TrainSettings

    p = argparse.ArgumentParser(
        prog="hapi-train",
        description="Fine-tune a network: its frozen front runs on servers beside the data, the rest here.",
        epilog="Example: hapi-train --model resnet50 --bs 1024",
    )
    p.add_argument("--version", action="version", version=f"hapi {__version__}")
    p.add_argument(
        "experiment", nargs="?", help="YAML file with any of the settings below; flags win over it"
    )
    add_flags(p, TrainSettings, "settings")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-train``; returns the exit code."""
    args = parser().parse_args(argv)
    return run_command("hapi-train", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from hapi.client.settings import TrainSettings

    loaded: Loaded[TrainSettings] = load(
        TrainSettings, args.experiment, overrides_of(args, TrainSettings), os.environ
    )
    settings = loaded.value
    from hapi.client.report import write_report
    from hapi.client.session import Session
    from hapi.client.trainer import Trainer

    check_outputs(settings)
    tracer = Tracer(enabled=settings.trace is not None, process="hapi-train")
    trainer = None
    with Session.open(settings, token=read_token(settings.token_file), tracer=tracer) as session:
        _announce(session)
        try:
            trainer = Trainer(session, ProgressPrinter(settings.progress and sys.stderr.isatty()))
            trainer.run()
        except KeyboardInterrupt:
            if settings.checkpoint:
                print(
                    f"interrupted; go on with: --resume --checkpoint {settings.checkpoint}", file=sys.stderr
                )
            raise
        finally:
            if settings.trace is not None:
                tracer.write(settings.trace)
            if settings.report is not None and trainer is not None:
                write_report(settings.report, trainer.report())
        _summarise(trainer.report())
    return 0


def check_outputs(settings: TrainSettings) -> None:
    """Files that will be written can be: found out now, not after hours of training."""
    from hapi.errors import UsageError

    for flag, path in (
        ("--report", settings.report),
        ("--trace", settings.trace),
        ("--checkpoint", settings.checkpoint),
    ):
        if path is None:
            continue
        folder = Path(path).absolute().parent
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        if Path(path).is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UsageError(f"{flag} {path}: is a folder, or cannot be written there")
    if settings.resume and settings.checkpoint is None:
        raise UsageError("--resume needs --checkpoint FILE")


class ProgressPrinter:
    """A live bar on a terminal, and one line per epoch everywhere."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._bar: Any = None

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Begin the epoch's bar."""
        if self._live:
            from tqdm import tqdm

            self._bar = tqdm(total=batches, initial=done, unit="batch", desc=f"epoch {epoch}", leave=False)

    def step_done(self, report: PassReport) -> None:
        """Show samples/s, wire MB/s and the share of time spent waiting."""
        if self._bar is None:
            return
        seconds = max(report.seconds, 1e-9)
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


def _epoch_line(entry: Mapping[str, Any]) -> str:
    seconds = max(entry["seconds"], 1e-9)
    line = (
        f"epoch {entry['epoch']:>3}  split {entry['split']:>3}  {entry['seconds']:8.2f} s  "
        f"{entry['samples'] / seconds:7.0f} samples/s  wire {format_bytes(entry['bytes_received']):>10}  "
        f"stall {100 * entry['stall_seconds'] / seconds:3.0f}%  loss {entry['loss']:.4f}  "
        f"accuracy {100 * entry['accuracy']:5.1f}%"
    )
    if "validation_loss" in entry:
        line += f"  validation {entry['validation_loss']:.4f} / {100 * entry['validation_accuracy']:.1f}%"
    return line


def _announce(session: Session) -> None:
    prepared, settings = session.prepared, session.settings
    model, job, description = prepared.model, prepared.job, prepared.description
    names = [layer.name for layer in model.layers]
    at = f"{job.split} ({job.split_name})" if job.split else "none (stored samples are sent)"
    unasked = ""
    if settings.weights == "auto" and prepared.weights.startswith("random:"):
        unasked = " (pre-trained ones are not in reach; --weights FILE brings your own)"
    freeze = f"{prepared.freeze} ({names[prepared.freeze - 1]})" if prepared.freeze else "0 (nothing)"
    print(
        f"model {settings.model}, {len(names)} layers, weights {prepared.weights}{unasked}, "
        f"freeze {freeze}, split {at}\n"
        f"data  {description.reference.name}, {format_count(len(prepared.training_ids))} samples, "
        f"{len(description.classes)} classes, batch {settings.bs}, input {'x'.join(map(str, model.input_shape))}\n"
        f"via   {', '.join(prepared.urls)}{' (embedded)' if prepared.embedded else ''}, device {session.device}",
        flush=True,
    )


def _summarise(report: Mapping[str, Any]) -> None:
    epochs = report["epochs"]
    if not epochs:
        print("nothing to do: the checkpoint is at the last epoch already")
        return
    received = sum(e["bytes_received"] for e in epochs)
    print(
        f"done in {report['seconds']:.1f} s: {format_bytes(received)} over the wire, "
        f"peak memory {format_bytes(report['peak_memory_bytes'])}, retries {report['retries']}, "
        f"final loss {epochs[-1]['loss']:.4f}, accuracy {100 * epochs[-1]['accuracy']:.1f}%"
    )


if __name__ == "__main__":
    sys.exit(main())
