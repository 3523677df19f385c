"""A job at two servers, of which one holds answers back: they are asked of the other, and the losses stay."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from support.harness import DIGITS_JOB, losses, of_epochs, report_of, server, train
from support.http_tools import make_store
from support.proxy import Proxy

from hapi.client.transport.stragglers import EXTRA_SHARE, FIRST_EXTRA

pytestmark = pytest.mark.slow
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits", "--epochs", "8",
    "--cache", "off",
)  # fmt: skip
SERVER = ("--cos-batch", "5")
HELD, SECONDS = (22, 40), 5.0
"""Beginnings of answers that are held back, once enough answers tell how long one waits; and for how long."""
BEGINNING = 1 << 16
"""Bytes that only the beginning of an answer with features has at once."""


def test_answers_that_are_held_back_are_asked_of_another_server(tmp_path: Path) -> None:
    folder, held, parts = make_store(tmp_path / "store"), list[int](), list[int]()
    lock = threading.Lock()

    def hold(data: bytes) -> bytes:
        if len(data) < BEGINNING:
            return data
        with lock:
            parts.append(len(data))
            number = len(parts)
        if number in HELD:
            time.sleep(SECONDS)
            held.append(number)
        return data

    with server(folder, *SERVER) as one, server(folder, *SERVER) as other:
        train(*JOB, "--server", one.url, "--report", str(tmp_path / "alone.json"))
        proxies = [Proxy(one.port, hold), Proxy(other.port, lambda data: data)]  # as slow as each other
        try:
            both = [flag for proxy in proxies for flag in ("--server", f"http://127.0.0.1:{proxy.port}")]
            train(*JOB, *both, "--report", str(tmp_path / "both.json"))
        finally:
            for proxy in proxies:
                proxy.close()
    report = report_of(tmp_path / "both.json")
    assert losses(report) == losses(report_of(tmp_path / "alone.json"))
    assert len(parts) >= min(HELD)
    extra, requests = sum(of_epochs(report, "extra_requests")), sum(of_epochs(report, "requests"))
    assert 1 <= extra <= max(FIRST_EXTRA, EXTRA_SHARE * requests)
    assert requests == sum(of_epochs(report, "samples")) / 5 and report["retries"] == 0
    assert set(of_epochs(report, "bytes_received")) == set(
        of_epochs(report_of(tmp_path / "alone.json"), "bytes_received")
    )
