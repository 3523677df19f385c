"""The asking side of ``benchmarks overload``: a process of its own, all its clients on one event loop.

It reads commands (JSON, a line each) and answers each with what its clients saw. Three ways to ask:

- ``patient``: each client has some requests under way and, as ``hapi-train`` does, stays away for as long as it was
  told when one of them was sent away;
- ``insistent``: requests come at a fixed rate, whatever the server says, and those that are sent away are lost;
- beside either, one light tenant asks a small request now and then, and waits when it is told to.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hapi.errors import HapiError
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.messages import DEADLINE_HEADER, EXTRACT_PATH

SILENCE_SECONDS = 60.0
"""Longest silence, as for ``hapi-train``; an answer that takes longer comes too late."""
DEADLINE_SECONDS = 54.0
"""Longest time in the queue: nine tenths of it, as for ``hapi-train``."""
MOST_UNDER_WAY = 1000
"""Insistent requests that are under way at a time; sockets are not endless."""
PAUSE_SPREAD = (0.75, 1.25)
"""Factors of a pause, as in ``hapi-train``."""


@dataclass
class Seen:
    """Observations of the clients of one phase; times in seconds since its start."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    """Whole, checked answers: tenant, began (first try), sent (last try), ended, samples, told (each Retry-After)."""
    sent_away: list[tuple[str, float]] = field(default_factory=list)
    """(tenant, Retry-After) of every 429."""
    tries: int = 0
    not_tried: int = 0
    """Insistent requests for which no socket was left."""
    other: Counter[str] = field(default_factory=Counter)
    """Everything else that happened, by its name."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "answers": self.answers,
            "sent_away": self.sent_away,
            "tries": self.tries,
            "not_tried": self.not_tried,
            "other": dict(self.other),
        }


class Phase:
    """One command: ``seconds`` of asking."""

    def __init__(self, session: aiohttp.ClientSession, command: Mapping[str, Any]) -> None:
        self._session = session
        self._url: str = command["url"] + EXTRACT_PATH
        self._document: dict[str, Any] = command["document"]
        self._count: int = command["count"]
        self._seconds: float = command["seconds"]
        self._random = random.Random(command["seed"])
        self._began = time.monotonic()
        self.seen = Seen()

    def now(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._began

    async def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Ask as the command says, then stop everything that is still under way."""
        clients = [Client(self, tenant, token) for tenant, token in command["clients"]]
        samples = command["samples"]
        tasks: list[asyncio.Task[None]] = []
        if command["way"] == "patient":
            tasks += [
                asyncio.create_task(client.keep_asking(samples))
                for client in clients
                for _ in range(command["in_flight"])
            ]
        else:
            tasks.append(asyncio.create_task(self._insist(clients, samples, command["rate"])))
        if command["light"]:
            light = command["light"]
            client = Client(self, light["tenant"], light["token"])
            tasks.append(asyncio.create_task(client.request_periodically(light["samples"], light["every"])))
        await asyncio.sleep(self._seconds)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return self.seen.to_json()

    async def _insist(self, clients: Sequence[Client], samples: int, rate: float) -> None:
        async with asyncio.TaskGroup() as under_way:
            running: set[asyncio.Task[bool]] = set()
            number = 0
            while True:
                number += 1
                await asyncio.sleep(max(0.0, number / rate - self.now()))
                if len(running) >= MOST_UNDER_WAY:
                    self.seen.not_tried += 1
                    continue
                client = clients[number % len(clients)]
                task = under_way.create_task(client.once(samples, self.now(), []))
                running.add(task)
                task.add_done_callback(running.discard)

    def body(self, samples: int) -> bytes:
        """A request for some samples."""
        ids = [self._random.randrange(self._count) for _ in range(samples)]
        return json.dumps({**self._document, "ids": ids}).encode()

    async def exchange(self, token: str, samples: int) -> tuple[int, float, bytes]:
        """One try: (status, Retry-After, body)."""
        headers = {"Authorization": f"Bearer {token}", DEADLINE_HEADER: f"{DEADLINE_SECONDS:.3f}"}
        self.seen.tries += 1
        async with self._session.post(self._url, data=self.body(samples), headers=headers) as response:
            body = await response.read()
            return response.status, float(response.headers.get("Retry-After", 0)), body

    def pause(self, seconds: float) -> float:
        """Seconds that a client stays away when it was told to."""
        return seconds * self._random.uniform(*PAUSE_SPREAD)


class Client:
    """One of a tenant's clients."""

    def __init__(self, phase: Phase, tenant: str, token: str) -> None:
        self._phase = phase
        self._tenant = tenant
        self._token = token
        self._well_at = 0.0
        """Time at which it may ask again."""

    async def keep_asking(self, samples: int) -> None:
        """One request after the other."""
        while True:
            await self._until_answered(samples)

    async def request_periodically(self, samples: int, every: float) -> None:
        """A request every so many seconds, or later when the one before takes longer."""
        while True:
            began = self._phase.now()
            await self._until_answered(samples)
            await asyncio.sleep(max(0.0, began + every - self._phase.now()))

    async def _until_answered(self, samples: int) -> None:
        began, seconds = self._phase.now(), list[float]()
        while True:
            while (pause := self._well_at - self._phase.now()) > 0:
                await asyncio.sleep(pause)
            if await self.once(samples, began, seconds):
                return
            if seconds:
                self._well_at = max(self._well_at, self._phase.now() + self._phase.pause(seconds[-1]))
            else:
                await asyncio.sleep(0.1)

    async def once(self, samples: int, began: float, seconds: list[float]) -> bool:
        """One try; notes what came of it. Whether it was answered; ``seconds`` grows when it was sent away."""
        phase, sent = self._phase, self._phase.now()
        try:
            status, retry_after, body = await phase.exchange(self._token, samples)
        except (aiohttp.ClientError, TimeoutError) as error:
            phase.seen.other[type(error).__name__] += 1
            return False
        if status == 429:
            seconds.append(retry_after)
            phase.seen.sent_away.append((self._tenant, retry_after))
            return False
        if status != 200:
            phase.seen.other[str(status)] += 1
            return False
        ended = phase.now()
        try:
            arrived = samples_of(body)
        except HapiError as error:
            phase.seen.other[type(error).__name__] += 1
            return False
        phase.seen.answers.append(
            {
                "tenant": self._tenant,
                "began": began,
                "sent": sent,
                "ended": ended,
                "samples": arrived,
                "retry_after": seconds,
            }
        )
        return True


def samples_of(body: bytes) -> int:
    """The samples of a whole answer whose checksums are right; :class:`WireError` for anything else."""
    reader = FrameReader(BufferSource(iter([body])))

    def sink(header: FrameHeader) -> list[memoryview]:
        """Return buffers for a frame's tensors."""
        return [memoryview(bytearray(tensor.nbytes)) for tensor in header.tensors]

    while not isinstance(frame := reader.next(sink), StreamEnd):
        pass
    return frame.samples


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS, sock_connect=SILENCE_SECONDS)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        # Connections of their own for each phase: what the one before left under way ends with them.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            seen = await Phase(session, command).run(command)
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
