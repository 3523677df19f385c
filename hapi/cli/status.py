"""``hapi status URL...``: what a server, or several as one fleet, do now."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hapi.cli.shared.common import EXIT_FAILED, EXIT_OK, say
from hapi.cli.shared.numbers import seconds
from hapi.client.transport.addresses import ServerAddresses
from hapi.client.transport.fleet_list import listed_servers
from hapi.config.token import read_token
from hapi.errors import BadRequestError, HapiError, TransportError, UsageError
from hapi.figures.fleet import fleet_page
from hapi.paths import check_output, write_whole
from hapi.process.threads import Threads
from hapi.text import counted
from hapi.units import format_bytes
from hapi.wire.messages import STATUS_PATH
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits

MOST_SERVERS = 1000
"""Servers that are asked at once, a thread each."""
_MOST_LISTED = 1000
"""Devices, tenants or errors that one server may tell of."""
_ERRORS = 5
"""Last errors that are printed; --json has all that the servers keep."""
_GOOD = ("serving", "lame-duck", "draining")
"""States of servers whose work moves."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="+",
        help="a server's address, such as http://store:8099; several: as one fleet",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token (or HAPI_TOKEN)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="certificates that https:// servers are held against"
    )
    parser.add_argument(
        "--timeout", type=seconds(0.1), default=10.0, metavar="S", help="seconds to wait (default 10)"
    )
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    parser.add_argument("--html", metavar="FILE", help="write it as a page, too, which a browser reads again")


def run(args: argparse.Namespace) -> int:
    """Print the state in lines; exit code 1 when a server's work does not move, or a server is absent."""
    urls, asked = list(dict.fromkeys(args.urls)), time.time()
    if args.html is not None:
        check_output("--html", args.html)
    _check_count(len(urls))
    probes = _probed(urls, read_token(args.token_file), args.ca_file, args.timeout)
    if len(probes) == 1 and probes[0].error is not None:
        raise probes[0].error
    fleet = Fleet.of(probes)
    if args.html is not None:
        write_whole(args.html, fleet_page(fleet.to_json(), asked), "--html")
    if args.json:
        print(json.dumps(fleet.to_json(), indent=2))
    else:
        fleet.print()
    return EXIT_OK if set(fleet.states) <= set(_GOOD) else EXIT_FAILED


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One server's answer, or the reason why there is none."""

    url: str
    error: HapiError | None = None
    document: dict[str, Any] = field(default_factory=dict)
    """The answer; empty with an error."""
    state: str = "absent"
    """The state that the server tells, ``stuck``, ``absent`` where nothing answers, or ``unknown``."""
    same_as: str | None = None
    """Earlier URL of the same process, such as a balancer's; it is counted there."""

    def lines(self) -> Iterator[str]:
        """Yield the server's line, and one for each device."""
        if self.error is not None:
            yield f"{self.url}: {self.state}: {str(self.error).removeprefix(self.url)}"
            return
        if self.same_as is not None:
            yield f"{self.url}: the same server as {self.same_as}"
            return
        document, queue = self.document, self.document["queue"]
        yield (
            f"{self.url}: {self.state}, hapi {document['hapi']}, up {document['uptime']:.0f} s, "
            f"{queue['running']} of {queue['slots']} slots busy, {queue['queued']} queued"
        )
        if problem := document.get("certificate"):  # which older servers do not tell
            yield f"  certificate: {problem}"
        for device in document["devices"]:
            used, budget = sum(device["memory"].values()), device["budget_bytes"]
            bound = "no bound" if budget is None else f"of {format_bytes(budget)}"
            yield (
                f"  {device['name']}: {counted(device['requests'], 'request')}, memory {format_bytes(used)} {bound}, "
                f"COS batch {device['cos_batch'] or 'not chosen yet'}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "url": self.url,
            "state": self.state,
            "same_as": self.same_as,
            "error": None if self.error is None else str(self.error),
            "status": self.document or None,
        }


