"""``benchmarks``: measure, and print the figures with their conditions."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cli.bench_directory import configure_directory
from benchmarks.cli.bench_flags import known_models
from benchmarks.cli.bench_measured import MEASURED, configure_measured, run_measured
from benchmarks.cli.bench_samples import configure_samples
from benchmarks.cli.bench_shuffle import configure_shuffle
from benchmarks.cli.bench_study import STUDIES, configure_studies, run_study
from benchmarks.cli.bench_tenants import NAME as TENANTS
from benchmarks.cli.bench_tenants import configure_tenants, run_tenants
from hapi.cli.shared.numbers import DAY, count, rate, seconds, size
from hapi.errors import UsageError
from hapi.paths import check_outputs
from hapi.units import parse_bandwidth

_SAMPLES, _BATCH, _EPOCHS = count(1, 1 << 24), count(1, 1 << 20), count(1, 10_000)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options to ``parser``."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for add in (
        _add_wire,
        _add_overlap,
        _add_gpu,
        _add_memory,
        _add_steps,
        _add_plan,
        _add_overload,
        _add_siege,
        configure_shuffle,
        configure_samples,
    ):
        add(benchmarks).add_argument("--json", metavar="FILE", help="also write the figures there")
    configure_studies(benchmarks)
    configure_measured(benchmarks)
    configure_tenants(benchmarks)
    configure_directory(benchmarks)


def _add_wire(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "wire", help="GB/s of features from server to client, beside a plain socket"
    )
    parser.add_argument(
        "--body",
        type=size(1 << 20, 1 << 32),
        default="64MiB",
        metavar="SIZE",
        help="bytes per transfer (default 64MiB)",
    )
    parser.add_argument(
        "--rounds", type=count(1, 10_000), default="15", metavar="N", help="transfers each way (default 15)"
    )
    parser.set_defaults(measure=_wire)
    return parser


def _add_overlap(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "overlap", help="epoch seconds over the slowest of server, network and client (needs root)"
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="may be repeated (default resnet18, alexnet)"
    )
    parser.add_argument(
        "--bandwidth",
        type=rate(),
        action="append",
        metavar="RATE",
        help="may be repeated (default 8Mbps, 20Mbps, 100Mbps)",
    )
    parser.add_argument(
        "--samples", type=_SAMPLES, default="1024", metavar="N", help="samples of an epoch (default 1024)"
    )
    parser.add_argument(
        "--bs", type=_BATCH, default="32", metavar="N", help="training batch size (default 32)"
    )
    parser.add_argument(
        "--epochs", type=_EPOCHS, default="3", metavar="N", help="measured epochs each (default 3)"
    )
    parser.add_argument("--split", default="freeze", help="as for hapi-train (default freeze)")
    parser.set_defaults(measure=_overlap)
    return parser


def _add_gpu(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "gpu", help="samples/s of frozen fronts and rests on a GPU, beside its copies and the wire"
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="one of the paper's; may be repeated"
    )
    parser.add_argument(
        "--seconds",
        type=count(1, 86_400),
        default="60",
        metavar="N",
        help="about how long to measure (default 60)",
    )
    parser.add_argument(
        "--image-size",
        type=count(32, 512),
        default="224",
        metavar="N",
        help="side of the inputs (default 224)",
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for comparison (default cuda)")
    parser.set_defaults(measure=_gpu)
    return parser


def _add_memory(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "memory", help="predicted against observed memory of the client's part, on a CPU (Linux)"
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="may be repeated (default: the paper's 7)"
    )
    parser.add_argument(
        "--bs", type=_BATCH, action="append", metavar="N", help="may be repeated (default 16, 64, 256)"
    )
    parser.add_argument(
        "--image-size", type=count(1, 1024), default="64", metavar="N", help="side of the inputs (default 64)"
    )
    parser.set_defaults(measure=_memory)
    return parser


def _add_steps(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "steps", help="a link that changes under a run, beside runs that knew its bandwidth (needs root)"
    )
    parser.add_argument("--model", default="resnet18", metavar="NAME", help="(default resnet18)")
    parser.add_argument(
        "--bandwidth",
        type=rate(),
        action="append",
        metavar="RATE",
        help="of one stretch after the other (default 100Mbps, 10Mbps, 100Mbps)",
    )
    parser.add_argument(
        "--epochs", type=_EPOCHS, default="4", metavar="N", help="of each stretch (default 4)"
    )
    parser.add_argument(
        "--samples", type=_SAMPLES, default="640", metavar="N", help="samples of an epoch (default 640)"
    )
    parser.add_argument(
        "--bs", type=_BATCH, default="64", metavar="N", help="training batch size (default 64)"
    )
    parser.add_argument(
        "--repeats",
        type=count(1, 1000),
        default="3",
        metavar="N",
        help="times that all is measured (default 3)",
    )
    parser.set_defaults(measure=_steps)
    return parser


def _add_plan(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "plan", help="seconds until hapi plan answers, for torchvision's models"
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="may be repeated (default: torchvision's, all 80)"
    )
    parser.set_defaults(measure=_plan)
    return parser


def _add_overload(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "overload", help="what a server does that is asked for ten times what it can (two cores, Linux)"
    )
    parser.add_argument("--quick", action="store_true", help="a minute and a half instead of six")
    parser.add_argument(
        "--seconds", type=seconds(1, DAY), metavar="TIME", help="of each of the two overloads (default 120)"
    )
    parser.add_argument("--clients", type=count(1, 1000), default="50", metavar="N", help="(default 50)")
    parser.add_argument("--model", default="resnet18", metavar="NAME", help="(default resnet18)")
    parser.add_argument(
        "--request-size", type=count(1, 65_536), default="32", metavar="N", help="samples (default 32)"
    )
    parser.set_defaults(measure=_overload)
    return parser


def _add_siege(benchmarks: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "siege",
        help="floods, hung reads, kills, full disks and more beside three training jobs (two cores, Linux)",
    )
    parser.add_argument(
        "--seconds", type=seconds(1, DAY), default=600.0, metavar="TIME", help="of the siege (default 600)"
    )
    parser.set_defaults(measure=_siege)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and print its table and conditions; returns the exit code.

    What it is to write can be written, or it is told before anything is measured.
    """
    outputs = [(f"--{name}", getattr(args, name, None)) for name in ("json", "csv", "figure")]
    check_outputs(outputs, [("--results", getattr(args, "results", None))])
    if args.benchmark in STUDIES:
        return run_study(args)
    if args.benchmark in MEASURED:
        return run_measured(args)
    if args.benchmark == TENANTS:
        return run_tenants(args)
    from benchmarks.testbed.conditions import condition_lines, write_json

    result = args.measure(args)
    print("\n".join([*result.table(), "", *condition_lines(result.conditions)]))
    if args.json:
        write_json(args.json, result.to_json())
    return 0


