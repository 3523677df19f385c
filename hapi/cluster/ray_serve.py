"""``hapi-server`` under Ray Serve, which places the servers, watches them and says how many there are.

    serve run hapi.cluster.ray_serve:app store=s3://bucket/prefix replicas=4 gpus=1

Each replica is a process of Ray that has a whole ``hapi-server`` as its child. Trainers talk to the servers directly:
gigabytes of features through Serve's proxy would cost a copy of each and hide slow readers. What goes through the
proxy is the list of the servers, ``{"servers": [URL, ...]}``: trainers follow it at
``--server fleet+http://HEAD:8000``, and ``hapi cluster urls`` prints it.

    starts -> listens -> reports itself, again and again -> leaves the list -> drains -> ends
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from hapi.cluster.ray_policy import READINGS, TrainerWaitPolicy
from hapi.cluster.roster import Roster
from hapi.cluster.settings import read_settings
from hapi.config.token import VARIABLE, read_token
from hapi.errors import HapiError
from hapi.process.child_server import ChildServer
from hapi.wire.messages import READY_PATH, STATUS_PATH
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.urls import pinned_context

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")

REPORT_SECONDS = 2.0
"""Seconds between two reports of a replica, and of what it tells the autoscaler."""
LOOK_BACK_SECONDS = 6.0
"""Seconds over which its readings are averaged."""
ANSWER_SECONDS = 5.0
"""Longest silence of a server that is asked how it is."""
STARTS = 3
"""Times that a replica is started before the fleet counts as unable to."""
END_SECONDS = 15.0
"""Seconds that a server's end may take beside its drain."""
DISCOVERY = "HapiDiscovery"
_ANY_ADDRESS = ("0.0.0.0", "::")


def app(args: dict[str, Any]) -> Application:
    """Return the application of ``args``: settings of ``hapi-server`` and of :class:`ReplicaSettings`, or their file
    as ``config``.

    Raises:
        HapiError: an unknown setting, or one that cannot be; one line.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    settings = read_settings(args)
    end = settings.lame_duck + settings.drain_seconds + END_SECONDS
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=TrainerWaitPolicy,
        policy_kwargs={"rule": asdict(settings.rule), "act": settings.autoscale},
    )
    servers = serve.deployment(
        name="HapiServer",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        graceful_shutdown_timeout_s=end,
        health_check_period_s=REPORT_SECONDS,
        health_check_timeout_s=2 * ANSWER_SECONDS,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=settings.replicas,
            max_replicas=settings.highest,
            metrics_interval_s=REPORT_SECONDS,
            look_back_period_s=LOOK_BACK_SECONDS,
            upscale_delay_s=0.0,  # the rule has delays of its own
            downscale_delay_s=0.0,
            policy=policy,
        ),
        max_constructor_retry_count=STARTS,
    )(ServerReplica)
    discovery = serve.deployment(name=DISCOVERY, ray_actor_options={"num_cpus": 0})(Discovery)
    return discovery.bind(servers.bind(settings.of_server(), settings.port, end, settings.node_names))


class Discovery:
    """List of the servers, for whoever asks through Serve's proxy."""

    def __init__(self, servers: DeploymentHandle[Any]) -> None:
        """``servers`` report themselves; named here so that Serve deploys them with this."""
        self._roster = Roster()

    def report(self, server: str, url: str | None) -> None:
        """Note that ``server`` takes work at ``url``; None: it leaves."""
        self._roster.report(server, url, time.monotonic())

    def __call__(self, request: Any) -> dict[str, Any]:
        """Return the list."""
        return {"servers": self._roster.urls(time.monotonic())}


