"""From settings to servers: those that are named, or one that is started beside a local store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hapi.client.early_checks import local_store
from hapi.client.joint.ranks import ALONE, Ranks
from hapi.client.loading.stall_share import StallShare
from hapi.client.settings import ModelSettings, NetworkSettings, SessionSettings, default_store
from hapi.client.transport.addresses import ServerAddresses
from hapi.client.transport.embedded_server import EmbeddedServer
from hapi.client.transport.fleet_list import listed_servers
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import HapiError
from hapi.factories import is_factory
from hapi.models.warm_up import warm_up_libraries
from hapi.process.machine_id import machine_id
from hapi.process.processors import processor_count
from hapi.wire import messages
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits
from hapi.wire.transport.urls import is_loopback

FIRST_SECONDS = 1.0
"""Seconds in which one of several servers has to answer, or the job begins without it: a machine that is gone may
swallow packets."""


@dataclass(frozen=True, eq=False)
class Connected:
    """The servers of a session. Close it."""

    servers: ServerPool
    urls: list[str]
    store: str | None
    """Store to which this side may push weights; None when only the servers know it."""
    embedded: EmbeddedServer | None = None
    embedded_pid: int | None = None
    """Process of the embedded server, which another rank may have started; None without one."""
    stall: StallShare = field(default_factory=StallShare)
    """Share of waiting that the servers are told."""

    def close(self) -> None:
        """Drop the connections, and end the embedded server if there is one."""
        self.servers.close()
        if self.embedded is not None:
            self.embedded.close()


def share_processors(servers: ServerPool) -> bool:
    """Return whether all servers run on the processors of this process.

    Only servers on the loopback are asked; the end of a tunnel tells of another machine. One that tells nothing, or
    nonsense, runs elsewhere. A lie makes estimates wrong, and nothing else.
    """
    own, urls = machine_id(), servers.urls
    return bool(own) and all(map(is_loopback, urls)) and all(_machine_at(servers, url) == own for url in urls)


def _machine_at(servers: ServerPool, url: str) -> Any:
    try:
        answer = servers.run(lambda server: server.call("GET", messages.VERSION_PATH), only=url, once=True)
    except HapiError:
        return None
    return answer.get("machine") if isinstance(answer, dict) else None


def connect(
    settings: SessionSettings,
    token: str | None,
    ranks: Ranks = ALONE,
    meanwhile: Callable[[], None] = lambda: None,
) -> Connected:
    """Return the servers of the settings, or an embedded one that is started when they name none.

    The ranks of one machine share an embedded server, which the first of them starts.

    Args:
        settings: the session's settings.
        token: the servers' bearer token.
        ranks: processes of this training.
        meanwhile: called while an embedded server starts, which ends when it raises.

    Raises:
        HapiError: the store has no dataset, or the embedded server does not start.
    """
    if settings.server:
        stall = StallShare()
        addresses = ServerAddresses(
            settings.server,
            partial(_transport, settings, token, stall),
            listed=partial(listed_servers, ca_file=settings.ca_file, timeout=settings.timeout),
        )
        connected = over(settings, addresses.transports, settings.store, check=addresses.failed)
        connected.servers.find_absent(FIRST_SECONDS)
        addresses.follow(connected.servers)
        return replace(connected, urls=list(settings.server), stall=stall)
    folder = local_store(settings)
    store = settings.store or default_store() if folder is None else folder.url
    started: list[EmbeddedServer] = []
    processors = max(1, processor_count() // 2)
    if settings.threads is None:
        torch.set_num_threads(max(1, (processor_count() - processors) // ranks.local_size))

    def start() -> tuple[str, str, int]:
        """Start a server with half of the processors: threads of both tiers on all of them only fight."""
        server = _embed(settings, store, processors, meanwhile)
        started.append(server)
        return server.url, server.token, server.pid

    try:
        url, own_token, pid = ranks.shared(start)
        embedded = started[0] if started else None
        return replace(
            over(settings, [_transport(settings, own_token, None, url)], store, embedded), embedded_pid=pid
        )
    except BaseException:
        for server in started:
            server.close()
        raise


def over(
    network: NetworkSettings,
    transports: Sequence[Transport],
    store: str | None,
    embedded: EmbeddedServer | None = None,
    check: Callable[[], None] = lambda: None,
) -> Connected:
    """Return the servers behind ``transports``.

    Args:
        network: settings of the connections.
        transports: to each server.
        store: that this side may push weights to; None for none.
        embedded: the server that was started; None for none.
        check: called when a server could not be reached.
    """
    check = check if embedded is None else embedded.check
    servers = ServerPool(transports, retry_timeout=network.patience, check=check)
    return Connected(servers, [transport.url for transport in transports], store, embedded)


def _transport(
    network: NetworkSettings,
    token: str | None,
    stall: StallShare | None,
    url: str,
    address: str | None = None,
) -> HttpTransport:
    limits = AnswerLimits(
        silence=network.timeout,
        rate=network.slow_server_rate,
        window=network.slow_server_seconds,
        longest=network.answer_timeout,
    )
    return HttpTransport(
        url,
        token=token,
        ca_file=network.ca_file,
        timeout=network.timeout,
        answer_limits=limits,
        stream_headers=dict if stall is None else stall.headers,
        address=address,
    )


def _embed(
    settings: ModelSettings, store: str, threads: int, meanwhile: Callable[[], None]
) -> EmbeddedServer:
    def both() -> None:
        """Tell what is wrong first."""
        meanwhile()
        warm_up_libraries()

    factories = [*([settings.model] if is_factory(settings.model) else []), *settings.allow_model]
    return EmbeddedServer(store, allow_models=factories, threads=threads, meanwhile=both)
