"""A job at two servers, of which one holds answers back: they are asked of the other, and the losses stay."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from support.harness import DIGITS_JOB, losses, of_epochs, report_of, server, train
from support.http_tools import make_store
from support.proxy import Proxy

from hapi.client.transport.stragglers import EXTRA_SHARE, FIRST_EXTRA

pytestmark = pytest.mark.slow
JOB = (
    *DIGITS_JOB, "--bs", "20", "--request-size", "5", "--split", "maxpool", "--dataset", "digits", "--epochs", "8",
    "--cache", "off", "--timeout", "600", "--slow-server-rate", "0",
)  # fmt: skip
SERVER = ("--cos-batch", "5")
HELD, SECONDS = 22, 100.0
"""The answer that is held back, once enough of them tell how long one waits; and for how long, if nobody asks again."""
LENGTH = re.compile(rb"HTTP/1\.1 200 .*\r\nContent-Length: ([0-9]{5,})\r\n", re.DOTALL | re.IGNORECASE)
"""The head of an answer with features: they take more bytes than any document."""


def test_answers_that_are_held_back_are_asked_of_another_server(tmp_path: Path) -> None:
    folder, answers = make_store(tmp_path / "store"), list[int]()
    lock, over = threading.Lock(), threading.Event()

    def hold(data: bytes) -> bytes:
        if LENGTH.match(data) is None:
            return data
        with lock:
            answers.append(len(data))
            number = len(answers)
        if number == HELD:
            over.wait(SECONDS)
        return data

    with server(folder, *SERVER) as one, server(folder, *SERVER) as other:
        train(*JOB, "--server", one.url, "--report", str(tmp_path / "alone.json"))
        proxies = [Proxy(one.port, hold), Proxy(other.port, lambda data: data)]  # as slow as each other
        try:
            both = [flag for proxy in proxies for flag in ("--server", f"http://127.0.0.1:{proxy.port}")]
            train(*JOB, *both, "--report", str(tmp_path / "both.json"))
        finally:
            over.set()
            for proxy in proxies:
                proxy.close()
    report = report_of(tmp_path / "both.json")
    assert losses(report) == losses(report_of(tmp_path / "alone.json"))
    assert len(answers) >= HELD
    extra, requests = sum(of_epochs(report, "extra_requests")), sum(of_epochs(report, "requests"))
    assert 1 <= extra <= max(FIRST_EXTRA, EXTRA_SHARE * requests)
    assert requests == sum(of_epochs(report, "samples")) / 5 and report["retries"] == 0
    assert set(of_epochs(report, "bytes_received")) == set(
        of_epochs(report_of(tmp_path / "alone.json"), "bytes_received")
    )
