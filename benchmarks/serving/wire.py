"""``benchmarks wire``: features from server to client, beside a plain socket and plain aiohttp.

All ways move the same payload between the same two processes, each on its own core, in turns, so that what
disturbs the machine disturbs all. The clock runs from the request to the last byte in a prepared buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.serving.wire_server import FEATURE_BYTES
from benchmarks.testbed.bed import Cores
from benchmarks.testbed.conditions import Spread, conditions, rotated
from benchmarks.testbed.processes import sending_process
from hapi.errors import TransportError
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.messages import EXTRACT_PATH
from hapi.wire.transport.http import HttpTransport

SOCKET, AIOHTTP, AIOHTTP_READ, HAPI = "plain socket", "aiohttp, iter_any", "aiohttp, read()", "hapi"
"""The ways, in the order of the table."""
GOAL = 0.8
"""Share of the plain socket's rate that Hapi is to reach, checksums included."""


@dataclass(frozen=True, kw_only=True)
class WireResult:
    """Rates in GB/s (1e9 bytes of features per second) by way, and the conditions."""

    rates: dict[str, Spread]
    conditions: dict[str, Any]

    @property
    def share(self) -> float:
        """Hapi's median rate over the plain socket's."""
        return self.rates[HAPI].median / self.rates[SOCKET].median

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        rates = {name: spread.to_json() for name, spread in self.rates.items()}
        return {
            "benchmark": "wire",
            "gigabytes_per_second": rates,
            "share_of_plain_socket": self.share,
            "goal": GOAL,
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        lines = [f"{'GB/s of features':<20}{'median':>8}{'min':>8}{'max':>8}{'of socket':>11}"]
        base = self.rates[SOCKET].median
        for name, s in self.rates.items():
            lines.append(f"{name:<20}{s.median:8.2f}{s.low:8.2f}{s.high:8.2f}{s.median / base:11.0%}")
        verdict = "reached" if self.share >= GOAL else "missed"
        lines.append(f"goal: hapi, checksums on, at least {GOAL:.0%} of the plain socket: {verdict}")
        return lines


def measure_wire(body_bytes: int = 64 << 20, rounds: int = 15, cores: Cores | None = None) -> WireResult:
    """Move about ``body_bytes`` of features ``rounds`` times each way, in turns.

    Raises :class:`hapi.errors.UsageError` when two cores are not there to pin to.
    """
    cores = cores or Cores.split_machine()
    samples = max(1, round(body_bytes / FEATURE_BYTES))
    size = samples * FEATURE_BYTES
    found = conditions()
    with contextlib.ExitStack() as stack:
        with _pinned(cores.server):  # a child inherits the cores
            ports = stack.enter_context(sending_process("benchmarks.serving.wire_server", str(samples)))
        stack.enter_context(_pinned(cores.client))
        ways = _ways(ports, memoryview(bytearray(size)), stack)
        for transfer in ways.values():
            transfer()  # warms caches, connections and buffers
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round_index in range(rounds):
            # Each way takes each place in the turn, so that none profits from what ran before it.
            for name in rotated(list(ways), round_index):
                start = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - start)
    rates = {name: Spread.of([size / s / 1e9 for s in taken]) for name, taken in seconds.items()}
    found.update(body_bytes=size, rounds=rounds, server_cores=cores.server, client_cores=cores.client)
    return WireResult(rates=rates, conditions=found)


def _ways(
    ports: dict[str, int], buffer: memoryview, stack: contextlib.ExitStack
) -> dict[str, Callable[[], None]]:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", ports["socket"])))
    runner = stack.enter_context(asyncio.Runner())
    session = runner.run(_session())
    stack.callback(lambda: runner.run(session.close()))
    transport = HttpTransport(f"http://127.0.0.1:{ports['hapi']}")
    stack.callback(transport.close)
    url = f"http://127.0.0.1:{ports['aiohttp']}/"
    return {
        SOCKET: lambda: _by_socket(connection, buffer),
        AIOHTTP: lambda: runner.run(_by_aiohttp(session, url, buffer)),
        AIOHTTP_READ: lambda: runner.run(_by_aiohttp_read(session, url, len(buffer))),
        HAPI: lambda: by_hapi(transport, buffer),
    }


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


def _by_socket(connection: socket.socket, buffer: memoryview) -> None:
    connection.sendall(b"x")
    filled = 0
    while filled < len(buffer):
        count = connection.recv_into(buffer[filled:])
        if not count:
            raise TransportError("the plain socket's server closed the connection")
        filled += count


async def _by_aiohttp(session: aiohttp.ClientSession, url: str, buffer: memoryview) -> None:
    filled = 0
    async with session.get(url) as response:
        async for part in response.content.iter_any():
            buffer[filled : filled + len(part)] = part
            filled += len(part)
    _check_size(filled, len(buffer))


async def _by_aiohttp_read(session: aiohttp.ClientSession, url: str, size: int) -> None:
    async with session.get(url) as response:
        _check_size(len(await response.read()), size)


def by_hapi(transport: HttpTransport, buffer: memoryview) -> None:
    """Every frame's features straight into their place of ``buffer``; the reader checks the checksums."""
    filled = 0

    def sink(header: FrameHeader) -> list[memoryview]:
        """Return the buffer for a frame's tensor."""
        nonlocal filled
        features, labels = header.tensors
        target = buffer[filled : filled + features.nbytes]
        filled += features.nbytes
        return [target, memoryview(bytearray(labels.nbytes))]

    def receive(reader: FrameReader) -> None:
        """Read all frames."""
        while not isinstance(reader.next(sink), StreamEnd):
            pass

    transport.stream(EXTRACT_PATH, {}, receive)
    _check_size(filled, len(buffer))


def _check_size(received: int, expected: int) -> None:
    if received != expected:
        raise TransportError(f"{received} bytes arrived, expected {expected}: the figure would be wrong")


@contextlib.contextmanager
def _pinned(cores: tuple[int, ...]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
