"""``hapi status`` of several servers: one fleet, dead and foreign servers among them."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.harness import hapi, server
from support.http_tools import EXTRACT, Known, ServedApplication, exchange, make_store, served

from hapi.cli.main import main
from hapi.server.tenants.by_token import read_tenants


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[list[ServedApplication]]:
    """Two servers; the first has answered a request, and refused a wrong one."""
    known = Known(folder)
    with served(folder) as first, served(folder) as second:
        assert exchange(first.port, "POST", EXTRACT, known.extract()).status == 200
        assert exchange(first.port, "POST", EXTRACT, known.extract([10**6])).status == 404
        yield [first, second]


def url_of(server: ServedApplication) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL where nothing listens, and nothing will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def telling(document: Any) -> Iterator[str]:
    """URL of a server that answers everything by ``document``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def status(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["status", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.slow
def test_a_fleet_in_lines(two: list[ServedApplication], capsys: pytest.CaptureFixture[str]) -> None:
    lines = status(capsys, *map(url_of, two)).splitlines()
    assert lines[0] == "2 servers: 2 serving; 0 of 8 slots busy, 0 queued"
    assert [line for line in lines if line.startswith("http")] == [
        line for line in lines if any(line.startswith(f"{url_of(one)}: serving, hapi ") for one in two)
    ]
    tenants = [line for line in lines if line.startswith("  tenant ")]
    assert len(tenants) == 1 and " 1 served, " in tenants[0] and "next waits 0.0 s" in tenants[0]
    assert any(line.startswith("  error 404 of ") and f" at {url_of(two[0])}: " in line for line in lines)


def test_a_fleet_as_json(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], nowhere: str
) -> None:
    found = json.loads(status(capsys, *map(url_of, two), nowhere, "--json", code=1))
    assert found["fleet"]["states"] == {"serving": 2, "absent": 1}
    assert found["fleet"]["slots"] == 8 and found["fleet"]["tenants"][0]["served"] == 1
    assert [one["url"] for one in found["servers"]] == [*map(url_of, two), nowhere]
    assert [one["status"] is None for one in found["servers"]] == [False, False, True]
    assert "is the server running" in found["servers"][2]["error"]


def test_a_dead_one_is_told(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], nowhere: str
) -> None:
    lines = status(capsys, url_of(two[0]), nowhere, code=1).splitlines()
    assert lines[0] == "2 servers: 1 serving, 1 absent; 0 of 4 slots busy, 0 queued"
    assert any(line.startswith(f"{nowhere}: absent: ") and "is the server running" in line for line in lines)


def test_a_server_by_two_addresses_counts_once(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str]
) -> None:
    again = f"http://localhost:{two[0].port}"
    lines = status(capsys, url_of(two[0]), again, url_of(two[0])).splitlines()
    assert lines[0] == "1 server: 1 serving; 0 of 4 slots busy, 0 queued"
    assert f"{again}: the same server as {url_of(two[0])}" in lines


def test_a_server_that_drains_takes_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(folder) as one, served(folder) as other:
        one.application.draining = True
        found = json.loads(status(capsys, url_of(one), url_of(other), "--json"))
        assert found["fleet"]["states"] == {"draining": 1, "serving": 1}
        other.application.draining = True
        assert "no server takes more" in status(capsys, url_of(one), url_of(other))


