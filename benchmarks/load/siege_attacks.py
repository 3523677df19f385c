"""The trouble of ``benchmarks siege``: each kind goes on in a thread of its own until it is told to stop.

An attack is given the target, an event that ends it, and a counter for what it did and was answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.tiers import process_bytes
from hapi.wire.messages import EXTRACT_PATH, SAMPLES_PATH

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
IDLE_CONNECTIONS = 600
"""More than the server has descriptors."""
HANGING_AT_ONCE, LARGE_AT_ONCE = 4, 4
PRESSURE_SECONDS, RELIEF_SECONDS = 3.0, 17.0
"""Seconds for which the server can have no more memory, and for which it can again."""
PRESSURE_BYTES = 48 << 20
"""Bytes that may still be allocated then."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server under siege."""

    port: int
    token: str
    """Token of the tenant that makes the trouble, with the right to ask."""
    extract: Mapping[str, Any]
    """A request for features of large images, without its ids."""
    hung: Mapping[str, Any]
    """A request for stored samples whose reads do not come back, with its ids."""
    changing: Callable[[], Mapping[str, Any]]
    """Makes a request for stored samples of a dataset that is replaced again and again."""
    pid: Callable[[], int]
    """The server's process now; it is killed and started again."""
    disk: Path | None
    """A small file system that is to be filled, where one could be made."""


Attack = Callable[[Target, threading.Event, Counter[str]], None]


