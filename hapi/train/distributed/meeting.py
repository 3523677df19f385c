"""The store of torch.distributed, at which the ranks of one start meet: also where ranks of an earlier start did."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hapi.errors import HapiError, OtherRankError, UsageError
from hapi.text import MESSAGE_CHARACTERS, printable
from hapi.train.distributed.launch import Launch
from hapi.wire.documents import parse_document

_POLL_SECONDS = 0.02
AGENT_SECONDS = 60.0
"""Longest time until torchrun's own store answers. It serves before torchrun starts ranks: one that does not is gone.
"""


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met, and their own part of the store."""

    store: Any
    is_first_start: bool
    """False where ranks of the same launcher had met before: it starts them anew when one failed or nodes change."""


def meet(launch: Launch, seconds: float) -> Meeting:
    """Return when all ranks of this start are there.

    A launcher keeps its store when it starts ranks again, in any number, so what those before left there must not be
    found. The first rank therefore names the start, with a word of each other rank that only a living one knows.

    Args:
        launch: this rank.
        seconds: longest time to wait for the others.

    Raises:
        UsageError: no such address, or another process has the port.
        OtherRankError: others did not come.
    """
    deadline = time.monotonic() + seconds
    store = _opened(launch, seconds)
    try:
        if launch.rank == 0:
            return _led(store, launch, deadline, seconds)
        return _followed(store, launch, deadline, seconds)
    except dist.DistError as error:
        raise OtherRankError(f"the ranks' store broke off: {_first_line(error)}") from None


def _opened(launch: Launch, seconds: float) -> Any:
    """The store at ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun or the first rank serves."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"MASTER_PORT={port[:40]!r}: expected a port, 1 to 65535")
    where = f"MASTER_ADDR={address[:200]} MASTER_PORT={port}"
    try:
        socket.getaddrinfo(address, int(port))
    except (OSError, UnicodeError):
        raise UsageError(
            f"{where}: there is no such host; give the address of the first rank's machine"
        ) from None
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = min(seconds, AGENT_SECONDS) if by_agent else seconds
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit)))
        store.set_timeout(timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"{where}: another process listens there, maybe another job's; give each job a port of its own "
                "(torchrun --standalone takes a free one)"
            ) from None
        whose = "torchrun's own store" if by_agent else "the first rank"
        raise OtherRankError(
            f"{where}: {whose} did not answer within {limit:.0f} s ({_first_line(error)}); check that "
            f"{'torchrun' if by_agent else 'it'} runs, and its address and port"
        ) from None
    return PrefixStore("hapi", store)


def _led(store: Any, launch: Launch, deadline: float, seconds: float) -> Meeting:
    """Name this start to the others until all of them have agreed."""
    number, others, names = store.add("starts", 1), range(1, launch.size), 0
    is_first = number == 1 and not launch.restarts
    known: Mapping[str, str] = {}
    name, missing = "", list(others)
    while True:
        missing = [rank for rank in others if not store.check([f"word/{rank}"])]
        words = {} if missing else {str(rank): store.get(f"word/{rank}").decode() for rank in others}
        if not missing and (words != known or not name):
            known, names = words, names + 1
            name = f"{number}.{names}"
            store.set("start", json.dumps({"name": name, "words": known, "first": is_first}))
        if name:
            missing = [rank for rank in others if not store.check([f"{name}/agrees/{rank}"])]
            if not missing:
                store.set(f"{name}/begins", "")
                return Meeting(PrefixStore(name, store), is_first)
        if time.monotonic() > deadline:
            raise OtherRankError(
                f"{numbered(missing)} of {launch.size} did not come within {seconds:.0f} s; their own lines say why"
            )
        time.sleep(_POLL_SECONDS)


def _followed(store: Any, launch: Launch, deadline: float, seconds: float) -> Meeting:
    """Agree to each start that knows this rank's word, until one begins."""
    word = f"{os.getpid()}.{time.time_ns()}"
    store.set(f"word/{launch.rank}", word)
    while True:
        start = _start(store)
        if start.get("words", {}).get(str(launch.rank)) == word:
            name = start["name"]
            store.set(f"{name}/agrees/{launch.rank}", "")
            if store.check([f"{name}/begins"]):
                return Meeting(PrefixStore(name, store), start["first"])
        if time.monotonic() > deadline:
            raise OtherRankError(
                f"the first rank did not begin within {seconds:.0f} s; its own lines say why"
            )
        time.sleep(_POLL_SECONDS)


def _start(store: Any) -> Any:
    """The newest start, possibly of ranks before; empty before there is one."""
    return parse_document(store.get("start")) if store.check(["start"]) else {}


def silent_ranks(store: Any, rank: int, size: int, seconds: float) -> list[int]:
    """Return the ranks that do not tell within ``seconds`` that they miss another one too; none without a store.

    A rank that ended or hangs tells nothing; those that wait for it are let go at about the same time.
    """
    others = [other for other in range(size) if other != rank]
    with suppress(RuntimeError):
        store.set_timeout(timedelta(seconds=seconds))
        store.set(f"missing/{rank}", "")
        deadline = time.monotonic() + seconds
        while others and time.monotonic() < deadline:
            others = [other for other in others if not store.check([f"missing/{other}"])]
            time.sleep(_POLL_SECONDS)
        return others
    return []


def leave_reason(store: Any, rank: int, error: Exception) -> None:
    """Tell the others at the store, if it is there, why this rank ends: a launcher may end it before it can say so."""
    with suppress(RuntimeError):
        text = str(error) if isinstance(error, HapiError) else f"{type(error).__name__}: {error}"
        store.set(f"reason/{rank}", printable(text, MESSAGE_CHARACTERS))


def reason_of(store: Any, size: int) -> str:
    """Return which rank has left a reason, and what it was; empty for none."""
    with suppress(RuntimeError):
        for rank in range(size):
            if store.check([f"reason/{rank}"]):
                return f"rank {rank} of {size} failed: {store.get(f'reason/{rank}').decode()}"
    return ""


def numbered(ranks: list[int]) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]
