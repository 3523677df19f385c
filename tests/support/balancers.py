"""nginx and HAProxy as ``deploy/`` configures them, as processes on free loopback ports in front of real servers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hapi
from support.free_ports import free_port
from support.harness import wait_for
from support.http_tools import exchange

DEPLOY = Path(hapi.__file__).parents[1] / "deploy"
NGINX = DEPLOY / "nginx" / "hapi.conf"
HAPROXY = DEPLOY / "haproxy" / "haproxy.cfg"
KINDS = ("nginx", "haproxy")
CHECK_SECONDS = 120
"""How long HAProxy waits in a test for the answer whether a server is ready."""
_NGINX_AROUND = """
daemon off;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
{user}
events {{ worker_connections 256; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/hapi.conf;
}}
"""


def program(kind: str) -> str | None:
    """Path of the program; None where it is not installed."""
    return shutil.which(kind, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def installed(kind: str) -> str:
    """Return ``kind``; the test is skipped where there is no such program."""
    if program(kind) is None:
        pytest.skip(f"no {kind} here (Debian: apt-get install nginx-light haproxy)")
    return kind


@dataclass
class Balancer:
    """A running one."""

    kind: str
    port: int
    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    _older: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        """Whether it has a server that is ready."""
        assert self.process.poll() is None, (self.folder / "output").read_text()
        try:
            return exchange(self.port, "GET", "/readyz").status == 200
        except OSError:
            return False

    def reload(self) -> None:
        """Read the configuration again, as an operator has it done; what is under way is finished as it was."""
        before = self.process
        if self.kind == "nginx":
            before.send_signal(signal.SIGHUP)
        else:  # the new process has the old one end after its last request
            self._start("-sf", str(before.pid))
            self._older.append(before)

    def end(self) -> None:
        for process in (self.process, *self._older):
            process.terminate()
        for process in (self.process, *self._older):
            process.wait(240)

    def _start(self, *more: str) -> None:
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen([*self.command, *more], stdout=output, stderr=output)


def with_addresses(text: str, kind: str, port: int, servers: Sequence[int]) -> str:
    """The configuration with another port to listen on, and other servers than the two that it names."""
    written = re.findall(r"192\.0\.2\.\d+:8099", text)
    assert len(written) == len(servers), "the configuration names as many servers as there are"
    for address, server in zip(written, servers, strict=True):
        text = text.replace(address, f"127.0.0.1:{server}")
    before, after = (
        ("listen 80 ", f"listen 127.0.0.1:{port} ")
        if kind == "nginx"
        else ("bind :80\n", f"bind 127.0.0.1:{port}\n")
    )
    assert text.count(before) == 1
    return text.replace(before, after)


def command_of(
    kind: str, folder: Path, port: int, servers: Sequence[int], *, check: bool = False
) -> list[str]:
    """Write the configuration into ``folder``; return the command that runs, or only checks, it."""
    found = program(kind)
    assert found is not None
    source = NGINX if kind == "nginx" else HAPROXY
    text = with_addresses(source.read_text(), kind, port, servers)
    if kind == "haproxy":  # a busy machine that is slow to say that a server is well does not take it away
        text = text.replace("\ndefaults\n", f"\ndefaults\n    timeout check {CHECK_SECONDS}s\n")
        assert f"timeout check {CHECK_SECONDS}s" in text
    (folder / source.name).write_text(text)
    if kind == "haproxy":
        return [found, "-c" if check else "-db", "-f", str(folder / source.name)]
    user = (
        "user root;" if os.getuid() == 0 else ""
    )  # a worker of another user could not write into the test's folder
    (folder / "nginx.conf").write_text(_NGINX_AROUND.format(folder=folder, user=user))
    return [found, *(["-t"] if check else []), "-c", str(folder / "nginx.conf"), "-p", str(folder)]


@contextlib.contextmanager
def balanced(kind: str, folder: Path, servers: Sequence[int]) -> Iterator[Balancer]:
    """Run one in front of the servers with these ports until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    running = Balancer(kind, port, command_of(kind, folder, port, servers), folder)
    try:
        wait_for(running.answers, 20, f"{kind}'s first answer")
        yield running
    finally:
        running.end()
