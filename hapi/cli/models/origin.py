"""Flags for the network that a command takes: a model file, or a checkpoint and where its frozen layers are."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hapi.api.model_files import FrozenSource


def configure_model(parser: argparse.ArgumentParser) -> None:
    """Declare the network, by position."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model file, such as runs/flowers/model.safetensors, or a checkpoint of a training",
    )
    configure_allowed(parser, "a factory that the file may name, which makes its network")


def configure_allowed(parser: argparse._ActionsContainer, purpose: str) -> None:
    """Declare the factories whose code may run; ``purpose`` begins the help."""
    parser.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:FACTORY",
        help=f"{purpose}; may be repeated",
    )


def configure_source(parser: argparse.ArgumentParser) -> None:
    """Declare what only a checkpoint has a use for."""
    group = parser.add_argument_group(
        "a checkpoint", "its frozen layers' weights are taken from where they were, or from here"
    )
    group.add_argument("--best", action="store_true", help="the best epoch's network, not the last one's")
    group.add_argument("--weights", metavar="FILE", help="the file of weights with which training began")
    configure_servers(group, "with the pushed model")


def configure_servers(parser: argparse._ActionsContainer, purpose: str) -> None:
    """Declare a store or servers; ``purpose`` ends the help."""
    parser.add_argument("--store", metavar="STORE", help=f"folder or URL of the store {purpose}")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help=f"a hapi-server {purpose}; may be repeated",
    )
    parser.add_argument("--token-file", metavar="FILE", help="its bearer token (or HAPI_TOKEN)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="certificate authority (PEM) to trust for https servers"
    )


def source_of(args: argparse.Namespace) -> FrozenSource:
    """Return where the frozen layers' weights are, by the flags of :func:`configure_source`."""
    from hapi.api.model_files import FrozenSource

    return FrozenSource(
        weights=args.weights,
        store=args.store,
        server=tuple(args.server),
        token_file=args.token_file,
        ca_file=args.ca_file,
    )
