"""Every kind of hostile store against every command: one clear line, soon, in little memory, and nothing believed.

What a command packed into such a store is looked at when the store is honest again: it is whole, or it is not there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folder_kinds import SPOILED, Spoiled
from support.hostile_store import HostileStore, hostile_store
from support.hostile_tools import peak_bytes, reset_peak
from support.http_tools import SAMPLES, exchange, served
from support.listing_kinds import MISDEEDS
from support.store_kinds import COMMANDS, Misdeed

from hapi.cli.main import main
from hapi.data.mount import mount
from hapi.errors import HapiError
from hapi.store import remote_listing
from hapi.store.open import open_store

pytestmark = pytest.mark.slow

REMOTE = "s3://bucket/x"
IDS = [0, 100, 299]
MOST_SECONDS = 300.0
"""What a command may take; with the patience of these tests it takes two."""
MOST_BYTES = 200 << 20
"""What it may need beside what the process has."""


@dataclass(frozen=True)
class Goods:
    """A dataset of 300 samples in 5 shards: its source, and its objects in a store."""

    source: Path
    objects: dict[str, bytes]
    version: str


@pytest.fixture(scope="module")
def goods(tmp_path_factory: pytest.TempPathFactory) -> Goods:
    folder = tmp_path_factory.mktemp("goods")
    samples = np.random.default_rng(0).integers(0, 256, (300, 64), dtype=np.uint8)
    np.savez(folder / "xy.npz", x=samples, y=np.arange(300) % 7)
    store = folder / "store"
    assert ran(["pack", str(folder / "xy.npz"), f"{store}/small", "--shard-size", "4096", "--quiet"])[0] == 0
    objects = {
        f"x/{path.relative_to(store)}": path.read_bytes() for path in store.rglob("*") if path.is_file()
    }
    version = json.loads(objects["x/datasets/small/manifest.json"])["version"]
    return Goods(folder / "xy.npz", objects, version)


def ran(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a ``hapi`` command, run here."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(arguments)
    return code, out.getvalue(), errors.getvalue()


@dataclass(frozen=True)
class Outcome:
    """How a command ended: whether it did its work, and what it said."""

    done: bool
    said: str


def list_all(goods: Goods, url: str) -> Outcome:
    code, out, errors = ran(["ls", url])
    there = code == 0 and any(
        line.startswith("small ") and line.endswith("whole") for line in out.splitlines()
    )
    return Outcome(there, one_error(errors, "hapi ls") if code else out)


def verify(goods: Goods, url: str) -> Outcome:
    code, out, errors = ran(["verify", f"{url}/small", "--quiet"])
    assert (code == 0) == ("sound" in out)
    return Outcome(code == 0, out if out else one_error(errors, "hapi verify"))


def pack(goods: Goods, url: str) -> Outcome:
    code, out, errors = ran(["pack", str(goods.source), f"{url}/new", "--shard-size", "4096", "--quiet"])
    return Outcome(code == 0, out if code == 0 else one_error(errors, "hapi pack"))


def serve(goods: Goods, url: str) -> Outcome:
    """A server, from the ping of its start to the answer of one request."""
    body = {"dataset": {"name": "small", "version": goods.version}, "ids": IDS}
    try:
        open_store(url).ping()
        with served(url) as application:
            answer = exchange(application.port, "POST", SAMPLES, body)
    except HapiError as error:
        return Outcome(False, str(error))
    if answer.status != 200:
        return Outcome(False, answer.json()["detail"])
    stored = np.load(goods.source)["x"][IDS].tobytes()
    if b"urn:hapi:problem" in answer.body:
        return Outcome(False, "an error in the stream")
    assert stored in answer.body
    return Outcome(True, "")


def read_mounted(goods: Goods, url: str, name: str = "small") -> Outcome:
    expected = np.load(goods.source)["x"]
    try:
        with mount(f"{url}/{name}") as mounted:
            mounted.sequence(seed=1, epoch=0)
            while len(batch := mounted.next_batch(100)):
                assert batch.data.tobytes() == expected[batch.ids].tobytes()
    except HapiError as error:
        return Outcome(False, str(error))
    return Outcome(True, "")


RUN: dict[str, Callable[[Goods, str], Outcome]] = dict(
    zip(COMMANDS, (list_all, verify, pack, serve, read_mounted), strict=True)
)


def one_error(errors: str, program: str) -> str:
    """The one line that says what went wrong."""
    lines = [line for line in errors.splitlines() if not line.startswith(f"{program}: warning: ")]
    assert len(lines) == 1 and lines[0].startswith(f"{program}: error: "), errors
    return lines[0]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[HostileStore, float], None]]:
    """Makes this process a client of a store, with so much patience."""

    def use(store: HostileStore, patience: float = 1) -> None:
        for name, value in store.settings(patience).items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(remote_listing, "MOST_OBJECTS", 20_000)
    return use


def some_commands() -> Iterator[Any]:
    """Two commands for each misdeed, by turns; those that are long have all."""
    for number, misdeed in enumerate(MISDEEDS):
        two = (COMMANDS[number % len(COMMANDS)], COMMANDS[(number + 2) % len(COMMANDS)])
        yield pytest.param(misdeed, two, id=misdeed.name)
        yield pytest.param(misdeed, COMMANDS, marks=pytest.mark.long, id=f"{misdeed.name}, all")


@pytest.mark.parametrize(("misdeed", "commands"), some_commands())
def test_every_command_ends_well_or_with_one_line(
    misdeed: Misdeed,
    commands: tuple[str, ...],
    goods: Goods,
    impatient: Callable[[HostileStore, float], None],
) -> None:
    for command in commands:
        done = command not in misdeed.stops
        for patience in (1, 20):  # where this machine stood still, an honest answer came too late
            with hostile_store(goods.objects, misdeed.kind) as store:
                impatient(store, patience)
                before, started = reset_peak(os.getpid()), time.monotonic()
                outcome = RUN[command](goods, REMOTE)
                assert time.monotonic() - started < MOST_SECONDS, (command, outcome)
                assert peak_bytes(os.getpid()) - before < MOST_BYTES, (command, outcome)
                if patience == 1 and (
                    outcome.done != done or (not done and misdeed.says not in outcome.said)
                ):
                    continue
                assert outcome.done == done, (command, outcome)
                if not outcome.done:
                    check_said(outcome.said, misdeed.says)
                if command == "pack":
                    store.kind = None
                    impatient(store, 20)
                    check_packed(goods, REMOTE, outcome)
                break


def test_a_store_without_the_tls_that_its_endpoint_tells_of(
    goods: Goods, impatient: Callable[[HostileStore, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in COMMANDS:
        with hostile_store(goods.objects) as store:
            impatient(store, 1)
            monkeypatch.setenv("AWS_ENDPOINT_URL", store.url.replace("http://", "https://"))
            outcome = RUN[command](goods, REMOTE)
        assert not outcome.done
        check_said(outcome.said, "does not speak TLS")


def check_said(said: str, words: str = "") -> None:
    """Lines that a terminal may show, and that say what it is about."""
    for line in said.splitlines():
        assert line.isprintable() and len(line) < 1000 and "Traceback" not in line, line
    assert words in said, said


def check_packed(goods: Goods, url: str, outcome: Outcome) -> None:
    """What the honest store has of a packing is whole, or nobody takes it for a dataset."""
    found = json.loads(ran(["ls", url, "--json"])[1])["datasets"]
    states = {dataset["name"]: dataset["state"] for dataset in found}
    if outcome.done or states.get("new") == "whole":
        assert read_mounted(goods, url, "new").done, (outcome, states)


@pytest.mark.parametrize("kind", SPOILED, ids=lambda kind: kind.name)
def test_a_spoiled_folder_ends_every_command_with_one_line(
    kind: Spoiled, goods: Goods, tmp_path: Path
) -> None:
    for command in COMMANDS:
        store = tmp_path / command
        shutil.copytree(goods.source.parent / "store", store)
        kind.spoil(store)
        before, started = reset_peak(os.getpid()), time.monotonic()
        outcome = RUN[command](goods, str(store))
        assert time.monotonic() - started < MOST_SECONDS, (command, outcome)
        assert peak_bytes(os.getpid()) - before < MOST_BYTES, (command, outcome)
        assert outcome.done == (command not in kind.stops), (command, outcome)
        if not outcome.done:
            check_said(outcome.said)
        if outcome.done and command == "pack":
            check_packed(goods, str(store), outcome)


def test_there_are_enough_kinds() -> None:
    assert len({misdeed.name for misdeed in MISDEEDS}) == len(MISDEEDS) >= 30
