"""``hapi-server``: the storage tier."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hapi import __version__
from hapi.allocator import keep_freed_memory
from hapi.cli.entry import HangUpWaits, Leaving
from hapi.cli.shared.common import EXIT_CODES, EXIT_OK, OneLineParser, run_command
from hapi.cli.shared.settings_file import (
    add_settings_file,
    print_settings,
    settings_file,
    tell_unknown_variables,
)
from hapi.config.settings import Loaded, add_flags, load, overrides_of
from hapi.data.listing import check_store
from hapi.errors import HapiError, UsageError
from hapi.factories import search_here

if TYPE_CHECKING:
    from hapi.server.settings import ServerSettings

VARIABLES = "HAPI_SERVER_"
"""Prefix of the environment variables of settings."""


def parser() -> argparse.ArgumentParser:
    """The command line of ``hapi-server``."""
    from hapi.server.settings import ListenSettings, ServiceSettings

    p = OneLineParser(
        prog="hapi-server",
        description="Run frozen layers beside an object store.",
        epilog=f"Each setting may also be in the environment: --max-queued as {VARIABLES}MAX_QUEUED. "
        f"The server prints 'listening on http://HOST:PORT' when it is ready. {EXIT_CODES}",
    )
    p.add_argument("--version", action="version", version=f"hapi {__version__}")
    add_settings_file(p, "settings")
    add_flags(p, ServiceSettings, "service")
    add_flags(p, ListenSettings, "listening")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-server``; returns the exit code."""
    with HangUpWaits():  # also where this module is run
        return run_command("hapi-server", lambda: _run(_parsed(argv)), goes_on=True)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    with Leaving("hapi-server"):
        return parser().parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    from hapi.server.settings import ServerSettings

    tell_unknown_variables("hapi-server", ServerSettings, os.environ, VARIABLES)
    loaded: Loaded[ServerSettings] = load(
        ServerSettings,
        settings_file(args, "settings"),
        overrides_of(args, ServerSettings),
        without_service_links(os.environ),
        VARIABLES,
    )
    if args.print_config:
        print_settings(loaded)
        return EXIT_OK
    try:
        return _serve(loaded)
    except HapiError as error:
        error.args = (loaded.as_given(str(error)),)
        raise


def _serve(loaded: Loaded[ServerSettings]) -> int:
    check_store(loaded.value.store)
    with Leaving("hapi-server"):
        from hapi.server.lifecycle.run import run_server

    if {"batching", "cos_batch"} <= loaded.origins.keys():
        raise UsageError("--cos-batch: is the fixed COS batch, so --batching has no effect; give one of them")
    if {"min_cos_batch", "cos_batch"} <= loaded.origins.keys() or (
        loaded.value.batching == "fixed" and "min_cos_batch" in loaded.origins
    ):
        raise UsageError("--min-cos-batch: has no effect beside a fixed COS batch; leave one of them out")
    keep_freed_memory()
    if loaded.value.allow_model:
        search_here()
    return run_server(loaded.value)


def without_service_links(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without Kubernetes' variables of a service named hapi-server: ``tcp://...`` as
    port.
    """
    port = f"{VARIABLES}PORT"
    return {k: v for k, v in environment.items() if k != port or not v.startswith(("tcp://", "udp://"))}


if __name__ == "__main__":
    sys.exit(main())
