"""Settings of servers under Ray Serve: those of ``hapi-server``, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hapi.cluster.scaling import ScalingRule
from hapi.config.fields import flat, settings_fields
from hapi.config.settings import load, setting
from hapi.errors import UsageError
from hapi.server.settings import ServerSettings

MOST_REPLICAS = 4096
PATHS = ("store", "provider_ca", "cache_dir", "token_file", "tenants", "accounts", "tls_cert", "tls_key")
"""Settings that name files and folders of the operator's, where the store is one."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(ServerSettings):
    """Settings of each replica's server, and of their number and place."""

    port: int = setting(
        "port that each replica listens on; 0: any free one, so that a node may have several",
        default=0,
        low=0,
        high=65535,
    )
    replicas: int = setting("servers at the start", default=1, low=1, high=MOST_REPLICAS, unit="count")
    min_replicas: int = setting("fewest servers", default=1, low=1, high=MOST_REPLICAS, unit="count")
    max_replicas: int | None = setting(
        "most servers (default: four times as many as at the start)",
        default=None,
        low=1,
        high=MOST_REPLICAS,
        unit="count",
    )
    autoscale: bool = setting(
        "change their number by what trainers wait; off: log and export what would be done", default=False
    )
    wait_seconds: float = setting(
        "trainers' wait (hapi_trainer_wait_seconds) from which on servers are missing",
        default=0.05,
        low=1e-3,
        high=3600.0,
        unit="duration",
    )
    cpus: float = setting("processors of a replica, by which Ray places it", default=1.0, low=0, high=4096)
    gpus: float = setting("GPUs of a replica, which its server alone sees", default=0.0, low=0, high=1024)
    node_names: bool = setting(
        "call nodes by their host names, as a certificate has them, and not by their addresses", default=False
    )

    @property
    def highest(self) -> int:
        """Most servers."""
        return min(MOST_REPLICAS, 4 * self.replicas) if self.max_replicas is None else self.max_replicas

    @property
    def rule(self) -> ScalingRule:
        """Bounds and delays of their number."""
        return ScalingRule(lowest=self.min_replicas, highest=self.highest, wait_seconds=self.wait_seconds)

    def of_server(self) -> dict[str, Any]:
        """Return the settings of one ``hapi-server`` as its file has them, without its port, and without defaults."""
        known = {f.name: f.default for f in settings_fields(ServerSettings)}
        own, left_out = flat(self), ("port", "exit_with_stdin")
        found = {n: own[n] for n, default in known.items() if own[n] != default and n not in left_out}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def read_settings(args: Mapping[str, Any]) -> ReplicaSettings:
    """Return the settings in ``args``, whose ``config`` names a file with more of them.

    Raises:
        HapiError: an unknown setting, or one that cannot be; one line.
    """
    given = dict(args)
    path = given.pop("config", None)
    found = load(ReplicaSettings, path, given).value
    if not found.min_replicas <= found.replicas <= found.highest:
        raise UsageError(
            f"replicas {found.replicas}: not from min_replicas {found.min_replicas} to max_replicas {found.highest}"
        )
    if (found.tls_cert is None) != (found.tls_key is None):
        raise UsageError("tls_cert and tls_key belong together: give both")
    # Replicas work in folders of their own.
    paths: dict[str, Any] = {
        name: str(Path(path).absolute())
        for name in PATHS
        if (path := getattr(found, name)) is not None and "://" not in path
    }
    return replace(found, **paths)
