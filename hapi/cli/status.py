"""``hapi status URL``: what a server does now."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hapi.cli.shared.common import EXIT_FAILED, EXIT_OK, say
from hapi.cli.shared.numbers import seconds
from hapi.config.token import read_token
from hapi.errors import BadRequestError
from hapi.units import format_bytes
from hapi.wire.messages import STATUS_PATH
from hapi.wire.transport.http import HttpTransport


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("url", metavar="URL", help="the server's address, such as http://store:8099")
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token (or HAPI_TOKEN)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="certificates that an https:// server is held against"
    )
    parser.add_argument(
        "--timeout", type=seconds(0.1), default=10.0, metavar="S", help="seconds to wait (default 10)"
    )
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the state in lines; exit code 1 when the server's work does not move."""
    token = read_token(args.token_file)
    transport = HttpTransport(args.url, token=token, ca_file=args.ca_file, timeout=args.timeout)
    try:
        document = transport.call("GET", STATUS_PATH)
    finally:
        transport.close()
    if args.json:
        print(json.dumps(document, indent=2))
        return EXIT_OK
    try:
        stuck = _print(args.url, document)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadRequestError(
            f"{args.url}: its status has another form than agreed; is it a hapi-server?"
        ) from None
    return EXIT_FAILED if stuck else EXIT_OK


def _print(url: str, document: dict[str, Any]) -> bool:
    queue, stuck = document["queue"], bool(document["stuck"])
    say(
        f"{url}: {'stuck' if stuck else document['state']}, hapi {document['hapi']}, up {document['uptime']:.0f} s, "
        f"{queue['running']} of {queue['slots']} slots busy, {queue['queued']} queued"
    )
    for device in document["devices"]:
        used, budget = sum(device["memory"].values()), device["budget_bytes"]
        bound = "no bound" if budget is None else f"of {format_bytes(budget)}"
        say(
            f"  {device['name']}: {device['requests']} requests, memory {format_bytes(used)} {bound}, "
            f"COS batch {device['cos_batch'] or 'not chosen yet'}"
        )
    for tenant in document["tenants"]:
        say(
            f"  tenant {tenant['name']}: {tenant['running']} running, {tenant['queued']} queued, "
            f"{tenant['served']} served, {format_bytes(tenant['sent_bytes'])} sent"
        )
    for error in document["errors"][-_ERRORS:]:
        say(f"  error {error['status']} of {error['tenant']}: {error['line']}")
    return stuck


_ERRORS = 5
"""Last errors that are printed; --json has all that the server keeps."""
