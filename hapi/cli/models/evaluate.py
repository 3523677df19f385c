"""``hapi evaluate MODEL --dataset STORE/NAME``: how good a fine-tuned network is."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict

from hapi.api.inference import Evaluation, evaluate, score
from hapi.api.model_files import LoadedModel, load_model
from hapi.api.served import open_served
from hapi.cli.models.origin import configure_model, source_of
from hapi.cli.models.predict import configure_running, open_model
from hapi.cli.shared.common import EXIT_OK, say, tell
from hapi.cli.shared.progress import TransferBar
from hapi.client.settings import SessionSettings
from hapi.data.mount import open_dataset
from hapi.factories import search_here
from hapi.paths import check_outputs, write_whole
from hapi.text import counted
from hapi.train.objective.names import METRICS, metrics_text
from hapi.train.report import finite


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    configure_model(parser)
    parser.add_argument(
        "--dataset", required=True, metavar="STORE/NAME",
        help="labelled samples of the model's classes; with --server or --store its NAME there: then the frozen layers "
        "run beside the store, as in training",
    )  # fmt: skip
    parser.add_argument(
        "--metric", action="append", default=[], choices=tuple(METRICS), metavar="NAME",
        help=f"metric to measure; may be repeated ({', '.join(METRICS)}; default: those that suit the labels)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there too, with confusion matrix and worst samples"
    )
    configure_running(parser)


def run(args: argparse.Namespace) -> int:
    """Print loss, metrics, and the accuracy of each class."""
    check_outputs((("--json", args.json),), (("MODEL", args.model),))
    model, found = _evaluated_by_servers(args) if args.server or args.store else _evaluated_locally(args)
    if args.json is not None:
        document = {**asdict(found), **found.metrics, "classes": list(model.classes), "dataset": args.dataset}
        write_whole(args.json, json.dumps(finite(document), indent=2, allow_nan=False) + "\n", "--json")
    _print(found, model.classes)
    return EXIT_OK


def _evaluated_locally(args: argparse.Namespace) -> tuple[LoadedModel, Evaluation]:
    model = open_model(args)
    with closing(open_dataset(args.dataset)) as dataset, TransferBar("evaluating", args.quiet) as bar:
        bar.start(dataset.count)
        return model, evaluate(
            model, dataset, args.batch_size, lambda samples: bar.advance(samples, 0), args.metric
        )


def _evaluated_by_servers(args: argparse.Namespace) -> tuple[LoadedModel, Evaluation]:
    """With the frozen layers on the servers; a line on stderr when they have to run here after all."""
    settings = SessionSettings(
        server=tuple(args.server),
        store=args.store,
        token_file=args.token_file,
        ca_file=args.ca_file,
        dataset=args.dataset,
        bs=args.batch_size,
        device=args.device,
    )
    search_here()
    model = load_model(args.model, source=source_of(args), best=args.best, allow_import=args.allow_model)
    with open_served(model, settings) as served, TransferBar("evaluating", args.quiet) as bar:
        if served.note is not None:
            tell("hapi evaluate", f"note: {served.note}")
        bar.start(served.facts.count)
        return model, score(
            model, served.facts, served.outputs(), lambda samples: bar.advance(samples, 0), args.metric
        )


def _print(found: Evaluation, classes: tuple[str, ...]) -> None:
    say(f"{counted(found.samples, 'sample')}: {metrics_text({'loss': found.loss, **found.metrics})}")
    if len(classes) > _MOST_CLASSES or not found.class_samples:
        return
    for name, samples, accuracy in zip(classes, found.class_samples, found.class_accuracy, strict=True):
        say(f"  {name}: {'no samples' if accuracy is None else f'{100 * accuracy:.1f}% of {samples}'}")


_MOST_CLASSES = 100
"""Classes that are printed one by one; more are in the file of --json."""