def _wire(args: argparse.Namespace) -> Any:
    from benchmarks.serving.wire import measure_wire

    return measure_wire(args.body, args.rounds)


def _overlap(args: argparse.Namespace) -> Any:
    from benchmarks.split.overlap import BANDWIDTHS, MODELS, OverlapSettings, measure_overlap

    settings = OverlapSettings(
        models=known_models(args.model or MODELS),
        bandwidths=tuple(args.bandwidth or map(parse_bandwidth, BANDWIDTHS)),
        samples=args.samples,
        batch=args.bs,
        epochs=args.epochs,
        split=args.split,
    )
    return measure_overlap(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _gpu(args: argparse.Namespace) -> Any:
    from benchmarks.serving.gpu import MODELS, GpuSettings, measure_gpu

    unknown = [m for m in args.model or () if m not in MODELS]
    if unknown:
        raise UsageError(f"--model {unknown[0]}: expected one of {', '.join(MODELS)}")
    if args.image_size % 32:
        raise UsageError("--image-size: expected a multiple of 32 from 32 to 512")
    settings = GpuSettings(
        models=tuple(args.model or MODELS),
        image_size=args.image_size,
        seconds=args.seconds,
        device=args.device,
    )
    return measure_gpu(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _memory(args: argparse.Namespace) -> Any:
    from benchmarks.serving.memory import BATCHES, MODELS, MemorySettings, measure_memory

    settings = MemorySettings(
        models=known_models(args.model or MODELS),
        batches=tuple(args.bs) if args.bs else BATCHES,
        image_size=args.image_size,
    )
    results = Path(args.json) if args.json else None
    return measure_memory(settings, results, lambda line: print(line, file=sys.stderr, flush=True))


def _steps(args: argparse.Namespace) -> Any:
    from benchmarks.split.steps import StepsSettings, measure_steps

    settings = StepsSettings(
        model=known_models([args.model])[0],
        epochs=args.epochs,
        samples=args.samples,
        batch=args.bs,
        repeats=args.repeats,
    )
    if args.bandwidth:
        settings = replace(settings, bandwidths=tuple(args.bandwidth))
    return measure_steps(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _overload(args: argparse.Namespace) -> Any:
    from benchmarks.load.overload import QUICK, OverloadSettings, measure_overload

    settings = replace(
        QUICK if args.quick else OverloadSettings(),
        clients=args.clients,
        model=known_models([args.model])[0],
        request_size=args.request_size,
    )
    if args.seconds is not None:
        settings = replace(settings, seconds=args.seconds)
    return measure_overload(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _siege(args: argparse.Namespace) -> Any:
    from benchmarks.load.siege import SiegeSettings, measure_siege

    settings = SiegeSettings(seconds=args.seconds)
    return measure_siege(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _plan(args: argparse.Namespace) -> Any:
    from benchmarks.split.plan_seconds import measure_plan
    from hapi.models.zoo.architectures import torchvision_names

    models = known_models(args.model) if args.model else torchvision_names()
    return measure_plan(models, lambda line: print(line, file=sys.stderr, flush=True))
