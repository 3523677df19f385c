"""A pass that is left while an answer is under way: what is broken off then is no failure of the server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.harness import server
from support.http_tools import make_store
from support.proxy import Proxy

import hapi
from hapi.client.loading import prefetcher

pytestmark = pytest.mark.slow
ANSWER = 10 * 64 * 8 * 8 * 4
"""Bytes of a batch's features."""


def test_a_pass_that_is_left_retries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "CLOSE_SECONDS", 0.05)
    counting, held, released = (threading.Event() for _ in range(3))
    passed = [0]

    def hold(data: bytes) -> bytes:
        passed[0] += len(data) if counting.is_set() else 0
        if passed[0] > 1.5 * ANSWER and not released.is_set():
            held.set()
            released.wait(240)
        return data

    with server(make_store(tmp_path / "store")) as running:
        proxy = Proxy(running.port, hold)
        settings = hapi.SessionSettings(
            server=(f"http://127.0.0.1:{proxy.port}",), dataset="digits", model="resnet18", weights="random",
            image_size=32, split="maxpool", bs=10, request_size=10, in_flight=1, cache="off", wire_codec="none",
            timeout=600,
        )  # fmt: skip
        with hapi.Session.open(settings) as session:
            counting.set()
            stream = session.epoch(0)
            next(stream)
            assert held.wait(240), "the second answer is under way"
            stream.close()  # type: ignore[attr-defined]
            assert session.retries == 0
            released.set()
            assert len(list(session.epoch(1))) == 4 and session.retries == 0
        proxy.close()