class ServerReplica:
    """One ``hapi-server``, from its start to its drain."""

    def __init__(
        self, settings: dict[str, Any], port: int, end_seconds: float, node_names: bool = False
    ) -> None:
        """Start a server, and return when it listens.

        Args:
            settings: of the server.
            port: that it listens on; 0: any free one.
            end_seconds: that it has to drain at its end.
            node_names: whether others reach it by the node's host name, and not by its address.
        """
        from ray.util import get_node_ip_address

        self._end_seconds = end_seconds
        self._token = read_token(settings.get("token_file"))
        own = {}
        if self._token is None and settings.get("tenants"):
            self._token = own[VARIABLE] = secrets.token_hex(16)  # a tenant that may see the server's state
        self._log = LogRelay()
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="hapi-server-") as file:
                yaml.safe_dump(settings, file)
                file.flush()
                self._child = ChildServer(
                    ["--config", file.name],
                    title="server",
                    environment=own,
                    stderr=self._log.descriptor,
                    last_output=self._log.last,
                    port=port,
                )
        finally:
            self._log.started()
        node = socket.getfqdn() if node_names else get_node_ip_address()  # type: ignore[no-untyped-call]
        self.url = reachable(self._child.url, node)
        # Asked by the name that trainers use, so that a certificate of another one is a fault of its health.
        self._transport = HttpTransport(
            self.url,
            token=self._token,
            timeout=ANSWER_SECONDS,
            address=urlsplit(self._child.url).hostname,
            tls=pinned_context(settings["tls_cert"]) if "tls_cert" in settings else None,
        )
        self._readings: dict[str, float] = {}
        self._over = threading.Event()
        self._reporting = threading.Thread(target=self._report, daemon=True)
        self._reporting.start()
        log.info("hapi-server listens on %s", self.url)

    def check_health(self) -> None:
        """Raise :class:`HapiError` when the server is gone, drains, is stuck or has no device that works."""
        self._child.check()
        self._transport.call("GET", READY_PATH)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the server told last, for :class:`TrainerWaitPolicy`."""
        return self._readings

    def __del__(self) -> None:
        """Leave the list, and let the server finish what it works on."""
        if not hasattr(self, "_over") or self._over.is_set():
            return
        self._over.set()
        self._reporting.join(2 * ANSWER_SECONDS)
        self._transport.close()
        self._child.drain(self._end_seconds)
        self._child.close()

    def _report(self) -> None:
        """Report the server to the list, and ask how it is, until the end; for a thread of its own."""
        from ray import serve

        context = serve.get_replica_context()
        discovery = serve.get_deployment_handle(DISCOVERY, context.app_name)
        name, over, pause = context.replica_id.unique_id, False, 0.0
        while not over:
            over, pause = self._over.wait(pause), REPORT_SECONDS
            with contextlib.suppress(HapiError):  # health is asked for by Serve
                self._readings = readings_of(self._transport.call("GET", STATUS_PATH))
            try:
                report = discovery.report.remote(name, None if over else self.url)
                report.result(timeout_s=ANSWER_SECONDS)
            except Exception as error:  # of Ray, of many kinds: the list may just start again
                log.debug("hapi: the list of servers was not told: %s", error)


def readings_of(status: dict[str, Any]) -> dict[str, float]:
    """Return what a server's status says for :data:`READINGS`."""
    queue, trainers = status["queue"], status["trainers"]
    busy = min(1.0, queue["running"] / max(1, queue["slots"]))
    values = (trainers["wait"], trainers["stalled"], busy, trainers["jobs"])
    return dict(zip(READINGS, map(float, values), strict=True))


def reachable(url: str, node: str) -> str:
    """Return ``url`` as others reach it: a server that listens on all of its node's addresses is at ``node``."""
    parts = urlsplit(url)
    if parts.hostname not in _ANY_ADDRESS:
        return url
    host = f"[{node}]" if ":" in node else node
    return f"{parts.scheme}://{host}:{parts.port}"


class LogRelay:
    """A server's log, line by line into Serve's log of the replica. The last line is kept for messages."""

    def __init__(self) -> None:
        reading, self.descriptor = os.pipe()
        self._lines: deque[str] = deque(maxlen=1)
        self._thread = threading.Thread(target=self._relay, args=(reading,), daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Return the last line."""
        self._thread.join(0.5)  # one that just ended may have said more
        return "".join(self._lines)

    def started(self) -> None:
        """Note that the server has its end of the pipe, or never will."""
        os.close(self.descriptor)

    def _relay(self, reading: int) -> None:
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line)
                log.info(line.rstrip("\n"))
