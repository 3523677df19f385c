"""A trainer against a server of sixty misbehaviours: one clear line, soon, within bounded memory; never a traceback.

All kinds meet this side over real sockets in the tests' own process, which is fast; some of them a real hapi-train.
"""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.forked import ForkedProcess, environment
from support.harness import THIN
from support.hostile_server import KINDS, Kind, hostile
from support.hostile_tools import peak_bytes, resident_bytes
from support.local_job import built, pack_blobs, remembering, service_of
from support.tiny_http import TinyServer, serving

from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.config.settings import load, overrides_of
from hapi.errors import HapiError, UsageError
from hapi.train.settings import TrainSettings
from hapi.wire.transport.http import Handler

SECONDS = 300.0
"""A few seconds on an idle machine; before there were bounds, no end."""
MOST_BYTES, MOST_GROWTH = 1200 << 20, 800 << 20
"""Of a trainer, twice what one takes that meets an honest server; of this process, where the server is too."""
FLAGS = (
    "--dataset", "blobs", *THIN, "--freeze", "12", "--weights", "random", "--bs", "20", "--request-size", "20",
    "--epochs", "1", "--split", "12", "--no-progress", "--threads", "1", "--patience", "1",
)  # fmt: skip
IMPATIENT = (("--timeout", 2), ("--slow-server-seconds", 1), ("--answer-timeout", 3))
PATIENT = ("--timeout", "120", "--slow-server-seconds", "60", "--answer-timeout", "240")
"""For kinds that nothing is waited for of, so that an honest answer may take its time, too."""
REAL = (
    "dripping 100-continue", "escapes in an error", "2^48 samples", "3 million classes", "nested deeply",
    "document without end", "half a billion ids", "gigabytes of stored samples", "dripping frame", "false features",
    "features that are no numbers", "trailers without end",
)  # fmt: skip
"""Kinds that meet a process, memory and time counted."""
WAITED_FOR = re.compile(
    "drip|endless page|silence|too long|twice|come back|gigabytes|half a billion|without end"
)
"""Kinds that take their seconds, as something is waited for."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handler]:
    folder = tmp_path_factory.mktemp("hostile") / "store"
    pack_blobs(folder, count=40)
    with service_of(folder) as running:
        remembered = remembering(running)
        # Its answers are at hand from here on, so that no limit of seconds is one for this machine.
        with serving(hostile(remembered, None)) as server:
            assert (
                train_here(Kind(lambda connection, honest: None, "", flags=("--timeout", "240")), server.url)
                is None
            )
        yield remembered


def flags_for(kind: Kind, patience: int = 1) -> tuple[str, ...]:
    """All flags of a job that meets a misbehaviour; it waits for some of them, by so much ``patience``."""
    name = next((name for name, known in KINDS.items() if known is kind), "")
    impatient = (part for flag, seconds in IMPATIENT for part in (flag, str(patience * seconds)))
    return (*FLAGS, *(impatient if WAITED_FOR.search(name) else PATIENT), *kind.flags)


def settings_of(*flags: str) -> SessionSettings:
    """As hapi-train reads them."""
    from hapi.cli.train import parser

    return load(TrainSettings, None, overrides_of(parser().parse_args(flags), TrainSettings), {}).value


def train_here(kind: Kind, *urls: str, patience: int = 1) -> HapiError | None:
    """An epoch in this process; the error that it ends with."""
    settings = settings_of(*flags_for(kind, patience), *(part for url in urls for part in ("--server", url)))
    try:
        with (
            mock.patch("hapi.client.models.build_network", built),
            Session.open(settings) as session,
        ):
            assert sum(len(labels) for _, labels in session.epoch(0)) == 40
    except HapiError as error:
        return error
    return None


@pytest.mark.slow_cases("endless 100-continue", "much between chunks")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if WAITED_FOR.search(n) else ()) for n in KINDS]
)
def test_each_kind_ends_in_one_line(name: str, honest: Handler) -> None:
    kind = KINDS[name]
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before, started = resident_bytes(0), time.monotonic()
    # Where this machine stood still, the job may not have waited for what was to come.
    for patience in (1, 5, 25):
        with serving(hostile(honest, kind)) as server:
            error = train_here(kind, server.url, patience=patience)
        if (error is None) == (kind.code == 0) and (error is None or re.search(kind.says, str(error))):
            break
    assert time.monotonic() - started < SECONDS
    assert peak_bytes(0) - before < MOST_GROWTH
    if kind.code == 0:
        assert error is None
        return
    assert error is not None
    assert re.search(kind.says, str(error)), str(error)
    assert str(error).isprintable() and len(str(error)) < 4500
    assert isinstance(error, UsageError) == (kind.code == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "false features", "another's answer", "dripping frame", "reset", "a balancer's own page",
        "escapes in a refusal", "escapes in a field",
        *(pytest.param(name, marks=pytest.mark.long) for name in (
            "false labels", "features that are no numbers", "flipped bit", "half a billion ids", "silence in a frame"
        )),
    ],
)  # fmt: skip
def test_with_another_server_training_goes_on(name: str, honest: Handler) -> None:
    kind = KINDS[name]
    with serving(hostile(honest, kind)) as server, serving(hostile(honest, None)) as other:
        assert train_here(kind, server.url, other.url) is None
        assert server.requests and other.requests


class Trainer:
    """A ``hapi-train`` process whose memory is watched."""

    def __init__(self, server: TinyServer, flags: tuple[str, ...] = (*FLAGS, *PATIENT)) -> None:
        self.started = time.monotonic()
        self.process = ForkedProcess(
            ["hapi.cli.train", "--no-output", *flags, "--server", server.url],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        # Should it grow all the same, it and not the machine runs out.
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (6 << 30, 6 << 30))
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError, AssertionError):  # it has ended
            while self.process.poll() is None:
                self.peak = max(self.peak, peak_bytes(self.process.pid))
                time.sleep(0.02)

    def ended(self) -> tuple[int, str, float]:
        """(exit code, what it said on stderr, seconds)."""
        try:
            _, errors = self.process.communicate(SECONDS + 30)
        finally:
            self.process.kill()
        return self.process.wait(240), errors, time.monotonic() - self.started


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in REAL[::3] else pytest.mark.long) for n in REAL]
)
def test_a_trainer_ends_well(name: str, honest: Handler) -> None:
    kind = KINDS[name]
    with serving(hostile(honest, kind)) as server:
        trainer = Trainer(server, flags_for(kind))
        code, errors, seconds = trainer.ended()
    assert code == kind.code, errors
    assert "Traceback" not in errors
    assert all(line.isprintable() for line in errors.splitlines()), errors
    if kind.code:
        *_, last = errors.splitlines()
        assert last.startswith("hapi-train: error: ") and re.search(kind.says, last), last
    assert seconds < SECONDS
    assert trainer.peak < MOST_BYTES, f"{trainer.peak >> 20} MiB"


@pytest.mark.slow
def test_the_honest_server_behind_it_is_one(honest: Handler) -> None:
    """Without a misbehaviour training goes through."""
    assert len(KINDS) > 60 and set(REAL) <= set(KINDS)
    with serving(hostile(honest, None)) as server:
        trainer = Trainer(server)
        code, errors, _ = trainer.ended()
    assert (code, errors) == (0, "")
    assert trainer.peak < MOST_BYTES * 2 // 3, f"{trainer.peak >> 20} MiB"


@pytest.mark.slow
def test_a_trainer_without_descriptors_does_not_blame_the_server(honest: Handler) -> None:
    """It can open nothing more after its first answer, whose connection is closed."""
    answered, limited = threading.Event(), threading.Event()

    def reply(connection: socket.socket, request: bytes) -> bool:
        answered.set()
        limited.wait(SECONDS)
        hostile(honest, None)(connection, request)
        return False

    with serving(reply) as server:
        trainer = Trainer(
            server, (*FLAGS[2:], *PATIENT)
        )  # the list of datasets first, and then the description
        assert answered.wait(SECONDS)
        resource.prlimit(trainer.process.pid, resource.RLIMIT_NOFILE, (3, 3))
        limited.set()
        code, errors, _ = trainer.ended()
    assert code == 1, errors
    assert "Traceback" not in errors
    *_, last = errors.splitlines()
    assert re.search("too many files are open on this side; raise its limit .ulimit -n", last), errors
