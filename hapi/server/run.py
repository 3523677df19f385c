"""Start a server process, say when it listens, and end it in order: SIGTERM drains, a second one stops at once."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hapi.allocator import give_back_freed_memory
from hapi.errors import UsageError
from hapi.server.app import Application
from hapi.server.ending import END_SECONDS, end_within
from hapi.server.foreign_output import foreign_output_logged
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.server.tenants import Tenants
from hapi.storage.objects import open_store

log = logging.getLogger("hapi.server")

HEALTH_SECONDS = 1.0
"""How often the server looks whether any of its devices works."""
IDLE_SECONDS = 10.0
"""Without a request, after which memory that was kept for the next ones goes back to the system."""


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    tenants: Tenants = field(default_factory=Tenants)
    """Who may ask."""
    tls_cert: str | None = None
    tls_key: str | None = None
    exit_with_stdin: bool = False
    """Stop when standard input closes, that is, when the process that started this one is gone."""


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, and what the record carries beside it."""

    _own = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        """One log record as one line of JSON."""
        document: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        document.update({k: v for k, v in vars(record).items() if k not in self._own})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def run_server(settings: ServerSettings, listen: ListenSettings, *, log_level: str = "info") -> int:
    """Serve until SIGTERM, SIGINT or (if asked) the end of stdin; returns the exit code.

    It is 1 when the server stops because no device of it works any more.

    Raises :class:`UsageError` for settings that cannot be, and ``StoreError`` when the store is out of reach.
    """
    with foreign_output_logged():
        return _run(settings, listen, log_level)


def _run(settings: ServerSettings, listen: ListenSettings, log_level: str) -> int:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(without_traceback_for_bad_http)
    check_exposure(listen)
    tls = _tls(listen)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    store = open_store(settings.store)
    store.ping()  # a store that is out of reach should say so now, not at the first request
    service = Service(settings, store)
    application = Application(service, listen.tenants)
    try:
        return asyncio.run(
            _serve(application, listen, tls, lambda code: end_within(END_SECONDS, code, service.children))
        )
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending, with the exit code that it has
        application.close()
        service.close()


def without_traceback_for_bad_http(record: logging.LogRecord) -> bool:
    """One short line for what is no HTTP: whoever sends garbage must not fill the log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        reason = " ".join(error.message.split())[:200]
        record.msg, record.args, record.exc_info = f"bad HTTP: {reason}", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def check_exposure(listen: ListenSettings) -> None:
    """Refuse to listen beyond loopback when everybody may ask."""
    try:
        loopback = listen.host == "localhost" or ipaddress.ip_address(listen.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and listen.tenants.open:
        raise UsageError(
            f"--host {listen.host} is reachable from other machines: give a token (HAPI_TOKEN, --token-file or "
            "--tenants), or listen on 127.0.0.1"
        )
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise UsageError("--tls-cert and --tls-key belong together: give both")


def _tls(listen: ListenSettings) -> ssl.SSLContext | None:
    if not listen.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # With a password a key that wants one fails at once, instead of asking on the terminal.
        context.load_cert_chain(listen.tls_cert, listen.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        # OpenSSL's word for a file without a certificate or key in it says nothing.
        why = "no PEM certificate and key without a password" if "PEM lib" in str(error) else error
        raise UsageError(f"--tls-cert {listen.tls_cert} / --tls-key {listen.tls_key}: {why}") from None
    return context


def runner_of(application: Application) -> web.AppRunner:
    """How the application is served: handlers are cancelled when their client leaves, bodies are not inflated."""
    return web.AppRunner(
        application.web,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=75.0,
        auto_decompress=False,  # a few bytes could grow to megabytes; no client compresses its requests
    )


async def _serve(
    application: Application,
    listen: ListenSettings,
    tls: ssl.SSLContext | None,
    ending: Callable[[int], object] = lambda code: None,
) -> int:
    """Serve until the end; the exit code, of which ``ending`` is told once the drain is over."""
    stop = asyncio.Event()
    at_once = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop)
    if listen.exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, stop, at_once), daemon=True).start()
    runner = runner_of(application)
    await runner.setup()
    site = web.TCPSite(runner, listen.host, listen.port, ssl_context=tls, backlog=512)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}") from None
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in str(host) else host
    print(f"listening on {'https' if tls else 'http'}://{shown}:{port}", flush=True)
    log.info("listening", extra={"host": host, "port": port, "device": application.service.device_names})
    code = await _stopped(application, stop)
    await _drain(application, at_once)
    ending(code)
    await runner.cleanup()
    return code


async def _stopped(application: Application, stop: asyncio.Event) -> int:
    """Wait until the server is to stop, or is of no more use: whoever supervises it then starts it again."""
    idle = 0.0
    while application.service.workers.usable:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), HEALTH_SECONDS)
            return 0
        idle = 0.0 if application.admission.running else idle + HEALTH_SECONDS
        if idle >= IDLE_SECONDS:
            idle = 0.0
            await asyncio.to_thread(give_back_freed_memory)
    log.error("no device works any more")
    return 1


async def _drain(application: Application, at_once: asyncio.Event) -> None:
    application.draining = True
    seconds = application.service.settings.drain_seconds
    log.info("draining", extra={"running": application.admission.running, "seconds": seconds})
    deadline = time.monotonic() + seconds
    while application.admission.running and time.monotonic() < deadline and not at_once.is_set():
        await asyncio.sleep(0.05)
    log.info("stopped", extra={"cut_off": application.admission.running})


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, at_once: asyncio.Event) -> None:
    # Not through sys.stdin, whose lock a thread that reads would hold when the interpreter ends, which is fatal.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    for event in (stop, at_once):
        loop.call_soon_threadsafe(event.set)
