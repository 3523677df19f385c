"""``hapi simulate``: a small replay, and one clear line for what cannot be simulated."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from support.fleets import a_job, a_profile
from support.http_tools import EXTRACT, Known, exchange, make_store, served, until
from support.tiny_http import answer, serving

from hapi.cli.main import main

FLEET = """\
seconds: 6s
warm_up: 1s
servers:
  - {name: store, count: 2, bandwidth: 800kbps, link: wide}
trainers:
  - {name: job, profile: profile.json, count: 3, split: 1, spread: 1s}
links:
  - {name: wide, bandwidth: 1200kbps}
events:
  - {what: slow, name: store, at: 2s, seconds: 1s, factor: 3}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    a_profile(outputs=(1000, 100, 10), forward=(0.01, 0, 0)).save(str(tmp_path / "profile.json"), a_job())
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_a_replay_prints_what_the_fleet_did(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "replay", str(fleet)]) == 0
    out = capsys.readouterr().out
    assert "samples/s" in out and "slot wait p50 / p99" in out and "split 1: 3" in out


def test_a_replay_as_json(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "replay", str(fleet), "--json", "--seconds", "4", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seconds"] == pytest.approx(3.0)
    assert 100 < document["samples_per_second"] <= 150, "1.2 Mbit/s of 1000 bytes, which pacing nearly fills"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("count: 2", "cuont: 2", "fleet.yaml:4:19: unknown key"),
        (
            "servers:\n  - {name: store, count: 2, bandwidth: 800kbps, link: wide}\n",
            "",
            "fleet.yaml:1:1: 'servers' is missing; set it in the file\n",
        ),
        ("{name: store, count", "{count", "fleet.yaml:4:5: 'servers.name' is missing; set it in the file\n"),
        ("split: 1", "split: 7", "split is 7, the last of"),
        ("profile: profile.json", "profile: gone.json", "gone.json"),
        ("link: wide", "link: thin", "servers: store: link: there is no 'thin'"),
        ("name: store, at", "name: shop, at", "there is no 'shop'; the fleet has store"),
        ("name: store, at", "name: store, count: 3, at", "events: slow: count is 3, but store has 2"),
        ("warm_up: 1s", "warm_up: 9s", "must be below seconds"),
        ("split: 1", "split: 1, servers: 9", "servers is 9, but the fleet has 2"),
        ("bandwidth: 800kbps", "bandwidth: 8", "has no unit"),
        ("links:\n", "links:\n  - {name: wide, bandwidth: 1Gbps}\n", "two are called 'wide'"),
    ],
)
def test_a_wrong_fleet_is_one_line(
    fleet: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
) -> None:
    fleet.write_text(FLEET.replace(before, after, 1))
    assert main(["simulate", "replay", str(fleet)]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_without_simpy_it_says_what_to_install(
    fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert main(["simulate", "replay", str(fleet)]) == 2
    assert "pip install 'hapi-split[simulate]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_running_server_is_observed(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(fleet.parent / "store")
    profile, out = str(fleet.parent / "profile.json"), str(fleet.parent / "seen.json")
    with served(store) as server:
        known, over = Known(store), threading.Event()

        def ask() -> None:
            """Keep the server busy."""
            while not over.wait(0.05):
                assert exchange(server.port, "POST", EXTRACT, known.extract()).status == 200

        asking = threading.Thread(target=ask)
        asking.start()
        url = f"http://127.0.0.1:{server.port}"
        command = ["simulate", "observe", url, "--profile", profile, "--out", out, "--seconds", "1"]

        def observed() -> bool:
            """Whether a request ended in the second that was observed; on a loaded machine none may."""
            assert main([*command, "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document == json.loads(Path(out).read_text())
            (seen,) = document["servers"]
            if seen["requests"] == 0:
                return False
            assert seen["sent_bytes"] > 0 and seen["slots"] >= 1
            return True

        try:
            until(observed, 120, "a second in which a request ends")
        finally:
            over.set()
            asking.join()


def test_servers_of_a_list_are_observed_and_may_be_away_for_a_moment(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = str(fleet.parent / "profile.json"), str(fleet.parent / "seen.json")
    looks = 0

    def status(connection: socket.socket, request: bytes) -> bool:
        nonlocal looks
        looks += 1
        if looks in (2, 3):  # a kept connection that ends is tried once more
            return False
        tenant = {
            "name": "ann", "served": 10 * looks, "sent_bytes": 100 * looks, "cost_seconds": 0.1, "expected_wait": 0.0,
            "shed": {"full": 0},
        }  # fmt: skip
        queue = {"running": 1, "slots": 4, "queued": 0, "max_queued": 128}
        document = {"server": "one", "queue": queue, "tenants": [tenant], "running": []}
        return answer(json.dumps(document).encode())(connection, request)

    with serving(status) as server, serving(answer(json.dumps({"servers": [server.url]}).encode())) as head:
        command = ["simulate", "observe", f"fleet+{head.url}", "--profile", profile, "--out", out, "--json"]
        assert main([*command, "--seconds", "0.4"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)["servers"]
    assert seen["url"] == server.url and looks > 2 and seen["requests"] == 10 * (looks - 1)


def test_a_server_that_is_absent_is_one_line(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, out = str(fleet.parent / "profile.json"), str(fleet.parent / "seen.json")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nothing listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        command = ["simulate", "observe", url, "--profile", profile, "--out", out]
        assert main([*command, "--seconds", "0.1"]) == 1
    err = capsys.readouterr().err
    assert url in err and err.count("\n") == 1
