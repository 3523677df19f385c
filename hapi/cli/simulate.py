"""``hapi simulate observe``, ``replay`` and ``calibrate``: a fleet of servers and trainers in simulated time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hapi.cli.shared.common import EXIT_CODES, EXIT_OK, say, tell
from hapi.cli.shared.numbers import DAY, count, seconds
from hapi.cli.shared.steady_bar import SteadyBar
from hapi.client.transport.addresses import ServerAddresses
from hapi.client.transport.fleet_list import listed_servers
from hapi.config.token import read_token
from hapi.errors import TransportError, UsageError
from hapi.paths import check_outputs
from hapi.wire.messages import STATUS_PATH
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits

ACTIONS = {
    "observe": "record what running servers do for a while, with a trainer's profile",
    "replay": "simulate a fleet: throughput, waits, utilisation, and the splits over time",
    "calibrate": "fit a request's overhead and the links' efficiency to observed runs; tell the error",
}
"""Help lines by action."""
_LONGEST = 1e9
_STATUS_SECONDS = 10.0
"""Longest silence of a server that is observed, and its longest answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    flags = {"observe": _observe_flags, "replay": _replay_flags, "calibrate": _calibrate_flags}
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary, epilog=EXIT_CODES)
        flags[name](action)
        action.add_argument("--json", action="store_true", help="print all of it as JSON")


def _observe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="+",
        help="a server's address, such as http://store:8099, or fleet+ a list's",
    )
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help="profile of a trainer (hapi-train --save-profile), or the report of its run",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where the observation is written")
    parser.add_argument(
        "--seconds", type=seconds(0.1, DAY), default=30.0, metavar="TIME", help="how long (default 30)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token (or HAPI_TOKEN)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="certificates that https:// servers are held against"
    )


def _replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", metavar="FLEET", help="YAML file that describes the fleet")
    parser.add_argument(
        "--seconds",
        type=seconds(0.001, _LONGEST),
        metavar="TIME",
        help="simulated time, instead of the file's",
    )
    parser.add_argument(
        "--warm-up",
        type=seconds(0, _LONGEST),
        metavar="TIME",
        help="time at the beginning that is not counted",
    )
    parser.add_argument("--seed", type=count(0, 1 << 31), metavar="N", help="seed of every chance")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _calibrate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS", help="YAML file that lists fleets and their observations")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; returns the exit code."""
    try:
        import simpy  # noqa: F401
    except ImportError:
        raise UsageError("hapi simulate needs simpy: pip install 'hapi-split[simulate]'") from None
    found = {"observe": _observe, "replay": _replay, "calibrate": _calibrate}[args.action](args)
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        for line in found.lines():
            say(line)
    return EXIT_OK


def _replay(args: argparse.Namespace) -> Any:
    from hapi.cluster.simulation.fleet import load_fleet
    from hapi.cluster.simulation.replay import load_profiles, replay

    given = {"seconds": args.seconds, "warm_up": args.warm_up, "seed": args.seed}
    fleet = load_fleet(args.fleet, given)
    profiles = load_profiles(fleet, Path(args.fleet).parent)
    quiet = args.quiet or not sys.stderr.isatty()
    with SteadyBar(total=fleet.seconds, unit="s", desc="simulated", disable=quiet, file=sys.stderr) as bar:

        def over(share: float) -> None:
            """Show the share of the simulated time that is over."""
            bar.update(share * fleet.seconds - bar.n)

        return replay(fleet, profiles, over)


def _calibrate(args: argparse.Namespace) -> Any:
    from hapi.cluster.simulation.calibrate import calibrate, load_runs

    return calibrate(load_runs(args.runs), tell=lambda line: tell("hapi simulate", line))


def _observe(args: argparse.Namespace) -> Any:
    from hapi.cluster.simulation.observation import load_recorded, observation_of, reading_of

    check_outputs([("--out", args.out)], [("--profile", args.profile)])
    profile, job = load_recorded(args.profile)
    transports = _servers(args.urls, read_token(args.token_file), args.ca_file)
    statuses: dict[str, list[Any]] = {transport.url: [] for transport in transports}
    began, every = time.monotonic(), max(0.1, min(1.0, args.seconds / 4))
    try:
        while True:
            asked = time.monotonic()
            is_last = asked - began >= args.seconds
            for transport in transports:
                readings = statuses[transport.url]
                try:
                    readings.append(reading_of(transport.call("GET", STATUS_PATH)))
                except TransportError:  # what it did meanwhile shows in its next counts
                    if is_last or not readings:
                        raise
            if is_last:
                break
            time.sleep(min(every, max(0.0, began + args.seconds - time.monotonic())))
    finally:
        for transport in transports:
            transport.close()
    found = observation_of(statuses, asked - began, profile, job)
    found.save(args.out)
    return found


def _servers(urls: Sequence[str], token: str | None, ca_file: str | None) -> list[Transport]:
    """Return transports to the servers, of a name with several addresses and of a fleet's list to each."""

    def transport(url: str, address: str | None) -> HttpTransport:
        limits = AnswerLimits.within(_STATUS_SECONDS)
        return HttpTransport(
            url, token=token, ca_file=ca_file, timeout=_STATUS_SECONDS, address=address, answer_limits=limits
        )

    listed = partial(listed_servers, ca_file=ca_file, timeout=_STATUS_SECONDS)
    found = ServerAddresses(urls, transport, listed=listed).transports
    return list({one.url: one for one in found}.values())
