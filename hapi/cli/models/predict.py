"""``hapi predict MODEL SOURCE``: classes for images, or for the samples of a dataset."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from hapi.api.inference import Outputs, image_files, predict_dataset, predict_images
from hapi.api.model_files import LoadedModel, load_model
from hapi.cli.models.origin import configure_model, configure_source, source_of
from hapi.cli.models.prediction_rows import PredictionRows
from hapi.cli.shared.common import EXIT_OK, say
from hapi.cli.shared.numbers import count
from hapi.cli.shared.progress import TransferBar
from hapi.data.mount import open_dataset
from hapi.errors import UsageError
from hapi.factories import search_here
from hapi.models.devices import resolve_device
from hapi.paths import check_outputs, user_path, write_whole


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    configure_model(parser)
    parser.add_argument(
        "source", metavar="SOURCE", help="an image, a folder of images, or a dataset as STORE/NAME"
    )
    parser.add_argument(
        "--top", type=count(1, 1_000_000), default=5, metavar="N",
        help="classes to name for each image (default 5)",
    )  # fmt: skip
    parser.add_argument(
        "--csv", metavar="FILE", help="write the classes of every image there, and print a summary"
    )
    configure_running(parser)


def configure_running(parser: argparse.ArgumentParser) -> None:
    """Declare what commands that run a model file have in common."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    parser.add_argument(
        "--batch-size", type=count(1, 1_000_000), default=32, metavar="N",
        help="images that go through the network at once (default 32)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    configure_source(parser)


def open_model(args: argparse.Namespace) -> LoadedModel:
    """The model file that the arguments name, on their device."""
    search_here()
    device = resolve_device(args.device, "--device")
    model = load_model(args.model, source=source_of(args), best=args.best)
    model.module.to(device)
    return model


def run(args: argparse.Namespace) -> int:
    """A line for each image, or a file of them."""
    check_outputs((("--csv", args.csv),), (("MODEL", args.model), ("SOURCE", args.source)))
    model = open_model(args)
    place = user_path(args.source, "SOURCE")
    if place.exists():
        files = image_files(place) if place.is_dir() else [place]
        return _report(args, model, predict_images(model, files, args.batch_size), len(files))
    if "/" not in args.source:
        raise UsageError(
            f"{args.source}: there is no such image or folder; a dataset's address has the form STORE/NAME"
        )
    with closing(open_dataset(args.source)) as dataset:
        return _report(args, model, predict_dataset(model, dataset, args.batch_size), dataset.count)


def _report(args: argparse.Namespace, model: LoadedModel, batches: Iterator[Outputs], total: int) -> int:
    rows = PredictionRows(model.classes, model.card.label_kind, args.top)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["sample", "label", *rows.header])
    with TransferBar(f"predicting with {Path(args.model).name}", args.quiet or args.csv is None) as bar:
        bar.start(total)
        for outputs in batches:
            for name, label, found in rows.of(outputs):
                if args.csv is None:
                    say("  ".join([name, *rows.words(found)]))
                table.writerow([name, label, *rows.cells(found)])
            bar.advance(len(outputs.names), 0)
    if args.csv is not None:
        write_whole(args.csv, text.getvalue(), "--csv")
        say(f"{total} predictions in {args.csv}")
    if rows.labelled:
        say(f"{rows.right} of {rows.labelled} as labelled ({100 * rows.right / rows.labelled:.1f}%)")
    return EXIT_OK
