"""Settings of servers under Ray Serve, the list of servers, and what it is asked with."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

import hapi
from hapi.cli.main import main
from hapi.cluster.roster import KEPT_SECONDS, Roster
from hapi.cluster.settings import read_settings
from hapi.config.settings import load
from hapi.errors import HapiError
from hapi.server.settings import ServerSettings


def test_a_servers_settings_are_read_by_its_own_reader(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("store: s3://bucket/prefix\nmax_queued: 7\nlame_duck: 3s\n")
    found = read_settings({"config": str(file), "replicas": "3", "allow_model": ["a.b:c"], "max_running": 2})
    assert (found.replicas, found.highest, found.port) == (3, 12, 0)
    written = tmp_path / "replica.yaml"
    written.write_text(yaml.safe_dump(found.of_server()))
    of_server = load(ServerSettings, written).value
    assert (of_server.store, of_server.max_queued, of_server.lame_duck) == ("s3://bucket/prefix", 7, 3.0)
    assert set(found.of_server()) == {"store", "max_queued", "lame_duck", "allow_model", "max_running"}
    assert (of_server.allow_model, of_server.max_running) == (("a.b:c",), 2)


def test_a_folder_is_the_same_for_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_settings({"store": "here", "tenants": "who.yaml", "cache_dir": "/kept", "accounts": "use"})
    assert (found.store, found.tenants) == (str(tmp_path / "here"), str(tmp_path / "who.yaml"))
    assert (found.cache_dir, found.accounts, found.token_file) == ("/kept", str(tmp_path / "use"), None)
    found = read_settings({"store": "here", "tls_cert": "cert.pem", "tls_key": "/key.pem"})
    assert (found.tls_cert, found.tls_key) == (str(tmp_path / "cert.pem"), "/key.pem")
    assert found.of_server()["tls_key"] == "/key.pem" and "node_names" not in found.of_server()
    assert read_settings({"store": "s3://bucket/prefix"}).store == "s3://bucket/prefix"


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({}, "store"),
        ({"store": "s", "replica": 2}, "replicas"),
        ({"store": "s", "replicas": "0"}, "replicas"),
        ({"store": "s", "replicas": 5, "max_replicas": 4}, "not from min_replicas 1 to max_replicas 4"),
        ({"store": "s", "gpus": "nan"}, "gpus"),
        ({"store": "s", "autoscale": "perhaps"}, "autoscale"),
        ({"store": "s", "tls_cert": "a.pem"}, "tls_cert and tls_key belong together"),
    ],
)
def test_what_cannot_be_is_one_line(args: dict[str, Any], match: str) -> None:
    with pytest.raises(HapiError, match=match) as caught:
        read_settings(args)
    assert "\n" not in str(caught.value)


def test_servers_that_report_no_more_or_leave_are_not_listed() -> None:
    roster = Roster()
    roster.report("1", "http://b:1", 0.0)
    roster.report("2", "http://a:1", 5.0)
    roster.report("3", "http://a:1", 5.0)
    assert roster.urls(6.0) == ["http://a:1", "http://b:1"]
    assert roster.urls(KEPT_SECONDS + 1) == ["http://a:1"]
    roster.report("2", None, 12.0)
    roster.report("3", None, 12.0)
    assert roster.urls(12.0) == []


def test_the_file_of_deploy_is_taken() -> None:
    file = Path(hapi.__file__).parents[1] / "deploy" / "ray" / "fleet.yaml"
    (application,) = yaml.safe_load(file.read_text())["applications"]
    found = read_settings(application["args"])
    assert (found.host, found.gpus, found.autoscale) == ("0.0.0.0", 1.0, False)
    module, _, name = application["import_path"].partition(":")
    pytest.importorskip("ray", reason="the extra ray is not installed")
    assert callable(getattr(importlib.import_module(module), name))


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_the_list_is_printed_as_a_trainer_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b'{"servers": ["http://a:1", "http://b:2/"]}') as url:
        assert main(["cluster", "urls", url]) == 0
    assert capsys.readouterr().out == "http://a:1,http://b:2\n"
    urls = [f"http://a:{number}" for number in range(1, 1001)]
    with answering(json.dumps({"servers": urls}).encode()) as url:
        assert main(["cluster", "urls", url]) == 0
    assert capsys.readouterr().out == ",".join(urls) + "\n", "a long one is not cut"


def test_a_list_without_tls_may_name_servers_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """An authority for the servers is no reason to refuse the list."""
    with answering(b'{"servers": ["https://a:1"]}') as url:
        assert main(["cluster", "urls", url, "--ca-file", "authority.pem"]) == 0
    assert capsys.readouterr().out == "https://a:1\n"


@pytest.mark.parametrize(
    ("body", "status", "match"),
    [
        (b'{"servers": []}', 200, "no server of the fleet takes work now"),
        (b'{"servers": ["ftp://a"]}', 200, "no list of servers"),
        (b'{"servers": [1]}', 200, "no list of servers"),
        (b"[]", 200, "no list of servers"),
        (b"<html>", 200, "no list of servers"),
        (b"no", 404, "no list of servers"),
    ],
)
def test_what_is_no_list_is_one_line(
    body: bytes, status: int, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(body, status) as url:
        assert main(["cluster", "urls", url]) == 1
    said = capsys.readouterr()
    assert match in said.err and said.err.count("\n") == 1 and not said.out
