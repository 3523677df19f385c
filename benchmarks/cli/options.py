"""The options that benchmarks have: each that several of them take is declared here, once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from hapi.cli.shared.numbers import Number, count, rate

Option = Callable[[argparse.ArgumentParser], object]
"""Adds itself to a parser."""


def option(flag: str, text: str, **keywords: Any) -> Option:
    """An option with ``text`` for its help; ``keywords`` as of ``ArgumentParser.add_argument``."""
    return lambda parser: parser.add_argument(flag, help=text, **keywords)


def switch(flag: str, text: str) -> Option:
    """An option without a value."""
    return option(flag, text, action="store_true")


def number(flag: str, kind: Number, text: str, default: str | None = None, metavar: str = "N") -> Option:
    """A number of ``kind``; ``default`` is said in the help, too."""
    help_text = text if default is None else f"{text} (default {default})".lstrip()
    return option(flag, help_text, type=kind, default=default, metavar=metavar)


def repeated(flag: str, text: str, kind: Number | None = None, metavar: str = "N") -> Option:
    """An option that may be given several times; its value is a list, or None."""
    return option(flag, text, action="append", type=kind, metavar=metavar)


def model(default: str) -> Option:
    """``--model``: the one that is measured."""
    return option("--model", f"(default {default})", default=default, metavar="NAME")


def models(text: str = "may be repeated (default all 7)") -> Option:
    """``--model``, several times."""
    return repeated("--model", text, metavar="NAME")


def bandwidths(text: str) -> Option:
    """``--bandwidth``, several times; bits per second."""
    return repeated("--bandwidth", text, rate(), "RATE")


def samples(default: str | None, text: str = "samples of an epoch", high: int = 1 << 24) -> Option:
    """``--samples``: how many."""
    return number("--samples", count(1, high), text, default)


def batch(default: str, text: str = "training batch size", high: int = 1 << 20) -> Option:
    """``--bs``: samples of a batch."""
    return number("--bs", count(1, high), text, default)


def batches(text: str) -> Option:
    """``--bs``, several times."""
    return repeated("--bs", text, count(1, 1 << 20))


def epochs(default: str, text: str) -> Option:
    """``--epochs``: how many."""
    return number("--epochs", count(1, 10_000), text, default)


def request_size(default: str, high: int = 1 << 20) -> Option:
    """``--request-size``: samples of a request."""
    return number("--request-size", count(1, high), "samples", default)


def image_size(default: str = "64", low: int = 64, high: int = 512) -> Option:
    """``--image-size``: the side of the inputs in pixels."""
    return number("--image-size", count(low, high), "side of the inputs", default)


def results(path: str, text: str = "goes on where it was") -> Option:
    """``--results``: the file of records."""
    return option("--results", f"{text} (default {path})", default=path, metavar="FILE")


BANDWIDTH = number("--bandwidth", rate(), "of the link", metavar="RATE")
DEVICE = option("--device", "of both tiers: auto, cpu, cuda (default cpu)", default="cpu")
FOLDER = option("--folder", "on the disk to be measured (default: the temporary folder)", metavar="FOLDER")
JSON = option("--json", "also write the figures and conditions there", metavar="FILE")
CSV = option("--csv", "also write the figures as a table", metavar="FILE")
FIGURE = option("--figure", "also draw it (.png, .svg or .pdf)", metavar="FILE")
NO_BED = switch(
    "--no-bed", "no network namespaces, also where they could be made: the client limits the rate"
)


def known_models(names: Sequence[str]) -> tuple[str, ...]:
    """``names``, each once; ``ModelChoiceError`` for one that is no architecture's, before anything is started."""
    from hapi.models.zoo.architectures import find_architecture

    for name in names:
        find_architecture(name, (3, 224, 224))
    return tuple(dict.fromkeys(names))
