"""``hapi-server --decode-processes``: right answers while decoding processes are killed, and none is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.harness import ServerProcess, server
from support.http_tools import EXTRACT, Known, make_store, metric, received, until

from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes for decoding need Linux"),
]
SPLIT, IDS = 1, list(range(40)) * 25
"""An answer of 64 MB: more than sockets hold, so that it is not made before its reader has taken the most of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@contextlib.contextmanager
def running(folder: Path, log: Path) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A server with two decoding processes, and these."""
    with server(folder, "--decode-processes", "2", log=log) as process:
        until(
            lambda: '"listening"' in log.read_text(), 20, "the log's line"
        )  # it comes after the one on stdout
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        events = [line["event"] for line in lines]
        assert events.index("decoding processes ready") < events.index("listening")
        pids = lines[events.index("decoding processes ready")]["pids"]
        assert len(set(pids)) == 2 and not any(map(gone, pids))
        yield process, pids


def gone(pid: int) -> bool:
    """No such process, or one that only waits for its parent to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def extract(
    port: int,
    known: Known,
    midway: Callable[[int], None] = lambda mib: None,
    ids: list[int] = IDS,
    split: int = SPLIT,
) -> bytes:
    """The answer's body; ``midway`` is called after each MiB of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    with contextlib.closing(connection):
        connection.request("POST", EXTRACT, body=json.dumps(known.extract(ids, split, job="job")))
        response = connection.getresponse()
        assert response.status == 200
        parts: list[bytes] = []
        while part := response.read(1 << 20):
            parts.append(part)
            midway(len(parts))
        return b"".join(parts)


def report_of(body: bytes) -> dict[str, dict[str, float]]:
    reader = FrameReader(BufferSource(iter([body])))
    while not isinstance(
        header := reader.next(lambda h: [memoryview(bytearray(t.nbytes)) for t in h.tensors]), StreamEnd
    ):
        pass
    return header.report


def test_killed_midway(folder: Path, tmp_path: Path) -> None:
    known = Known(folder)
    with running(folder, tmp_path / "log") as (process, pids):
        quiet = extract(process.port, known)
        ids, (features, labels) = received(quiet, 2)
        expected = known.features(IDS[:40], SPLIT).numpy()
        got = features.view(np.float32).reshape(-1, *expected.shape)
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-4, atol=1e-4)
        assert ids == IDS and labels.view(np.int64).tolist() == known.dataset.labels(np.array(IDS)).tolist()

        def kill(mib: int) -> None:
            if mib in (8, 24):
                os.kill(pids[mib == 24], signal.SIGKILL)

        again, (disturbed, _) = received(extract(process.port, known, kill), 2)
        assert again == IDS and np.array_equal(disturbed, features)
        assert metric(process.port, "hapi_decoders_replaced_total") == 2
        now = children(process.process.pid)
        assert len(now) == 2 and not set(now) & set(pids)
        assert process.stop() == 0
        assert all(map(gone, [*pids, *now]))
    died = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(d["level"], d["how"]) for d in died if d["event"] == "decoding process died"] == [
        ("warning", "signal 9")
    ] * 2


def test_their_seconds_are_the_servers(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log") as (process, pids):
        before = sum(map(cpu_seconds, pids))
        report = report_of(extract(process.port, Known(folder), ids=IDS * 4, split=4))
        used = sum(map(cpu_seconds, pids)) - before
        decode = report["cpu"]["decode"]
        begun, ended = report["process"]
        # What this process itself spent on decoding is in it too, and the system counts in hundredths.
        assert decode >= used - 0.05 > 0
        assert ended - begun >= decode - 0.05


def cpu_seconds(pid: int) -> float:
    user, kernel = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(kernel)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("at_work", [False, True])
def test_a_killed_server_leaves_none(folder: Path, tmp_path: Path, at_work: bool) -> None:
    with running(folder, tmp_path / "log") as (process, pids):
        if at_work:

            def kill(mib: int) -> None:
                if mib == 8:
                    process.kill()

            with contextlib.suppress(ConnectionError):
                assert len(extract(process.port, Known(folder), kill)) < 64 << 20
        else:
            process.kill()
        until(lambda: all(map(gone, pids)), 30, "the end of the decoding processes")
