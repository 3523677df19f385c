"""A trainer paces requests through nginx and HAProxy as without them: what a scarce link cannot take is held back."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.balancers import KINDS, balanced, program
from support.harness import packed_digits
from support.http_tools import served
from support.proxy import Proxy
from support.waiting import PATIENCE

from hapi.client.loading.pacing import RequestPacer
from hapi.client.session import Session
from hapi.client.settings import SessionSettings

pytestmark = pytest.mark.slow
RATE = 400_000
"""Bytes per second of the trainer's link; an answer has 80 KiB."""
PIECE = 4096
"""Bytes of it that arrive at a time."""
IN_FLIGHT, FEW, IN_A_ROW = 8, 3, 8
"""Requests that may be under way; few of them, and in how many sendings in a row."""


def narrow(port: int) -> closing[Proxy]:
    """A link of :data:`RATE`, whose answers come one piece after the other."""
    lock = threading.Lock()

    def slowly(data: bytes) -> bytes:
        with lock:
            time.sleep(len(data) / RATE)
        return data

    return closing(Proxy(port, slowly, buffer=1 << 16, piece=PIECE))


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests under way when each one was sent."""
    found: list[int] = []
    sent = RequestPacer.sent

    def noting(self: RequestPacer, request: object, nbytes: float) -> None:
        sent(self, request, nbytes)
        found.append(len(self._coming))

    monkeypatch.setattr(RequestPacer, "sent", noting)
    return found


def run_until_paced(url: str, under_way: list[int]) -> None:
    """Train until few requests were under way for some time; a machine that stands still only makes it longer."""
    settings: dict[str, Any] = {
        "dataset": "digits",
        "model": "resnet18",
        "weights": "random:0",
        "image_size": 32,
    }
    job = SessionSettings(
        server=(url,),
        split="maxpool",
        bs=20,
        request_size=5,
        in_flight=IN_FLIGHT,
        cache="off",
        timeout=600,
        **settings,
    )
    deadline = time.monotonic() + PATIENCE
    with Session.open(job) as session:
        epoch = 0
        while time.monotonic() < deadline:
            for _ in session.epoch(epoch):
                if len(under_way) > 2 * IN_A_ROW and max(under_way[-IN_A_ROW:]) <= FEW:
                    return
            epoch += 1
    raise AssertionError(f"as many requests as may be were under way all the time: {under_way[-50:]}")


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_held_back_where_the_link_is_scarce(
    kind: str, tmp_path: Path, under_way: list[int]
) -> None:
    if program(kind) is None:
        pytest.skip(f"no {kind} here (Debian: apt-get install nginx-light haproxy)")
    folder = packed_digits(tmp_path, 400)
    with (
        served(folder, cos_batch=5, threads=1) as server,
        balanced(kind, tmp_path / kind, [server.port] * 2) as balancer,
        narrow(balancer.port) as link,
    ):
        run_until_paced(link.url, under_way)
