"""``hapi cluster urls``: the servers of a fleet."""

from __future__ import annotations

import argparse

from hapi.cli.shared.common import EXIT_CODES, EXIT_OK
from hapi.cli.shared.numbers import seconds
from hapi.client.transport.fleet_list import listed_servers

_URLS = "print the servers' URLs, with commas between them, as hapi-train takes them after --server"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    urls = actions.add_parser("urls", help=_URLS, description=_URLS, epilog=EXIT_CODES)
    urls.add_argument("url", metavar="URL", help="address of Ray Serve's proxy, such as http://head:8000")
    urls.add_argument("--ca-file", metavar="FILE", help="certificates that an https:// proxy is held against")
    urls.add_argument(
        "--timeout", type=seconds(0.1), default=10.0, metavar="S", help="seconds to wait (default 10)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the list in a line, however long: each URL in it was checked."""
    print(",".join(listed_servers(args.url, ca_file=args.ca_file, timeout=args.timeout)))
    return EXIT_OK
