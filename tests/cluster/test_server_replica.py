"""One replica without Ray: its server's health, what it reports, its death and its drain."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.certificates import self_signed
from support.forked import fork_child_servers
from support.harness import wait_for

from hapi.cluster.settings import read_settings
from hapi.errors import HapiError
from hapi.wire.messages import STATUS_PATH
from hapi.wire.transport.http import HttpTransport

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow


class Discovery:
    """Stands for the list of servers: keeps what is reported."""

    def __init__(self) -> None:
        self.reported: list[str | None] = []
        self.report = SimpleNamespace(remote=self._remote)

    def _remote(self, server: str, url: str | None) -> Any:
        self.reported.append(url)
        return SimpleNamespace(result=lambda timeout_s: None)


@pytest.fixture
def discovery(monkeypatch: pytest.MonkeyPatch) -> Discovery:
    from ray import serve

    found = Discovery()
    context = SimpleNamespace(app_name="hapi", replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, application: found)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    return found


def test_a_server_that_does_not_tell_is_asked_now_and_then(discovery: Discovery) -> None:
    from hapi.cluster.ray_serve import REPORT_SECONDS, ServerReplica

    pauses = list[float]()

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > 3

    def call(method: str, path: str) -> Any:
        raise HapiError("nobody there")

    replica: Any = SimpleNamespace(
        url="http://one:1",
        _readings={},
        _over=SimpleNamespace(wait=wait),
        _transport=SimpleNamespace(call=call),
    )
    ServerReplica._report(replica)
    assert pauses == [0.0, *[REPORT_SECONDS] * 3] and discovery.reported == [*["http://one:1"] * 3, None]


def test_its_health_is_its_servers_and_its_end_a_drain(tmp_path: Path, discovery: Discovery) -> None:
    from hapi.cluster.ray_serve import ServerReplica

    settings = read_settings({"store": str(tmp_path), "threads": 1}).of_server()
    replica, doomed = ServerReplica(settings, 0, 30.0), ServerReplica(settings, 0, 30.0)
    try:
        replica.check_health()
        wait_for(lambda: replica.url in discovery.reported and doomed.url in discovery.reported, 60)
        wait_for(replica.record_autoscaling_stats, 60)
        assert replica.record_autoscaling_stats() == {"wait": 0.0, "stalled": 0.0, "busy": 0.0, "jobs": 0.0}
        os.kill(doomed._child.pid, signal.SIGKILL)
        wait_for(lambda: "was killed by SIGKILL" in why_unwell(doomed), 30)
        replica.check_health()
    finally:
        pid = replica._child.pid
        for one in (replica, doomed):
            one.__del__()
    assert discovery.reported.count(None) == 2, "they left the list"
    assert not Path(f"/proc/{pid}").exists() and '"event": "stopped"' in replica._log.last()
    assert not any(t.name == replica._reporting.name for t in threading.enumerate())


def why_unwell(replica: Any) -> str:
    try:
        replica.check_health()
    except HapiError as error:
        return str(error)
    return ""


def test_why_a_server_does_not_start_is_told(tmp_path: Path, discovery: Discovery) -> None:
    from hapi.cluster.ray_serve import ServerReplica

    settings = read_settings({"store": str(tmp_path / "nothing")}).of_server()
    with pytest.raises(HapiError, match=r"the server did not start: .*nothing"):
        ServerReplica(settings, 0, 5.0)


def test_a_replicas_port_speaks_tls(
    tmp_path: Path, discovery: Discovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that trainers use: a certificate of another one is told by its health."""
    from hapi.cluster.ray_serve import ServerReplica

    fork_child_servers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getfqdn", lambda: "elsewhere.example")
    cert, _ = self_signed(tmp_path)
    args = {"store": "store", "threads": 1, "tls_cert": "cert.pem", "tls_key": "key.pem", "host": "0.0.0.0"}
    (tmp_path / "store").mkdir()
    (tmp_path / "token").write_text("s3cret-token")
    settings = read_settings({**args, "token_file": "token"}).of_server()
    replica = ServerReplica(settings, 0, 5.0)
    try:
        replica.check_health()
        assert replica.url.startswith("https://127.0.0.1:")
        trainer = HttpTransport(replica.url, token="s3cret-token", ca_file=str(cert))
        assert trainer.call("GET", STATUS_PATH)["state"] == "serving"
        trainer.close()
        named = ServerReplica(settings, 0, 5.0, node_names=True)
        try:
            assert named.url.startswith("https://elsewhere.example:")
            assert "certificate" in why_unwell(named)
        finally:
            named.__del__()
    finally:
        replica.__del__()
