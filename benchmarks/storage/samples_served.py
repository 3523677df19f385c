"""The serving side of ``benchmarks samples --over``: hapi-server, and beside it what a plain download comes from.

Over HTTP that is a server of files (aiohttp's, by ``sendfile``) in a process of its own on the same cores, over Swift
it is the object store itself, which ``scripts/swift-loopback`` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from benchmarks.testbed.bed import stop_all
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.signals import no_interrupts
from benchmarks.testbed.tiers import environment, last_line, read_line, start_server_process
from hapi.errors import HapiError, UsageError

OVER = ("http", "swift")
_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "swift-loopback"
_START_SECONDS = 120.0
_SWIFT_STOP_SECONDS = 15.0
"""Longer than Swift's processes may take to end."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Address of the dataset, for the client's processes."""

    server: str
    """URL of hapi-server."""
    token: str
    plain: str
    """URL below which the shards' keys are, or the object store's URL."""
    pids: tuple[int, ...]
    """Processes of the serving side that work for hapi-server's answers, whose CPU time counts."""
    plain_pids: tuple[int, ...]


@contextlib.contextmanager
def served_over_http(bed: LooseBed, folder: Path) -> Iterator[Served]:
    """The store ``folder/store`` by hapi-server and by a plain server of files."""
    token = secrets.token_hex(16)
    process, url = start_server_process(bed, folder / "store", token, folder)
    files, plain = start_file_server(bed, folder / "store")
    try:
        yield Served(server=url, token=token, plain=plain, pids=(process.pid,), plain_pids=(files.pid,))
    finally:
        stop_all([process, files])


def start_file_server(bed: LooseBed, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a plain server of the files below ``folder`` on its side of the bed.

    Returns:
        The process, and the URL below which the files are.

    Raises:
        HapiError: it did not start.
    """
    process = bed.start(
        "server",
        [sys.executable, "-m", "benchmarks.storage.samples_served", str(folder)],
        env=environment(""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    line = read_line(process, _START_SECONDS).strip()
    if not line:
        raise HapiError("the plain server of files did not start; its error stands above")
    return process, line


class LoopbackSwift:
    """An OpenStack Swift of one node, for the length of a ``with`` block; its S3 settings are in ``os.environ``.

    It ends when the pipe to it closes, so also when this process is killed.
    """

    url = "s3://hapi/bench"

    def __init__(self, bed: LooseBed, folder: Path) -> None:
        """``UsageError`` saying how, when it is not installed."""
        venv = Path(os.environ.get("HAPI_SWIFT_VENV") or _SCRIPT.parents[1] / ".venv-swift")
        if not _SCRIPT.is_file() or not (venv / "bin" / "swift-proxy-server").is_file():
            raise UsageError(
                f"OpenStack Swift is not installed in {venv}: run scripts/swift-loopback install in a checkout of "
                "Hapi, or set HAPI_SWIFT_VENV to where it is"
            )
        self._bed, self._folder = bed, folder
        self._before: dict[str, str | None] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LoopbackSwift:
        command = [str(_SCRIPT), "run", str(self._folder)]
        self._process = self._bed.start(
            "server", command, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            if not read_line(self._process, _START_SECONDS):
                raise HapiError("swift-loopback run did not start Swift; its error stands above")
            for name, value in re.findall(r"(AWS_\w+)=(\S+)", self._run("env")):
                self._before[name] = os.environ.get(name)
                os.environ[name] = value
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._process is not None and self._process.stdin is not None:
            with no_interrupts(), contextlib.suppress(subprocess.TimeoutExpired):  # then the bed ends it
                self._process.stdin.close()
                self._process.wait(_SWIFT_STOP_SECONDS)

    def pids(self) -> tuple[int, ...]:
        """All of its processes."""
        return tuple(int(pid) for pid in re.findall(r"up (\d+)", self._run("status")))

    def _run(self, command: str) -> str:
        # Started on the server's cores, which what it starts inherits.
        process = self._bed.start(
            "server",
            [str(_SCRIPT), command, str(self._folder)],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said, complaint = process.communicate(timeout=_START_SECONDS)
        if process.returncode:
            raise HapiError(f"swift-loopback {command} failed: {last_line(complaint)}")
        return said


@contextlib.contextmanager
def served_over_swift(bed: LooseBed, folder: Path, swift: LoopbackSwift) -> Iterator[Served]:
    """Serve the contents of ``swift`` by hapi-server beside it, and by Swift itself."""
    token = secrets.token_hex(16)
    process, url = start_server_process(bed, swift.url, token, folder)
    pids = swift.pids()
    try:
        yield Served(server=url, token=token, plain=swift.url, pids=(process.pid, *pids), plain_pids=pids)
    finally:
        stop_all([process])


def serve_files(root: Path) -> None:
    """The files below ``root`` on a free port of loopback, whose URL is printed, until standard input closes."""

    async def main() -> None:
        """Serve files until the parent ends."""
        application = web.Application()
        application.router.add_static("/", root)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await runner.cleanup()

    asyncio.run(main())


if __name__ == "__main__":
    serve_files(Path(sys.argv[1]))
