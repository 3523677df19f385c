"""``benchmarks overlap``: how close an epoch comes to its slowest part alone.

With a perfect pipeline an epoch takes max(server compute, network, client compute). For each model and
bandwidth this runs a real ``hapi-server`` and a real ``hapi-train`` on the two-tier test bed and divides the
epoch's seconds by that maximum. Every figure of a row comes from the same epoch: the two computing times from
the report, the network time from the report's bytes and the rate of a plain socket over the same link. (The
report's own network clock also runs while the link waits for the server, which would flatter the ratio.)
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.testbed import ADDRESS, TestBed
from benchmarks.testbed.tiers import START_SECONDS, environment, last_line, read_line, start_server
from hapi.errors import TransportError, UsageError
from hapi.units import format_bandwidth

GOAL = 1.10
"""Largest ratio that counts as overlapped."""
MODELS = ("resnet18", "alexnet")
BANDWIDTHS = (8e6, 20e6, 100e6)
"""Bits per second: on two ordinary cores the network is the slowest part, about as slow, and the fastest."""
DATASET = "overlap"
_SIDE = 64
_RUN_SECONDS = 1800.0
_PROBE_SECONDS = 2.0

_PROBE_SERVER = """
import socket, sys
listening = socket.create_server((sys.argv[1], 0)); print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept(); piece = bytes(1 << 18)
try:
    while True: connection.sendall(piece)
except ConnectionError: pass
"""
# The first bytes pass at the speed of the bucket's burst and of an empty queue: they are not counted.
_PROBE_CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
piece, seconds = bytearray(1 << 15), float(sys.argv[3])
start, counting, total = time.perf_counter(), 0.0, 0
while (now := time.perf_counter()) - start < 1.25 * seconds:
    if not counting and now - start >= 0.25 * seconds: counting, total = now, 0
    total += connection.recv_into(piece)
print(total * 8 / (time.perf_counter() - counting))
"""


