"""What ``hapi-train`` says of an error names the id under which the server logged it, in real processes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import DIGITS_JOB, ServerProcess, server, start_train, train, wait_for
from support.http_tools import EXTRACT, Known, make_store, request_bytes

from hapi.data.dataset import find_dataset
from hapi.store.open import open_store

COMMON = (*DIGITS_JOB, "--dataset", "digits", "--bs", "40", "--split", "4", "--freeze", "11", "--epochs", "1")


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def logged(log: Path, request_id: str) -> dict[str, Any]:
    (found,) = [line for line in lines(log) if line.get("request_id") == request_id]
    return found


def named_in(text: str) -> list[str]:
    return re.findall(r"\(request ([0-9a-f]{16})\)", text)


def damage(folder: Path, sample: int) -> None:
    """Flip the last byte of one stored sample."""
    dataset = find_dataset(open_store(str(folder)), "digits")
    stored = dataset.read(np.array([sample])).data.tobytes()
    for shard in folder.rglob("shard-*.bin"):
        content = shard.read_bytes()
        at = content.find(stored)
        if at >= 0:
            last = at + len(stored) - 1
            shard.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
            return
    raise AssertionError("the sample was not found")


@pytest.mark.slow
@pytest.mark.parametrize("cos_batch", ["40", "1"])
def test_an_error_has_one_id_on_both_sides(tmp_path: Path, cos_batch: str) -> None:
    """Before the status line (one COS batch has all samples), and as a frame in the middle of an answer."""
    folder, log = make_store(tmp_path / "store"), tmp_path / "log"
    damage(folder, 7)
    with server(folder, "--cos-batch", cos_batch, log=log) as running:
        done = train(*COMMON, "--server", running.url, code=1)
        (line,) = [line for line in done.stderr.splitlines() if "hapi-train: error:" in line]
        (request_id,) = named_in(line)
        wait_for(lambda: request_id in log.read_text())
    found = logged(log, request_id)
    assert found["status"] == 500 and found["error"] == "data" and found["path"] == EXTRACT
    assert found["detail"] in line and found["tenant"] == "default"


@contextmanager
def occupied(running: ServerProcess, known: Known) -> Iterator[None]:
    """Its only slot, by a client that reads nothing."""
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        body = json.dumps(known.extract([n % 40 for n in range(4000)])).encode()
        sock.sendall(request_bytes(EXTRACT, body))
        assert sock.recv(12) == b"HTTP/1.1 200"
        yield


@pytest.mark.slow
def test_a_warning_has_one_id_on_both_sides(tmp_path: Path) -> None:
    folder, log = make_store(tmp_path / "store"), tmp_path / "log"
    # Its only slot stays taken until the trainer has said so, however late that starts.
    arguments = ("--max-running", "1", "--max-queued", "0", "--send-timeout", "1h", "--slow-reader-rate", "0")
    with server(folder, *arguments, log=log) as running:
        with occupied(running, Known(folder)):
            job = start_train(*COMMON, "--server", running.url)
            assert job.stdout is not None
            warning = next(line for line in job.stdout if "too busy" in line)
        rest = job.communicate(timeout=240)[0]
        assert job.returncode == 0, rest
        (request_id,) = named_in(warning)
        wait_for(lambda: request_id in log.read_text())
    found = logged(log, request_id)
    assert found["status"] == 429 and found["error"] == "busy" and found["path"] == EXTRACT