@pytest.mark.parametrize("change", [
    {"queue": []}, {"queue": {"running": "many"}}, {"devices": 5}, {"devices": [{}]}, {"tenants": [{"name": []}]},
    {"tenants": [{"name": "a", "running": "x"}]}, {"errors": [{"at": "now"}]}, {"state": ["serving"]}, {"server": 3},
    {"uptime": "long"},
], ids=str)  # fmt: skip
def test_a_foreign_answer_is_one_line(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    good = exchange(two[0].port, "GET", "/v1/status").json()
    with telling({**good, **change}) as url:
        assert main(["status", url]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "another form than agreed" in err
        lines = status(capsys, url, url_of(two[1]), code=1).splitlines()
    assert lines[0].startswith("2 servers: 1 serving, 1 unknown") or lines[0].startswith(
        "2 servers: 1 unknown, 1 serving"
    )


# -- the page ----------------------------------------------------------------------------------------------------------


HOSTILE = "<img src=x onerror=alert(1)>&\x00"


def test_a_fleet_as_a_page(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], nowhere: str, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.html"
    lines = status(capsys, *map(url_of, two), nowhere, "--html", str(path), code=1).splitlines()
    assert lines[0].startswith("3 servers: 2 serving, 1 absent"), "the lines are printed as ever"
    page = path.read_text(encoding="utf-8")
    for words in (
        *map(url_of, two),
        nowhere,
        "2 serving, 1 absent",
        "0 of 8",
        "default",
        "is the server running",
    ):
        assert words in page
    assert 'http-equiv="refresh"' in page, "a browser follows what is written anew"
    assert not re.search(r"<script|https?://(?!127\.0\.0\.1|localhost)| src=", page), "it loads nothing"


def test_what_servers_tell_is_text_on_the_page(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, path = exchange(two[0].port, "GET", "/v1/status").json(), tmp_path / "fleet.html"
    error = {"at": 1e30, "tenant": HOSTILE, "path": "/", "status": 500, "kind": "x", "line": HOSTILE}
    tenants = [{**good["tenants"][0], "name": HOSTILE}]
    hostile = {
        "hapi": HOSTILE,
        "state": HOSTILE,
        "tenants": tenants,
        "errors": [error],
        "certificate": HOSTILE,
    }
    with telling({**good, **hostile}) as url:
        status(capsys, url, "--html", str(path), code=1)
    page = path.read_text(encoding="utf-8")
    assert "<img" not in page and "\x00" not in page and "&lt;img src=x onerror=alert(1)&gt;&amp;" in page


def test_the_page_shows_what_the_token_may_see_and_not_the_token(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A tenant with lists sees its own; one that may not ask for the status gets none of the page's rows."""
    path, page = tmp_path / "tenants.yaml", tmp_path / "fleet.html"
    path.write_text(
        "all-of-it: {token: sees-everything-1}\nnarrow: {token: sees-its-own-123, datasets: [digits]}\n"
        "blind: {token: sees-nothing-at-1, status: no}\n"
    )
    seen = {}
    with served(folder, tenants=read_tenants(str(path), None)) as one:
        known = Known(folder).extract([10**6])
        refused = exchange(one.port, "POST", EXTRACT, known, {"Authorization": "Bearer sees-everything-1"})
        assert refused.status == 404
        for token in ("sees-everything-1", "sees-its-own-123", "sees-nothing-at-1"):
            (tmp_path / "token").write_text(token)
            arguments = ("status", url_of(one), url_of(one), "--token-file", str(tmp_path / "token"))
            main([*arguments, "--html", str(page)])
            capsys.readouterr()
            seen[token] = page.read_text(encoding="utf-8") if page.exists() else ""
            page.unlink(missing_ok=True)
    everything, own, nothing = seen.values()
    assert (
        all(name in everything for name in ("all-of-it", "narrow", "blind")) and "Last errors" in everything
    )
    assert "narrow" in own and "all-of-it" not in own and "Last errors" not in own
    assert not any(name in nothing for name in ("all-of-it", "narrow", "blind"))
    assert not any(token in text for token in seen for text in seen.values())


def test_a_page_that_cannot_be_written(
    two: list[ServedApplication], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["status", url_of(two[0]), "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_wrong_url_is_wrong_use(two: list[ServedApplication], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", url_of(two[0]), "store:8099"]) == 2
    assert "store:8099" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_which_one_dies(folder: Path) -> None:
    with server(folder) as one, server(folder) as other:
        assert hapi("status", one.url, other.url).stdout.startswith("2 servers: 2 serving; ")
        other.kill()
        lines = hapi("status", one.url, other.url, code=1).stdout.splitlines()
        assert lines[0].startswith("2 servers: 1 serving, 1 absent; ")