@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """One model at one bandwidth; the epoch with the median ratio of those measured. Seconds and bytes."""

    model: str
    split: int
    bandwidth: float
    """Bits per second that the link was set to."""
    goodput: float
    """Bits per second of a plain socket over it."""
    seconds: float
    server_seconds: float
    network_seconds: float
    client_seconds: float
    bytes_received: int
    loss: float
    ratios: tuple[float, ...]
    """The ratio of every measured epoch."""

    @property
    def ratio(self) -> float:
        """Epoch seconds over the slowest part's."""
        return self.seconds / max(self.server_seconds, self.network_seconds, self.client_seconds)


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """All rows of one run, and its conditions."""

    rows: tuple[OverlapRow, ...]
    conditions: dict[str, Any]

    @property
    def worst(self) -> float:
        """The largest ratio."""
        return max(row.ratio for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {
            "benchmark": "overlap",
            "rows": rows,
            "worst": self.worst,
            "goal": GOAL,
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        head = (
            f"{'model':<13}{'split':>5}  {'link':>13}{'goodput':>15}{'server':>9}{'network':>9}{'client':>9}"
        )
        lines = [f"{head}{'epoch':>9}{'ratio':>8}   (seconds)"]
        for r in self.rows:
            link, goodput = format_bandwidth(r.bandwidth), format_bandwidth(r.goodput)
            parts = f"{r.server_seconds:9.2f}{r.network_seconds:9.2f}{r.client_seconds:9.2f}"
            lines.append(
                f"{r.model:<13}{r.split:>5}  {link:>13}{goodput:>15}{parts}{r.seconds:9.2f}{r.ratio:8.3f}"
            )
        verdict = "reached" if self.worst <= GOAL else "missed"
        lines.append(f"goal: at most {GOAL:.2f} in every row; worst {self.worst:.3f}: {verdict}")
        return lines


@dataclass(frozen=True, kw_only=True)
class OverlapSettings:
    """Measurements to take. The first epoch of a run (cold caches, connections) is not counted."""

    models: tuple[str, ...] = MODELS
    bandwidths: tuple[float, ...] = BANDWIDTHS
    samples: int = 1024
    batch: int = 32
    """Many batches an epoch, as real epochs have: filling and emptying the pipeline costs about one of each."""
    epochs: int = 3
    """Measured epochs of each row, after one that is not counted."""
    split: str = "freeze"


def measure_overlap(settings: OverlapSettings, tell: Callable[[str], None]) -> OverlapResult:
    """Run every model at every bandwidth; ``tell`` gets a line as each row is done.

    Raises :class:`UsageError` when there can be no test bed here, :class:`TransportError` when a tier fails.
    """
    found = conditions()
    rows: list[OverlapRow] = []
    with tempfile.TemporaryDirectory(prefix="hapi-overlap-") as folder, TestBed() as bed:
        store = _prepare_store(Path(folder), settings.samples)
        found["test_bed"] = bed.describe()
        found["data"] = f"{settings.samples} float32 samples of 3x{_SIDE}x{_SIDE}, batch {settings.batch}"
        found["threads"] = "1 per tier"
        token = secrets.token_hex(16)
        url = start_server(bed, store, token, Path(folder))
        for model in settings.models:
            for bandwidth in settings.bandwidths:
                bed.set_bandwidth(bandwidth)
                goodput = _goodput(bed)
                report = _train(bed, url, token, model, settings, Path(folder))
                rows.append(_row(model, bandwidth, goodput, report))
                tell(f"{model} at {format_bandwidth(bandwidth)}: ratio {rows[-1].ratio:.3f}")
    return OverlapResult(rows=tuple(rows), conditions=found)


def _row(model: str, bandwidth: float, goodput: float, report: Mapping[str, Any]) -> OverlapRow:
    """The row of a report: its epochs but the first, summed up by the one with the median ratio."""
    rows = []
    for epoch in report["epochs"][1:]:
        rows.append(
            OverlapRow(
                model=model,
                split=epoch["split"],
                bandwidth=bandwidth,
                goodput=goodput,
                seconds=epoch["seconds"],
                server_seconds=epoch["server_seconds"],
                network_seconds=epoch["bytes_received"] * 8 / goodput,
                client_seconds=epoch["client_seconds"],
                bytes_received=epoch["bytes_received"],
                loss=epoch["loss"],
                ratios=(),
            )
        )
    ordered = sorted(rows, key=lambda row: row.ratio)
    middle = asdict(ordered[(len(ordered) - 1) // 2])
    return OverlapRow(**{**middle, "ratios": tuple(round(row.ratio, 4) for row in rows)})


def _prepare_store(folder: Path, samples: int) -> Path:
    """A store with one dataset of tensors, packed by Hapi's own command."""
    import numpy as np

    generator = np.random.default_rng(0)
    source = folder / "overlap.npz"
    x = generator.standard_normal((samples, 3, _SIDE, _SIDE), dtype=np.float32)
    np.savez(source, x=x, y=generator.integers(0, 10, samples))
    command = [
        sys.executable,
        "-m",
        "hapi.cli.main",
        "pack",
        str(source),
        f"{folder / 'store'}/{DATASET}",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS)
    if done.returncode != 0:
        raise UsageError(f"the benchmark's dataset could not be packed: {last_line(done.stderr)}")
    return folder / "store"


def _train(
    bed: TestBed, url: str, token: str, model: str, settings: OverlapSettings, folder: Path
) -> Mapping[str, Any]:
    """Run ``hapi-train`` on its side of the bed; returns its report."""
    report, log = folder / "report.json", folder / "train.log"
    flags = {
        "--server": url,
        "--dataset": DATASET,
        "--model": model,
        "--split": settings.split,
        "--bs": settings.batch,
        "--epochs": settings.epochs + 1,
        "--threads": 1,
        "--device": "cpu",
        "--report": report,
    }
    command = [sys.executable, "-m", "hapi.cli.train", "--no-progress", "--no-output"]
    command += [f"{flag}={value}" for flag, value in flags.items()]
    with log.open("wb") as output:
        process = bed.start("client", command, env=environment(token), stdout=output, stderr=output)
        try:
            code = process.wait(_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise TransportError(f"hapi-train of {model} did not end within {_RUN_SECONDS:.0f} s") from None
    if code != 0:
        raise TransportError(f"hapi-train of {model} failed on the test bed: {last_line(log.read_text())}")
    found: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _goodput(bed: TestBed) -> float:
    """Bits per second that a plain socket gets over the link, from server to client."""
    address = ADDRESS["server"]
    server = bed.start("server", [sys.executable, "-c", _PROBE_SERVER, address], stdout=subprocess.PIPE)
    port = read_line(server, START_SECONDS).strip()
    probe = [sys.executable, "-c", _PROBE_CLIENT, address, port, str(_PROBE_SECONDS)]
    client = bed.start("client", probe, stdout=subprocess.PIPE)
    output, _ = client.communicate(timeout=START_SECONDS)
    server.wait(START_SECONDS)
    return float(output)