@dataclass(kw_only=True)
class Tenant:
    """A tenant's work at all servers."""

    running: int = 0
    queued: int = 0
    served: int = 0
    sent_bytes: int = 0
    expected_wait: float | None = None
    """Seconds that its next request waits at the server where that is shortest; None: no server takes it."""
    trainer_wait: float = 0.0
    """Longest wait of its trainers; 0 too where servers are too old to tell it."""

    def add(self, entry: dict[str, Any], *, takes_work: bool) -> None:
        """Add what one server entry."""
        self.running += entry["running"]
        self.queued += entry["queued"]
        self.served += entry["served"]
        self.sent_bytes += entry["sent_bytes"]
        if takes_work:
            wait, before = float(entry["expected_wait"]), self.expected_wait
            self.expected_wait = wait if before is None else min(before, wait)
            self.trainer_wait = max(self.trainer_wait, float(entry.get("trainer_wait", 0.0)))

    def line(self, name: str) -> str:
        """Return it in a line."""
        wait = (
            "no server takes more"
            if self.expected_wait is None
            else f"next waits {self.expected_wait:.1f} s, trainers wait {self.trainer_wait:.1f} s"
        )
        return (
            f"  tenant {name}: {self.running} running, {self.queued} queued, {self.served} served, "
            f"{format_bytes(self.sent_bytes)} sent, {wait}"
        )


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All servers that were asked, and their sums."""

    probes: Sequence[Probe]
    states: Counter[str]
    """Servers by state."""
    queue: Counter[str]
    """Requests ``running`` and ``queued``, and ``slots``."""
    tenants: dict[str, Tenant]

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Fleet:
        """Sum up; a server that was asked by several URLs counts once."""
        counted = [probe for probe in probes if probe.same_as is None]
        queue, tenants = Counter[str](), dict[str, Tenant]()
        for probe in counted:
            if probe.error is None:
                queue.update(
                    {name: int(probe.document["queue"][name]) for name in ("running", "slots", "queued")}
                )
            for entry in probe.document.get("tenants", ()):
                tenants.setdefault(entry["name"], Tenant()).add(entry, takes_work=probe.state == "serving")
        return cls(
            probes=probes, states=Counter(probe.state for probe in counted), queue=queue, tenants=tenants
        )

    def print(self) -> None:
        """Print it in lines."""
        if len(self.probes) > 1:
            states = ", ".join(f"{count} {state}" for state, count in self.states.most_common())
            say(
                f"{self.states.total()} server{'s' * (self.states.total() > 1)}: {states}; "
                f"{self.queue['running']} of {self.queue['slots']} slots busy, {self.queue['queued']} queued"
            )
        for probe in self.probes:
            for line in probe.lines():
                say(line)
        for line in self.common_lines():
            say(line)

    def common_lines(self) -> Iterator[str]:
        """Yield a line for each tenant, and for the last errors."""
        for name, tenant in self.tenants.items():
            yield tenant.line(name)
        errors = [(error, probe.url) for probe in self.probes for error in probe.document.get("errors", ())]
        for error, url in sorted(errors, key=lambda pair: float(pair[0]["at"]))[-_ERRORS:]:
            where = f" at {url}" if len(self.probes) > 1 else ""
            yield f"  error {error['status']} of {error['tenant']}{where}: {error['line']}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        sums = {
            "states": dict(self.states),
            **{name: self.queue[name] for name in ("running", "slots", "queued")},
            "tenants": [{"name": name, **vars(tenant)} for name, tenant in self.tenants.items()],
        }
        return {"fleet": sums, "servers": [probe.to_json() for probe in self.probes]}


def _probed(urls: Sequence[str], token: str | None, ca_file: str | None, timeout: float) -> list[Probe]:
    """Ask all servers at the same time, each address of a name that has several."""

    def transport(url: str, address: str | None) -> HttpTransport:
        limits = AnswerLimits.within(timeout, " (--timeout)")
        return HttpTransport(
            url, token=token, ca_file=ca_file, timeout=timeout, address=address, answer_limits=limits
        )

    listed = partial(listed_servers, ca_file=ca_file, timeout=timeout)
    transports = ServerAddresses(urls, transport, listed=listed).transports
    _check_count(len(transports))
    threads = Threads(len(transports), "hapi-status")
    try:
        pending = [threads.submit(_probe, one) for one in transports]
        probes = [work.result() for work in pending]
    finally:
        for one in transports:
            one.close()
        threads.close()
    return _without_twins(probes)


def _check_count(servers: int) -> None:
    if servers > MOST_SERVERS:
        raise UsageError(f"{servers} servers are more than the {MOST_SERVERS} that are asked at once")


def _probe(transport: Transport) -> Probe:
    url = transport.url
    try:
        document = transport.call("GET", STATUS_PATH)
    except TransportError as error:
        return Probe(url=url, error=error)
    except HapiError as error:
        return Probe(url=url, error=error, state="unknown")
    try:
        probe = Probe(url=url, document=document, state="stuck" if document["stuck"] else document["state"])
        _check(probe)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        problem = f"{url}: its status has another form than agreed; is it a hapi-server?"
        return Probe(url=url, error=BadRequestError(problem), state="unknown")
    return probe


def _check(probe: Probe) -> None:
    """Compute all that is shown of a server; KeyError, TypeError, ValueError, AttributeError or ArithmeticError if its
    document has another form.
    """
    if not isinstance(probe.state, str) or not isinstance(probe.document["server"], str):
        raise TypeError("state and server are text")
    if max(len(probe.document.get(name, ())) for name in ("devices", "tenants", "errors")) > _MOST_LISTED:
        raise ValueError("more than a server tells")
    fleet = Fleet.of([probe])
    fleet_page(fleet.to_json(), 0.0)
    for _ in (*probe.lines(), *fleet.common_lines()):
        pass


def _without_twins(probes: Sequence[Probe]) -> list[Probe]:
    """Mark servers that answer at several of the URLs."""
    first: dict[str, str] = {}
    found = []
    for probe in probes:
        earlier = probe.url if probe.error else first.setdefault(str(probe.document["server"]), probe.url)
        twin = Probe(url=probe.url, state=probe.state, same_as=earlier)
        found.append(probe if earlier == probe.url else twin)
    return found
