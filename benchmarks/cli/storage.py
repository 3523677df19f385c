"""The benchmarks of ``benchmarks/storage``: a sample directory, stored samples, shuffling."""

from __future__ import annotations

import argparse
import tempfile

from benchmarks.cli.benchmark import Benchmark, Outcome, outcome_of, tell
from benchmarks.cli.options import FOLDER, batch, epochs, number, option, repeated, samples, switch
from hapi.cli.shared.numbers import DAY, Number, count, seconds, size
from hapi.errors import UsageError
from hapi.units import parse_bytes


def _sample_bytes(text: str) -> int:
    """Bytes of a sample; 0 for the mix."""
    if text == "mix":
        return 0
    size = parse_bytes(text)
    if size < 16:
        raise ValueError(text)
    return size


_SIZE = Number(_sample_bytes, 0, 1 << 26, "16 to 64MiB, or 'mix'")


def _directory(args: argparse.Namespace) -> Outcome:
    from benchmarks.storage.directory import DirectorySettings, measure_directory

    settings = DirectorySettings(
        samples=args.samples,
        sample_bytes=args.sample_size,
        processes=args.processes,
        folder=args.folder,
    )
    return outcome_of(measure_directory(settings, tell))


def _samples(args: argparse.Namespace) -> Outcome:
    from benchmarks.storage.samples import SIZES, SamplesSettings, measure_samples
    from benchmarks.storage.samples_over import OverSettings, measure_over

    total, longest, rounds = (32 << 20, 0.5, 1) if args.quick else (256 << 20, 2.0, 3)
    settings = SamplesSettings(
        sizes=tuple(args.size) if args.size else SIZES,
        total=args.total or total,
        seconds=args.seconds or longest,
        rounds=args.rounds or rounds,
        batch=args.bs,
        folder=args.folder,
    )
    try:
        if args.over:
            return outcome_of(measure_over(OverSettings(over=args.over, **vars(settings)), tell))
        return outcome_of(measure_samples(settings, tell))
    except OSError as error:
        where = args.folder or tempfile.gettempdir()
        raise UsageError(f"{where}: {error.strerror or error}; --folder names another place") from error


def _shuffle(args: argparse.Namespace) -> Outcome:
    from benchmarks.storage.shuffle import ShuffleSettings, measure_shuffle
    from benchmarks.storage.shuffle_accuracy import AccuracySettings

    accuracy = AccuracySettings(seeds=args.seeds, epochs=args.epochs)
    settings = ShuffleSettings(
        samples=args.samples,
        group=args.group,
        windows=tuple(args.window or ShuffleSettings().windows),
        batch=args.bs,
        accuracy=None if args.no_accuracy else accuracy,
    )
    return outcome_of(measure_shuffle(settings, tell))


BENCHMARKS = (
    Benchmark(
        name="directory",
        help="bytes a sample, load time, look-up time and memory of a sample directory (DLFS, section III-B)",
        options=(
            samples("10M", "of the directory; 50M makes a file of 1.6 GB", 1 << 30),
            number("--sample-size", size(1, 1 << 30), "mean bytes of a sample", "110kB", "SIZE"),
            number("--processes", count(1, 100), "that open it, each once cold", "3"),
            FOLDER,
        ),
        run=_directory,
    ),
    Benchmark(
        name="samples",
        help="samples/s from a disk by size, beside a file for each, raw reads and other loaders (Linux)",
        options=(
            repeated("--size", "of a sample, or 'mix'; may be repeated (default: six)", _SIZE, "SIZE"),
            number("--total", size(1 << 20, 1 << 36), "bytes of each dataset (default 256MiB)", metavar="SIZE"),
            number("--seconds", seconds(1e-3, DAY), "longest time of each figure (default 2s)", metavar="TIME"),
            batch("256", "samples of a batch", 1 << 16),
            option(
                "--over",
                "through hapi-server, or from an OpenStack Swift on loopback, beside plain downloads of large ranges",
                choices=("http", "swift"),
            ),
            number("--rounds", count(1, 100), "turns of each reader (default 3)"),
            FOLDER,
            switch("--quick", "32MiB, one round and half a second each, to try it out"),
        ),
        run=_samples,
    ),
    Benchmark(
        name="shuffle",
        help="shuffle quality and accuracy of chunk windows, beside full permutation and py1e",
        options=(
            samples("1000000", "of an epoch", 100_000_000),
            number("--group", count(1, 1 << 20), "samples of a chunk", "512"),
            batch("256", "samples of a batch"),
            number("--seeds", count(1, 1000), "trainings of each order", "5"),
            epochs("20", "of each training"),
            repeated("--window", "chunks open; may be repeated (default 1 to 1024)", count(1, 1 << 20)),
            switch("--no-accuracy", "measure the quality only"),
        ),
        run=_shuffle,
    ),
)  # fmt: skip
