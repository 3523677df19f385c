"""Flags that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_folder(parser: argparse.ArgumentParser) -> None:
    """``--folder``: where temporary files are made."""
    parser.add_argument(
        "--folder", metavar="FOLDER", help="on the disk to be measured (default: the temporary folder)"
    )


def known_models(names: Sequence[str]) -> tuple[str, ...]:
    """``names``, each once; ``ModelChoiceError`` for one that is no architecture's, before anything is started."""
    from hapi.models.zoo.architectures import find_architecture

    for name in names:
        find_architecture(name, (3, 224, 224))
    return tuple(dict.fromkeys(names))
