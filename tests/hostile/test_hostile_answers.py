"""Nonsense in place of each document that a client or a command asks a server for: one line, soon, or no harm at all.

Whatever a server answers must stand in one of the tables here, so that a new route is covered or named as nobody's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fleets import a_job, a_profile
from support.hostile_server import CHUNKED, DOCUMENT, FAREWELL, Act, body, once, without_end
from support.http_tools import COUNT, Known, exchange, served, with_field
from support.local_job import settings_of
from support.tiny_http import Reply, serving

from hapi.cli.main import main
from hapi.cli.status import configure
from hapi.cli.status import run as show_status
from hapi.client.caching.keys import server_codes
from hapi.client.connect import share_processors
from hapi.client.dataset_choice import choose_dataset, training_counts
from hapi.client.models import open_client_model
from hapi.client.settings import ModelSettings
from hapi.client.transport.server_pool import ServerPool
from hapi.cluster.simulation.observation import observation_of, reading_of
from hapi.errors import HapiError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.wire import held_out, messages
from hapi.wire.frames import Buffer
from hapi.wire.transport.http import Handler, LoopbackTransport
from hapi.wire.warm_up import WARM_PATH

SECONDS = 300.0
"""A second or two on an idle machine."""
Call = Callable[[ServerPool, Known], object]


def count_held_out(pool: ServerPool, known: Known) -> object:
    return training_counts(settings_of(), pool, choose_dataset(pool, "digits"), COUNT // 2)


def model(pool: ServerPool, known: Known) -> object:
    return open_client_model(
        ModelSettings(model="store:pushed"), pool, None, seed=0, classes=10, shape=(3, 64, 64)
    )


def codes(pool: ServerPool, known: Known) -> object:
    return share_processors(pool), server_codes(pool, [known.dataset.reference])


CALLS: dict[str, Call] = {
    messages.VERSION_PATH: codes,
    messages.DATASETS_PATH: lambda pool, known: choose_dataset(pool, None),
    f"{messages.DATASETS_PATH}/{{name}}": lambda pool, known: choose_dataset(pool, "digits"),
    f"{messages.DATASETS_PATH}/{{name}}/changed": codes,
    f"{messages.DATASETS_PATH}/{{name}}/{held_out.PART}/{{seed}}/{{count}}": count_held_out,
    f"{messages.MODELS_PATH}/{{model}}": model,
    f"{messages.STRUCTURES_PATH}/{{digest}}": model,
}
"""What a client asks for as a document, and how it does."""
OTHERS: Mapping[str, str] = {
    messages.EXTRACT_PATH: "frames: test_hostile_server.py",
    messages.SAMPLES_PATH: "frames: test_hostile_server.py",
    messages.TENSORS_PATH: "frames, each tensor verified: test_client_models.py",
    f"{messages.PACKS_PATH}/{{pack}}": "bytes, each tensor verified: test_wrong_bytes.py",
    messages.STATUS_PATH: "commands, below",
    messages.PAGE_PATH: "the list of a fleet there, below",
    WARM_PATH: "the answer is not read",
    **dict.fromkeys(
        (messages.MODELS_PATH, messages.HEALTH_PATH, messages.READY_PATH, messages.METRICS_PATH, messages.OPENAPI_PATH),
        "no client asks",
    ),
}  # fmt: skip
WRONG = (
    None,
    True,
    -1,
    0,
    1e308,
    (1 << 63) - 1,
    "",
    "\x1b[2J",
    [],
    {},
    [[]],
    "x" * 5000,
    ["digits"],
    {"a": []},
)
NOT_JSON = (
    b"", b"<html>", bytes(range(256)), b"null", b"[]", b"{}", b'"x"', b"5", b"[" * 100_000, b'{"a": NaN}', b"\xff{}",
)  # fmt: skip


def places(document: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys to every value of a document, of the first two in each list."""
    if prefix:
        yield prefix
    inner = document.items() if isinstance(document, dict) else ()
    for key, value in inner or (enumerate(document[:2]) if isinstance(document, list) else ()):
        yield from places(value, (*prefix, key))


