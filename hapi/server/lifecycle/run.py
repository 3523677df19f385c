"""Start a server process, say when it listens, and end it in order: SIGTERM drains, a second one stops at once, SIGHUP
reloads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from aiohttp import web

from hapi.allocator import give_back_freed_memory
from hapi.config.settings import checked
from hapi.errors import DrainingError, UsageError
from hapi.process.telemetry import open_telemetry
from hapi.process.threads import Threads, Work
from hapi.server.http.app import Application
from hapi.server.http.listening import listen as listen_at
from hapi.server.http.overview import shown
from hapi.server.http.response_stream import outcome
from hapi.server.lifecycle import audit, event_loop
from hapi.server.lifecycle.descriptors import descriptor_limit, raise_descriptor_limit
from hapi.server.lifecycle.ending import END_SECONDS, end_within
from hapi.server.lifecycle.foreign_output import foreign_output_logged
from hapi.server.lifecycle.log_limits import LimitedHandler, tell_left_out
from hapi.server.lifecycle.reload import Reload, told_tenants
from hapi.server.service import Service
from hapi.server.settings import ListenSettings, ServerSettings
from hapi.server.tenants.accounting import WRITE_SECONDS, Accounts
from hapi.store.open import open_store

log = logging.getLogger("hapi.server")

HEALTH_SECONDS = 1.0
"""Seconds between two checks whether any device works."""
IDLE_SECONDS = 10.0
"""Seconds without a request after which memory kept for the next ones goes back to the system."""


def run_server(settings: ServerSettings) -> int:
    """Serve until SIGTERM, SIGINT or (if asked) the end of stdin; returns the exit code.

    It is 1 when the server stops because no device of it works any more. Call it from the main thread of a process::

        hapi.run_server(hapi.ServerSettings(store="store", port=8099))

    Raises :class:`UsageError` for settings that cannot be, and ``StoreError`` when the store is out of reach.
    """
    settings = checked(settings)
    if settings.exit_with_stdin and sys.stdin is None:  # Python's way to say that it was closed at the start
        raise UsageError("--exit-with-stdin: standard input is closed already")
    with foreign_output_logged():
        return _run(settings)


def _run(settings: ServerSettings) -> int:
    logging.basicConfig(level=settings.log_level.upper(), handlers=[LimitedHandler(sys.stderr)], force=True)
    reload = Reload(settings)
    raise_descriptor_limit()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    store = open_store(settings.store)
    # A store that is out of reach should say so now, not at the first request; this thread must hear Ctrl-C meanwhile.
    Threads(1, "hapi-ping").submit(store.ping).result()
    with contextlib.ExitStack() as at_end:
        service = Service(settings, store, reload.credentials.token)
        at_end.callback(service.close)
        accounts = None if settings.accounts is None else Accounts(settings.accounts, service.id)
        if accounts is not None:
            at_end.callback(accounts.write)
        telemetry = open_telemetry("hapi-server", os.environ)
        if telemetry is not None:
            at_end.callback(telemetry.close)
        application = Application(service, reload.credentials.tenants, accounts, telemetry)
        application.board.validity = reload.credentials.validity
        at_end.callback(application.close)
        at_end.callback(reload.close)
        return event_loop.run(
            _serve(
                application, settings, reload, lambda code: end_within(END_SECONDS, code, service.children)
            )
        )


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Let nothing disturb the end any more, which has its exit code and a time limit.

    The handlers of ``loop`` go before it is closed: from then on each signal would be an error, or end the process.
    After a failure signals are heard: its line may wait for a reader for ever.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


async def _serve(
    application: Application,
    listen: ListenSettings,
    reload: Reload,
    ending: Callable[[int], object] = lambda code: None,
) -> int:
    """Serve until the end; the exit code, of which ``ending`` is told once the drain is over."""
    stop = asyncio.Event()
    at_once = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if stop.is_set():
            audit.administered("stop")
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop)
    loop.add_signal_handler(signal.SIGHUP, reload.want)
    if listen.exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, stop, at_once), daemon=True).start()
    runner = application.runner()
    await runner.setup()
    try:
        await listen_at(runner, application.connections, listen.host, listen.port, reload.tls)
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}") from None
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in str(host) else host
    print(f"listening on {'https' if reload.tls else 'http'}://{shown}:{port}", flush=True)
    log.info("listening", extra={"host": host, "port": port, "device": application.service.device_names})
    _tell_start(application, listen, str(host), port)
    application.scrub.start()
    watching = [
        asyncio.create_task(reload.run(application)),
        asyncio.create_task(_keep_accounts(application)),
    ]
    code = await _stopped(application, stop)
    if code == 0:
        await _be_lame_duck(application, runner, at_once)
    await _drain(application, at_once)
    ending(code)
    for task in watching:
        task.cancel()
    await runner.cleanup()
    _ignore_signals(loop)
    return code


def _tell_start(application: Application, listen: ListenSettings, host: str, port: int) -> None:
    """Tell the audit how the server was started."""
    limits = application.connections.limits
    audit.administered(
        "start",
        host=host,
        port=port,
        tls=bool(listen.tls_cert),
        **told_tenants(application),
        settings=shown(application.service.settings),
        descriptors=descriptor_limit(),
        connections=limits.total,
        connections_per_address=limits.per_address,
    )


async def _keep_accounts(application: Application) -> None:
    """Write what tenants used from time to time, until cancelled."""
    accounts = application.board.accounts
    if accounts is None:
        return
    # A folder on a file server that hangs must hold up nothing else.
    writer = application.service.watch.threads(1, "hapi-accounts")
    while True:
        await event_loop.pause(WRITE_SECONDS)
        with contextlib.suppress(MemoryError):  # the next one must come
            await outcome(writer.submit(accounts.write))


async def _stopped(application: Application, stop: asyncio.Event) -> int:
    """Wait until the server is to stop, or is of no more use: whoever supervises it then starts it again."""
    idle = 0.0
    freeing: Work[None] | None = None
    while application.service.workers.usable:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), HEALTH_SECONDS)
                return 0
            tell_left_out()
            idle = 0.0 if application.running else idle + HEALTH_SECONDS
            if idle >= IDLE_SECONDS and (freeing is None or freeing.done()):
                idle = 0.0  # not waited for: a signal must be heard whatever holds up the thread
                freeing = application.status_threads.submit(give_back_freed_memory)
        except MemoryError:  # the next look must come
            await event_loop.pause(HEALTH_SECONDS)
    log.error("no device works any more")
    return 1


async def _be_lame_duck(application: Application, runner: web.AppRunner, at_once: asyncio.Event) -> None:
    """Take requests for a while yet, but let balancers see that it ends; then close the port."""
    seconds = application.service.settings.lame_duck
    if not seconds:
        return
    application.lame_duck = True
    log.info("lame duck", extra={"audit": "lame-duck", "seconds": seconds})
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(at_once.wait(), seconds)
    for site in list(runner.sites):
        await site.stop()  # takes no new connections; those that are open stay


async def _drain(application: Application, at_once: asyncio.Event) -> None:
    application.draining = True
    application.scrub.stop()
    seconds = application.service.settings.drain_seconds
    running = application.running
    log.info("draining", extra={"audit": "drain", "running": running, "seconds": seconds})
    deadline = time.monotonic() + seconds
    while application.running and time.monotonic() < deadline and not at_once.is_set():
        await asyncio.sleep(0.05)
    for admission in (
        application.admission,
        *application.packs.admissions,
    ):  # that a limit of their own held back
        admission.send_away(DrainingError("the server is shutting down; ask another one"))
    log.info("stopped", extra={"cut_off": application.running})
    tell_left_out(at_once=True)


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, at_once: asyncio.Event) -> None:
    # Not through sys.stdin, whose lock a thread that reads would hold when the interpreter ends, which is fatal.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    for event in (stop, at_once):
        loop.call_soon_threadsafe(event.set)
