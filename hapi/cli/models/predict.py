"""``hapi predict MODEL SOURCE``: classes or numbers for images, or for the samples of a dataset."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from hapi.api.inference import Outputs, image_files, predict_dataset, predict_images, same_classes
from hapi.api.model_files import LoadedModel, load_model
from hapi.cli.models.origin import configure_model, configure_source, source_of
from hapi.cli.models.predicted import predicted_of
from hapi.cli.shared.common import EXIT_OK, say, tell
from hapi.cli.shared.numbers import count, real
from hapi.cli.shared.progress import TransferBar
from hapi.data.mount import DatasetReader, open_dataset
from hapi.errors import DataError, UsageError
from hapi.factories import search_here
from hapi.models.devices import resolve_device
from hapi.paths import check_outputs, user_path, write_whole
from hapi.wire.labels import LabelForm


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    configure_model(parser)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="+", help="images and folders of images, or a dataset as STORE/NAME"
    )
    parser.add_argument(
        "--top", type=count(1, 1_000_000), metavar="N",
        help="classes to name for each image (default: 5; of a network for several labels all above --threshold)",
    )  # fmt: skip
    parser.add_argument(
        "--threshold", type=real(0, 1), metavar="P",
        help="probability above which one of several labels applies (default 0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--csv", metavar="FILE", help="write the classes or numbers of every image there, and print a summary"
    )
    parser.add_argument(
        "--skip-bad", action="store_true",
        help="end with 0 although images cannot be read; they are left out and named anyway, else with 1",
    )  # fmt: skip
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
    model = load_model(args.model, source=source_of(args), best=args.best, allow_import=args.allow_model)
    model.module.to(device)
    return model


def run(args: argparse.Namespace) -> int:
    """A line for each image, or a file of them."""
    inputs = [("SOURCE", source) for source in args.source]
    check_outputs((("--csv", args.csv),), (("MODEL", args.model), *inputs))
    places = [user_path(source, "SOURCE") for source in args.source]
    absent = [source for source, place in zip(args.source, places, strict=True) if not place.exists()]
    if absent and (len(places) > 1 or "/" not in absent[0]):
        one = "; only one dataset can be given" if "/" in absent[0] else ""
        raise UsageError(
            f"{absent[0]}: there is no such image or folder; a dataset's address has the form STORE/NAME{one}"
        )
    model = open_model(args)
    if not absent:
        files = [file for p in places for file in (image_files(p) if p.is_dir() else [p])]
        return _report_files(args, model, files)
    with closing(open_dataset(absent[0])) as dataset:
        outputs = predict_dataset(model, dataset, args.batch_size)
        return _report(args, model, outputs, dataset.count, _comparable(model, dataset))


def _report_files(args: argparse.Namespace, model: LoadedModel, files: Sequence[Path]) -> int:
    """Print or write what is predicted for ``files``, and name those that cannot be read."""
    if len(files) == 1:
        return _report(args, model, predict_images(model, files, args.batch_size), 1)
    bad: list[str] = []
    code = _report(args, model, predict_images(model, files, args.batch_size, bad.append), len(files))
    for line in bad:
        tell("hapi predict", f"left out: {line}")
    if not bad or (args.skip_bad and len(bad) < len(files)):
        return code
    remedy = "" if args.skip_bad else ", or pass --skip-bad to end with 0 without them"
    raise DataError(f"{len(bad)} of {len(files)} images cannot be read; repair or remove them{remedy}")


def _report(
    args: argparse.Namespace,
    model: LoadedModel,
    batches: Iterator[Outputs],
    total: int,
    form: LabelForm | None = None,
) -> int:
    """Print or write what is predicted; ``form`` is that of a dataset's labels which the model's outputs mean."""
    kind = model.card.label_kind
    if args.threshold is not None and kind != "multi":
        raise UsageError(
            f"--threshold is for a network with several labels for a sample; this one has {kind} labels"
        )
    threshold = 0.5 if args.threshold is None else args.threshold
    predicted = predicted_of(kind, model.classes, top=args.top, threshold=threshold)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["sample", "label", *predicted.columns])
    written = 0
    with TransferBar(f"predicting with {Path(args.model).name}", args.quiet or args.csv is None) as bar:
        bar.start(total)
        for names, labels, outputs in batches:
            for row, (name, (line, cells)) in enumerate(zip(names, predicted.rows(outputs), strict=True)):
                if args.csv is None:
                    say(f"{name}  {line}")
                rows.writerow([name, "" if form is None else predicted.label(labels, row), *cells])
            if form is not None:
                predicted.compare(outputs, labels)
            written += len(names)
            bar.advance(len(names), 0)
    if args.csv is not None:
        write_whole(args.csv, text.getvalue(), "--csv")
        say(f"{written} predictions in {args.csv}")
    if predicted.labelled:
        say(predicted.summary())
    return EXIT_OK


def _comparable(model: LoadedModel, dataset: DatasetReader) -> LabelForm | None:
    """The form of a dataset's labels if they are the model's; None, with a line that says so, if they are others."""
    form, own, others = dataset.dataset.label_form, model.classes, dataset.dataset.classes
    if form.kind == model.card.label_kind and same_classes(own, others, whole=form.kind != "single"):
        return form
    tell("hapi predict", "the dataset's labels are of other classes than the model's, and not compared")
    return None
