"""The page of a fleet: several servers, their tenants and last errors, in one file that loads nothing.

Every text from a server is escaped where it enters the page (:func:`hapi.figures.markup.escaped`). It shows what the
servers tell the token that asked, and no token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hapi.figures.markup import escaped, section, table
from hapi.figures.style import STYLE
from hapi.units import format_bytes, format_duration

RELOAD_SECONDS = 10
"""Seconds after which a browser reads the file again: it may have been written anew."""
MOST_ERRORS = 20
"""Last errors that are shown."""
_LAST_MOMENT = 4e9
"""Seconds since 1970 that a server may tell."""
_WELL = ("serving", "lame-duck", "draining")


def fleet_page(document: Mapping[str, Any], at: float) -> str:
    """Return the whole page.

    Args:
        document: what ``hapi status --json`` prints.
        at: seconds since 1970 at which the servers were asked.
    """
    fleet, servers = document["fleet"], document["servers"]
    title = f"{len(servers)} server{'s' * (len(servers) != 1)}"
    parts = [_head(fleet, title, at), _servers(servers), _devices(servers)]
    parts += [_tenants(fleet["tenants"]), _errors(servers)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">\n'
        f'<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)} – Hapi</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _head(fleet: Mapping[str, Any], title: str, at: float) -> str:
    states = ", ".join(f"{count} {state}" for state, count in fleet["states"].items())
    waits = [tenant["trainer_wait"] for tenant in fleet["tenants"]]
    tiles = [
        ("states", states or "–"),
        ("slots busy", f"{fleet['running']} of {fleet['slots']}"),
        ("queued", str(fleet["queued"])),
        ("trainers wait", format_duration(max(waits, default=0.0))),
    ]
    cells = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in tiles)
    return (
        f"<header><h1>{escaped(title)}</h1>\n"
        f'<p class="sub">Asked at {_moment(at)} UTC; made by hapi status</p></header>\n'
        f'<section aria-label="Summary"><dl class="tiles">{cells}</dl></section>'
    )


def _servers(servers: Sequence[Mapping[str, Any]]) -> str:
    rows, classes = [], []
    for server in servers:
        status = server["status"]
        note = server["error"] or (f"the same server as {server['same_as']}" if server["same_as"] else "")
        cells = ["–"] * 4
        if status is not None:
            queue, note = status["queue"], str(status.get("certificate") or status["stuck"] or note)
            busy, up = f"{queue['running']} of {queue['slots']}", format_duration(float(status["uptime"]))
            cells = [str(status["hapi"]), up, busy, str(queue["queued"])]
        rows.append([server["url"], server["state"], *cells, note])
        classes.append("" if server["state"] in _WELL or server["same_as"] else "chosen")
    head = ("server", "state", "hapi", "up", "slots busy", "queued", "")
    return section("Servers", table("Every address that was asked", head, rows, classes, (0, 1, 2, 6), (6,)))


def _devices(servers: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for server in servers:
        for device in (server["status"] or {}).get("devices", ()):
            used, budget = sum(device["memory"].values()), device["budget_bytes"]
            bound = "" if budget is None else f" of {format_bytes(budget)}"
            batch = str(device["cos_batch"] or "–")
            requests = str(device["requests"])
            rows.append(
                [f"{server['url']} {device['name']}", requests, f"{format_bytes(used)}{bound}", batch]
            )
    head = ("device", "requests", "memory", "COS batch")
    return section("Devices", table("As each server budgets its own", head, rows, left=(0,))) if rows else ""


def _tenants(tenants: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for tenant in tenants:
        wait = tenant["expected_wait"]
        counts = [str(tenant[name]) for name in ("running", "queued", "served")]
        expected = "no server takes more" if wait is None else format_duration(wait)
        sent, stalled = format_bytes(tenant["sent_bytes"]), format_duration(tenant["trainer_wait"])
        rows.append([tenant["name"], *counts, sent, expected, stalled])
    head = ("tenant", "running", "queued", "served", "sent", "next waits", "trainers wait")
    return section("Tenants", table("Sums over all servers", head, rows, left=(0,))) if rows else ""


def _errors(servers: Sequence[Mapping[str, Any]]) -> str:
    found = sorted(_all_errors(servers), key=lambda error: error[0], reverse=True)[:MOST_ERRORS]
    rows = [
        [_moment(at), url, str(error["status"]), str(error["tenant"]), str(error["line"])]
        for at, url, error in found
    ]
    head = ("at (UTC)", "server", "status", "tenant", "error")
    return (
        section("Last errors", table("The newest first", head, rows, left=(0, 1, 3, 4), long=(4,)))
        if rows
        else ""
    )


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(max(at, 0.0), _LAST_MOMENT)))


def _all_errors(servers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str, Mapping[str, Any]]]:
    for server in servers:
        for error in (server["status"] or {}).get("errors", ()):
            yield float(error["at"]), server["url"], error