def request_bytes(path: str, document: Mapping[str, Any], token: str) -> bytes:
    """A whole HTTP request."""
    body = json.dumps(document).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def idle_flood(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Hold as many connections as can be had, without a word and without a token."""
    held: list[socket.socket] = []
    while not over.wait(0.05):
        for sock in held[:]:
            with contextlib.suppress(BlockingIOError, OSError):
                if sock.recv(4096, socket.MSG_DONTWAIT):
                    continue
                held.remove(sock)
                sock.close()
                seen["ended by the server"] += 1
        while len(held) < IDLE_CONNECTIONS and not over.is_set():
            try:
                held.append(socket.create_connection(("127.0.0.1", target.port), timeout=1))
                seen["opened"] += 1
            except OSError:
                seen["refused"] += 1
                break
    for sock in held:
        sock.close()


def dripping(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Send request heads byte by byte, and read answers byte by byte."""
    how = random.Random(1)
    request = request_bytes(SAMPLES_PATH, target.changing(), target.token)
    sent_bytes: dict[socket.socket, int] = {}
    while not over.wait(0.2):
        while len(sent_bytes) < 20:
            try:
                sock = socket.create_connection(("127.0.0.1", target.port), timeout=1)
            except OSError:
                break
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sent_bytes[sock] = 0 if how.random() < 0.5 else len(request)
            with contextlib.suppress(OSError):
                sock.sendall(request[: sent_bytes[sock]])
            seen["opened"] += 1
        for sock, count in list(sent_bytes.items()):
            try:
                if count < len(request):
                    sent_bytes[sock] += sock.send(request[count : count + 1])
                elif not sock.recv(1, socket.MSG_DONTWAIT):
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                seen["ended by the server"] += 1
                sock.close()
                del sent_bytes[sock]
    for sock in sent_bytes:
        sock.close()


def resets(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Leave at any moment of a good request, by a reset or in order."""
    how = random.Random(2)
    while not over.wait(0.05):
        path, document = how.choice(
            ((EXTRACT_PATH, {**target.extract, "ids": [0, 1, 2, 3]}), (SAMPLES_PATH, target.changing()))
        )
        data = request_bytes(path, document, target.token)
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", target.port), timeout=1)
            sock.sendall(data[: how.choice((1, 30, len(data) // 2, len(data), len(data)))])
            if how.random() < 0.5:
                sock.settimeout(how.random() / 4)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1 + how.randrange(100_000))
            if how.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.close()
            seen["left"] += 1


def garbage(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Send no HTTP at all, half of it, too much of it, wrong lengths and wrong documents."""
    how = random.Random(3)
    good = request_bytes(EXTRACT_PATH, {**target.extract, "ids": [0]}, target.token)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: how.randbytes(how.randrange(1, 4000)),
        lambda: b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        lambda: b"POST /v1/extract HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n\r\n",
        lambda: bytes(b ^ (how.random() < 0.01) for b in good),
        lambda: good[: how.randrange(len(good))],
        lambda: good.replace(b'"ids": [0]', b'"ids": [' + b"9" * how.randrange(1, 400) + b"]"),
        lambda: b"GET /v1/datasets/" + b"%2e%2e/" * 50 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    )
    while not over.wait(0.02):
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", target.port), timeout=0.3)
            sock.sendall(how.choice(kinds)())
            seen[_status(sock)] += 1
            sock.close()


def hung_reads(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Ask for samples whose reads do not come back, and leave after a while."""
    request = request_bytes(SAMPLES_PATH, target.hung, target.token)

    def call(number: int) -> None:
        """Send one request whose read hangs."""
        while not over.wait(1.0):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", target.port), timeout=2)
                sock.sendall(request)
                seen[_status(sock)] += 1
                sock.close()

    with ThreadPoolExecutor(HANGING_AT_ONCE) as askers:
        list(askers.map(call, range(HANGING_AT_ONCE)))


def memory_pressure(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Take the server's address space away for some seconds, again and again."""
    while not over.wait(RELIEF_SECONDS):
        pid = target.pid()
        with contextlib.suppress(OSError):
            unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
            size = process_bytes(pid, "VmSize")
            if not size:
                continue
            resource.prlimit(pid, resource.RLIMIT_AS, (size + PRESSURE_BYTES, unlimited[1]))
            seen["pressed"] += 1
            over.wait(PRESSURE_SECONDS)
            resource.prlimit(pid, resource.RLIMIT_AS, unlimited)


def large_images(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Ask for features of large images, in requests as large as may be."""

    def call(number: int) -> None:
        """Send one request for large images."""
        how = random.Random(number)
        while not over.wait(how.random() * 4):
            document = {**target.extract, "ids": [how.randrange(8) for _ in range(64)]}
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", target.port), timeout=20)
                sock.sendall(request_bytes(EXTRACT_PATH, document, target.token))
                seen[_status(sock)] += 1
                while sock.recv(1 << 16):
                    pass
                sock.close()

    with ThreadPoolExecutor(LARGE_AT_ONCE) as askers:
        list(askers.map(call, range(LARGE_AT_ONCE)))


def changing_reads(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Read a dataset that is replaced, by the version that it had a moment ago."""
    while not over.wait(0.2):
        request = request_bytes(SAMPLES_PATH, target.changing(), target.token)
        over.wait(0.5)
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", target.port), timeout=5)
            sock.sendall(request)
            seen[_status(sock)] += 1
            sock.close()


def full_disk(target: Target, over: threading.Event, seen: Counter[str]) -> None:
    """Fill the disk that checkpoints go to, and free it again."""
    if target.disk is None:
        return
    junk = target.disk / "junk"
    while not over.wait(6.0):
        with contextlib.suppress(OSError), junk.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        seen["filled"] += 1
        over.wait(6.0)
        junk.unlink(missing_ok=True)
    junk.unlink(missing_ok=True)


ATTACKS: Mapping[str, Attack] = {
    "idle flood": idle_flood,
    "dripping": dripping,
    "resets": resets,
    "garbage": garbage,
    "hung reads": hung_reads,
    "memory pressure": memory_pressure,
    "large images": large_images,
    "changing reads": changing_reads,
    "full disk": full_disk,
}


class Attackers:
    """All attacks at the same time, for the length of a ``with`` block."""

    def __init__(self, target: Target) -> None:
        self.seen: dict[str, Counter[str]] = {name: Counter() for name in ATTACKS}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, attack, target), name=name, daemon=True)
            for name, attack in ATTACKS.items()
        ]

    def __enter__(self) -> Attackers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        deadline = time.monotonic() + 60
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, name: str, attack: Attack, target: Target) -> None:
        try:
            attack(target, self._over, self.seen[name])
        except Exception as error:
            self.seen[name][f"failed: {type(error).__name__}: {error}"] += 1


def _status(sock: socket.socket) -> str:
    """The status of the answer that a socket is given, or how it ended; partial answers count."""
    try:
        head = sock.recv(64)
    except TimeoutError:
        return "no answer"
    words = head.split(b" ", 2)
    return words[1].decode("ascii", "replace") if len(words) > 1 else "closed"


def descriptors(pid: int) -> int:
    """Open descriptors of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return 0