def variants(document: Any, each: int, most: int = 60) -> Iterator[Any]:
    """Copies with one value replaced: for at most so many values ``each`` so many wrong ones, all of them by turns."""
    wrong, found = itertools.cycle(WRONG), list(places(document))
    for place in found[:: -(-len(found) // most)]:
        for value in itertools.islice(wrong, each):
            yield with_field(document, place, value)


@pytest.fixture(scope="module")
def honest(folder: Path) -> Iterator[Handler]:
    service = Service(
        ServerSettings(store=str(folder), device="cpu", share_memory=0), open_store(str(folder))
    )
    try:
        yield loopback_handler(service)
    finally:
        service.close()


class Changing:
    """Answers as an honest server does, but for one path."""

    def __init__(self, honest: Handler, path: str) -> None:
        self._honest, self._path, self.asked = honest, path.split("/"), 0
        self.answer: bytes | None = None
        """Given in place of the honest one."""
        self.last = b""

    def __call__(
        self, method: str, path: str, asked: bytes
    ) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        parts = path.split("/")
        fits = len(parts) == len(self._path) and all(
            wanted in (part, "{" + wanted.strip("{}") + "}")
            for wanted, part in zip(self._path, parts, strict=True)
        )
        if not fits:
            return self._honest(method, path, asked)
        self.asked += 1
        if self.answer is not None:
            return 200, {}, iter([self.answer])
        status, headers, buffers = self._honest(method, path, asked)
        self.last = b"".join(bytes(b) for b in buffers)
        return status, headers, iter([self.last])


def test_every_route_is_covered(folder: Path) -> None:
    with served(folder) as running:
        routes = {resource.canonical for resource in running.application.web.router.resources()}
    assert routes == CALLS.keys() | OTHERS.keys(), "a route is new: how does a client read its answer?"


@pytest.mark.parametrize("path", CALLS)
def test_a_client_reads_anything(
    path: str, honest: Handler, known: Known, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    handler = Changing(honest, path)
    CALLS[path](ServerPool([LoopbackTransport(handler)]), known)
    assert handler.asked, f"the call does not ask for {path}"
    document = json.loads(handler.last)
    refused = 0
    most = 10 if CALLS[path] is model else 50
    for number, answer in enumerate(
        (*NOT_JSON, *(json.dumps(v).encode() for v in variants(document, 1, most)))
    ):
        handler.answer = answer
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))  # no structure is kept
        try:
            CALLS[path](ServerPool([LoopbackTransport(handler)]), known)
        except HapiError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 6000
    assert refused >= 3


# -- commands ---------------------------------------------------------------------------------------------------------


COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status", "{url}", "--timeout", "1"),
    "urls": ("cluster", "urls", "{url}", "--timeout", "1"),
    "observe": ("simulate", "observe", "{url}", "--profile", "{folder}/profile.json", "--out", "{folder}/seen.json",
                "--seconds", "0.1"),
}  # fmt: skip
SLOW = ("dripping document", "dripping head", "dripping 100-continue", "silence", "silence after the head",
        "content length too long")  # fmt: skip
HEAVY = (
    "document without end",
    "endless 100-continue",
    "nested deeply",
    "millions of values",
    "number without end",
)
WAITED_FOR = (*SLOW, *HEAVY, "chunks without end")
"""What takes its second, mostly of one command alone: all have the same transport, and only limits of their own."""
QUICK = ("early hints for ever", "endless headers", "endless header line", "http/0.9", "another protocol", "reset",
         "redirect to itself", "content length too short", "cut off", "compressed", "nested just so", "no number",
         "infinite number", "field given twice", "no utf-8", "escapes in an error", "escapes in a refusal",
         "come back in 31 years")  # fmt: skip
NONSENSE: dict[str, Act] = {
    **{name: DOCUMENT[name].act for name in (*SLOW, *HEAVY, *QUICK)},
    "nothing": once(b""),
    "a page": body(lambda: b"<html>It works!</html>", "Content-Type: text/html"),
    "binary": body(lambda: bytes(range(256)) * 100),
    "empty": body(lambda: b""),
    "another document": body(lambda: b'{"error": "no"}'),
    "chunks without end": without_end(CHUNKED, b"1\r\n \r\n"),
    "half a head": once(FAREWELL[:30]),
}


