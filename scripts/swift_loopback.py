"""Start, look at and stop an OpenStack Swift on loopback; ``scripts/swift-loopback`` runs this in Swift's environment.

Everything lives under DIR: ``etc`` (settings and rings), ``node0`` and so on (objects), ``run`` (process ids), ``log``.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import FrameType
from typing import NoReturn

ACCESS_KEY, SECRET_KEY = "hapi:tester", "testing"
STRANGER_KEY, STRANGER_SECRET = "hapi:stranger", "strange"
"""A user who is known and may do nothing."""
BUCKET, REGION = "hapi", "us-east-1"
KINDS = ("account", "container", "object")
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000
"""Below the ports that the system gives to outgoing connections: these must be free again at a restart."""
CHUNK_BYTES = 1 << 20
"""Bytes that proxy and object servers move at once; with Swift's own 64 KiB a large read is slower."""
START_SECONDS, STOP_SECONDS = 90.0, 5.0
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

COMMON = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {etc}
log_level = WARNING
log_address = {run}/no-syslog
disable_fallocate = true
"""
PROXY = """[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
object_chunk_size = {chunk}
client_chunk_size = {chunk}
[filter:s3api]
use = egg:swift#s3api
location = {region}
[filter:tempauth]
use = egg:swift#tempauth
user_{access} = {secret} .admin
user_{stranger} = {stranger_secret}
"""
PLAIN_FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "bulk", "slo", "dlo")
STORAGE = """devices = {devices}
mount_check = false
fallocate_reserve = 0
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
recon_cache_path = {run}
"""
SWIFT = """[swift-hash]
swift_hash_path_suffix = loopback
swift_hash_path_prefix = loopback
[storage-policy:0]
name = default
default = yes
"""


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 1."""
    sys.exit(f"error: {message}")


class Cluster:
    """The Swift of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc, self.run, self.log = (folder / name for name in ("etc", "run", "log"))
        self._file = folder / "settings.json"
        self.ports: dict[str, int] = {}
        """The port of each process by its name, storage nodes first."""
        self._started: list[subprocess.Popen[bytes]] = []
        """Kept: a signal that comes while Python frees one would be lost."""
        self.nodes = self.replicas = 0
        with contextlib.suppress(FileNotFoundError):
            settings = json.loads(self._file.read_text())
            self.nodes, self.replicas, self.ports = settings["nodes"], settings["replicas"], settings["ports"]

    @property
    def port(self) -> int:
        """Where S3 clients go."""
        return self.ports["proxy"]

    def prepare(self, port: int | None) -> None:
        """Choose ports and write the settings, unless that was done before."""
        if self.ports:
            if port not in (None, self.port):
                fail(f"{self.folder} was set up with port {self.port}, not {port}; take another folder")
            return
        self.nodes, self.replicas = _count("SWIFT_NODES"), _count("SWIFT_REPLICAS")
        if self.replicas > self.nodes:
            fail(f"SWIFT_REPLICAS={self.replicas} is more than SWIFT_NODES={self.nodes}")
        shutil.rmtree(self.etc, ignore_errors=True)  # of a start that was cut off
        for folder in (self.etc, self.run, self.log):
            folder.mkdir(parents=True, exist_ok=True)
        self._check_attributes()
        names = [f"{kind}-{node}" for node in range(self.nodes) for kind in KINDS]
        self.ports = dict(zip(names, free_ports(len(names), port), strict=True))
        self.ports["proxy"] = port if port is not None else free_ports(1, *self.ports.values())[0]
        self._write_settings()
        self._write_rings()
        document = {"nodes": self.nodes, "replicas": self.replicas, "ports": self.ports}
        self._file.write_text(json.dumps(document, indent=1))

    def _check_attributes(self) -> None:
        probe = self.run / "attributes"
        probe.touch()
        try:
            os.setxattr(probe, "user.hapi", b"x" * 2048)
        except OSError as error:
            fail(f"{self.folder}: its file system has no user xattrs, which Swift needs: {error}")
        finally:
            probe.unlink()

    def _write_settings(self) -> None:
        # Swift changes to this user; the environment may name another than the one we are.
        places = {"etc": self.etc, "run": self.run, "user": pwd.getpwuid(os.getuid()).pw_name}
        (self.etc / "swift.conf").write_text(SWIFT)
        for name, port in self.ports.items():
            text = COMMON.format(port=port, **places)
            if name == "proxy":
                text += PROXY.format(
                    chunk=CHUNK_BYTES, region=REGION, access=ACCESS_KEY.replace(":", "_"), secret=SECRET_KEY,
                    stranger=STRANGER_KEY.replace(":", "_"), stranger_secret=STRANGER_SECRET,
                )  # fmt: skip
                text += "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN_FILTERS)
            else:
                kind, node = name.split("-")
                text += STORAGE.format(devices=self.folder / f"node{node}", kind=kind, run=self.run)
                if kind == "object":
                    text += f"disk_chunk_size = {CHUNK_BYTES}\nnetwork_chunk_size = {CHUNK_BYTES}\n"
            (self.etc / f"{name}.conf").write_text(text)

    def _write_rings(self) -> None:
        for node in range(self.nodes):
            (self.folder / f"node{node}" / "disk").mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            self._ring(kind, "create", "8", str(self.replicas), "1")
            for node in range(self.nodes):
                place = f"r1z{node + 1}-127.0.0.1:{self.ports[f'{kind}-{node}']}/disk"
                self._ring(kind, "add", place, "1")
            self._ring(kind, "rebalance")

    def _ring(self, kind: str, *arguments: str) -> None:
        program = Path(sys.executable).with_name("swift-ring-builder")
        command = [sys.executable, str(program), str(self.etc / f"{kind}.builder"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode > 1:  # 1 is a warning
            fail(f"{' '.join(command[1:])}: {' '.join((done.stdout + done.stderr).split())[-300:]}")

    def pid(self, name: str) -> int | None:
        """The process that runs as ``name``; None when it does not run."""
        try:
            pid, started = (self.run / f"{name}.pid").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if started_at(int(pid)) == started else None

    def start(self) -> None:
        """Start what does not run, wait until the whole answers, and make the bucket."""
        for name in self.ports:
            if self.pid(name) is None:
                self._spawn(name)
        deadline = time.monotonic() + START_SECONDS
        for name in self.ports:
            while not answers(self.ports[name]):
                if self.pid(name) is None or time.monotonic() > deadline:
                    fail(
                        f"{name} does not answer; {self.log / name}.log ends with: {self._last_output(name)}"
                    )
                time.sleep(0.05)
        while (status := put_bucket(self.port)) not in (200, 409):
            if time.monotonic() > deadline:
                fail(f"the bucket {BUCKET} cannot be made: HTTP {status}; see {self.log}")
            time.sleep(0.2)

    def _spawn(self, name: str) -> None:
        kind = name.split("-", 1)[0]
        program = Path(sys.executable).with_name(f"swift-{kind}-server")
        with unbroken(), (self.log / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(program), str(self.etc / f"{name}.conf"), "-v"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            # The start time tells it from a later process with the same number.
            (self.run / f"{name}.pid").write_text(f"{process.pid} {started_at(process.pid)}")
            self._started.append(process)

    def _last_output(self, name: str) -> str:
        lines = (self.log / f"{name}.log").read_text(errors="replace").split("\n")
        return " ".join(" ".join(lines[-3:]).split())[-300:] or "nothing"

    def stop(self) -> None:
        """End every process: SIGTERM, and SIGKILL for what stays."""
        running = {name: pid for name in reversed(self.ports) if (pid := self.pid(name)) is not None}
        for pid in running.values():
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name, pid in running.items():
            while self.pid(name) is not None:
                if time.monotonic() > deadline:
                    _signal_group(pid, signal.SIGKILL)
                time.sleep(0.02)
            (self.run / f"{name}.pid").unlink()


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """A signal that comes inside the block ends this process behind it: a process that starts must be written down."""
    came: list[int] = []
    old = {n: signal.getsignal(n) for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN}
    for number in old:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if came:
        os.kill(os.getpid(), came[0])


def _ended(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def started_at(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None when there is none, or only what is left of one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def free_ports(count: int, *taken: int | None) -> list[int]:
    """Ports of loopback that nobody listens on, none of them ``taken``."""
    candidates = [port for port in range(LOWEST_PORT, HIGHEST_PORT) if port not in taken]
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Swift does
            probe.bind(("127.0.0.1", port))
            found.append(port)
    fail(f"no {count} free ports between {LOWEST_PORT} and {HIGHEST_PORT}")


def answers(port: int) -> bool:
    """Whether something speaks HTTP there and is well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("OPTIONS", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def put_bucket(port: int) -> int:
    """Make the bucket; the HTTP status (0: no answer). Signed by S3's version 2, which is a few lines."""
    date = formatdate(usegmt=True)
    text = f"PUT\n\n\n{date}\n/{BUCKET}"
    signature = base64.b64encode(hmac.digest(SECRET_KEY.encode(), text.encode(), "sha1")).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"Date": date, "Authorization": f"AWS {ACCESS_KEY}:{signature}", "Content-Length": "0"}
        connection.request("PUT", f"/{BUCKET}", headers=headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _count(name: str) -> int:
    text = os.environ.get(name, "1")
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        fail(f"{name}={text}: expected 1 to 16")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        fail(f"port {text!r}: expected 1 to 65535")
    return int(text)


def _start(cluster: Cluster, port: int | None, *, stay: bool) -> None:
    """Start it; with ``stay`` until standard input closes. Nothing is left of a start that is broken off."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ended)
    cluster.prepare(port)
    left_running = False
    try:
        cluster.start()
        print(f"s3://{BUCKET} at http://127.0.0.1:{cluster.port}", flush=True)
        while stay and os.read(sys.stdin.fileno(), 4096):
            pass
        left_running = not stay
    finally:
        if not left_running:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
            cluster.stop()


def main(command: str, folder: str, *rest: str) -> int:
    """Run one command of ``scripts/swift-loopback``."""
    cluster = Cluster(Path(folder).absolute())
    if command in ("start", "run"):
        _start(cluster, _port(rest[0]) if rest else None, stay=command == "run")
    elif not cluster.ports:
        fail(f"{folder} holds no Swift; start one with scripts/swift-loopback start {folder}")
    elif command == "stop":
        cluster.stop()
    elif command == "status":
        pids = {name: cluster.pid(name) for name in cluster.ports}
        for name, pid in pids.items():
            print(name, "down" if pid is None else f"up {pid}", f"port {cluster.ports[name]}")
        return 0 if all(pids.values()) else 1
    elif command == "env":
        print(f"export AWS_ENDPOINT_URL=http://127.0.0.1:{cluster.port} AWS_REGION={REGION}")
        print(f"export AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