@pytest.fixture(scope="module")
def status(folder: Path, known: Known) -> dict[str, Any]:
    """The status of a server that has worked, and has failed."""
    with served(folder) as running:
        exchange(running.port, "POST", messages.EXTRACT_PATH, known.extract())
        document: dict[str, Any] = exchange(running.port, "GET", messages.STATUS_PATH).json()
    failure = {
        "at": 1.0,
        "request_id": "x",
        "tenant": "x",
        "path": "/",
        "status": 500,
        "kind": "x",
        "line": "x",
    }
    work = {"split": 1, "total": 20}
    return {**document, "errors": [failure], "running": [work]}


def run(
    command: str, act: Act, honest: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command against a server that answers by ``act``."""

    def reply(connection: socket.socket, request: bytes) -> bool:
        if request[:1] != b"\x16":  # a greeting of TLS
            connection.settimeout(SECONDS)
            act(connection, json.dumps(honest).encode())
        return False

    return against(command, reply, folder, capsys)


def against(
    command: str, reply: Reply, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    a_profile(outputs=(1000, 100, 10), forward=(0.01, 0, 0)).save(str(folder / "profile.json"), a_job())
    began = time.monotonic()
    with serving(reply) as server:
        code = main([part.format(url=server.url, folder=folder) for part in COMMANDS[command]])
    assert time.monotonic() - began < SECONDS
    said = capsys.readouterr()
    return code, said.out, said.err


def crossed(names: Sequence[str], commands: Sequence[str] = tuple(COMMANDS)) -> list[Any]:
    return [
        pytest.param(command, name, marks=pytest.mark.slow if name in WAITED_FOR else ())
        for name in names
        for command in commands
        if command == "status" or name not in WAITED_FOR or name == SLOW[0]
    ]


@pytest.mark.parametrize(("command", "name"), crossed(list(NONSENSE)))
def test_a_command_ends_in_one_line(
    command: str,
    name: str,
    status: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hapi.cli.simulate._STATUS_SECONDS", 1.0)
    code, out, err = run(command, NONSENSE[name], status, tmp_path, capsys)
    assert code in (1, 2) and out == ""
    assert err.count("\n") == 1 and err[:-1].isprintable() and len(err) < 4500
    assert err.startswith(f"hapi {COMMANDS[command][0]}: error: ")
    assert not (tmp_path / "seen.json").exists()


def statuses(status: dict[str, Any]) -> Iterator[Any]:
    """Wrong ones, and those of a later version."""
    yield from variants(status, 2, 100)
    yield from ({**status, name: [*status[name]] * 2000} for name in ("tenants", "errors", "running"))
    yield from (None, [], "x", 5)


def test_each_field_of_a_status_may_be_anything(
    status: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: list[Any] = []

    class Answering:
        def __init__(self, url: str, **_: Any) -> None:
            self.url = url

        def call(self, method: str, path: str) -> Any:
            return answer[0]

        def close(self) -> None: ...

    monkeypatch.setattr("hapi.cli.status.HttpTransport", Answering)
    parser, refused = argparse.ArgumentParser(), 0
    configure(parser)
    arguments = parser.parse_args(["http://127.0.0.1:1"])
    for answer[:] in ([told] for told in statuses(status)):
        try:
            assert show_status(arguments) in (0, 1)
        except HapiError as error:
            refused += 1
            assert len(str(error)) < 4000
        said = capsys.readouterr().out
        assert said.count("\n") < 3000 and all(line.isprintable() for line in said.splitlines())
    assert refused > 10


def test_each_field_of_an_observation_may_be_anything(status: dict[str, Any]) -> None:
    profile, refused = a_profile(outputs=(1000, 100, 10), forward=(0.01, 0, 0)), 0
    for told in statuses(status):
        try:
            readings = [reading_of(told)] * 2
            found = observation_of({"http://127.0.0.1:1": readings}, 1.0, profile, a_job())
            json.dumps(found.to_json(), allow_nan=False)
            assert all(len(line) < 5000 for line in found.lines())
        except HapiError as error:
            refused += 1
            assert len(str(error)) < 6000
    assert refused > 10
