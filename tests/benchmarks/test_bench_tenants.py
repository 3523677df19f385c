"""``benchmarks tenants``: whole jobs' order and memory, rows and ratios with made-up tiers, a small real run."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.fake_bed import FakeBed

from benchmarks.load import tenants
from benchmarks.load.tenants import TenantsSettings, measure_tenants
from benchmarks.load.tenants_view import draw_tenants, ratios, tenants_rows, tenants_table
from benchmarks.load.whole_jobs import MemoryGate, run_whole_jobs
from benchmarks.testbed.cells import Results
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.metrics_watch import read_gauges
from hapi.errors import TransportError

MIB = 1 << 20


class Client:
    """Answers as a client would; a whole job of vgg19 fails, and takes 300 MiB, others 100."""

    freeze = 11

    def __init__(
        self, bed: FakeBed, token: str, folder: Path, name: str = "client", side: str = "client"
    ) -> None:
        self.side, self.model = side, ""
        self.asked: list[str] = []

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "open":
            self.model = arguments["model"]
            assert arguments["split"] == ("none" if self.side == "server" else "freeze")
        if do in ("epoch", "fetch"):
            assert arguments["split"] == (0 if self.side == "server" else 11)
            assert do == ("epoch" if self.side == "server" else "fetch")
            if self.model == "vgg11":
                raise TransportError("it broke")
            time.sleep(0.02)
        return {"ok": True}

    def memory(self, what: str) -> int:
        opened = {"RssAnon": 100, "VmHWM": 130 if self.model != "vgg19" else 330, "RssFile": 20}
        return (opened if "open" in self.asked else {"RssAnon": 10, "VmHWM": 40, "RssFile": 20})[what] * MIB

    def stop(self) -> None:
        return


class Server:
    """Tells rising memory."""

    flags: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, *args: Any) -> None:
        self.flags.append(args[4])

    def __enter__(self) -> tuple[str, Server]:
        return "http://nowhere", self

    def __exit__(self, *_: object) -> None:
        return

    def lines(self) -> list[dict[str, float]]:
        now = time.monotonic()
        return [{"at": now - 100, "used": 1e12}, {"at": now, "used": 90 * MIB, "weights": 7}, {"at": now}]


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> FakeBed:
    monkeypatch.setattr(tenants, "make_store", lambda folder, samples, side, forms: folder)
    monkeypatch.setattr(tenants, "push_twins", lambda *args: (50, 20))
    monkeypatch.setattr(tenants, "BenchClient", Client)
    monkeypatch.setattr(tenants, "_Server", Server)
    monkeypatch.setattr(tenants, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(Server, "flags", [])
    return FakeBed()


SETTINGS = TenantsSettings(models=("alexnet", "vgg19"), modes=("auto", "whole", "store"), counts=(1, 3))


@pytest.mark.slow
def test_all_modes_have_one_budget_and_are_measured_once(bed: FakeBed, tmp_path: Path) -> None:
    for _ in range(2):  # the second finds everything there
        results = Results(tmp_path / "t.jsonl", {})
        measure_tenants(bed, SETTINGS, results, lambda line: None)  # type: ignore[arg-type]
    budget = 300 * MIB  # vgg19: 330 at most, less 20 of code and 10 before
    assert [flags[2:] for flags in Server.flags] == [
        (),
        ("--batching", "auto", "--device-memory", str(budget)),
        ("--cos-batch", "128", "--device-memory", str(budget)),
        (),
        ("--device-memory", str(budget)),
    ]
    rows = tenants_rows(results.records, 256)
    assert [(row.mode, row.tenants, len(row.seconds)) for row in rows] == [
        (mode, count, count) for mode in SETTINGS.modes for count in SETTINGS.counts
    ]
    assert all(row.budget == budget and not row.errors for row in rows)
    # What the watch saw before the run is not the run's; whole jobs tell their own.
    assert {row.most_memory for row in rows if row.mode != "store"} == {90 * MIB}
    assert all(row.opening is not None for row in rows if row.mode == "store")
    table = "\n".join(tenants_table(rows, results.records))
    assert "auto over all in the store" in table and "auto over no batch adaptation" in table
    assert "the second adds 0 B, what differs is 20 B of 50 B" in table
    draw_tenants(rows, str(tmp_path / "x.svg"))
    assert "</svg>" in (tmp_path / "x.svg").read_text()


def test_what_failed_and_what_does_not_fit_is_told_and_in_no_ratio(
    bed: FakeBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TenantsSettings(
        models=("alexnet", "vgg11", "vgg19"), modes=("auto", "store"), counts=(1, 3), device_memory=200 * MIB
    )
    results = Results(tmp_path / "t.jsonl", {})
    results.add({"kind": "needs", "bytes": {"alexnet": 100 * MIB, "vgg11": 100 * MIB, "vgg19": 300 * MIB}})
    monkeypatch.setattr(tenants._Bench, "_open", _open_without_warming)
    measure_tenants(bed, settings, results, lambda line: None)  # type: ignore[arg-type]
    rows = {(row.mode, row.tenants): row for row in tenants_rows(results.records, 256)}
    assert rows["auto", 3].errors == ("it broke",) and len(rows["auto", 3].seconds) == 2
    errors = rows["store", 3].errors
    assert len(errors) == 2 and "it broke" in errors[0] and "the budget is" in errors[1]
    assert set(ratios(list(rows.values()), "auto", "store")) == {1}
    assert "store, 3 tenants: it broke" in "\n".join(tenants_table(list(rows.values()), results.records))


def _open_without_warming(self: Any, url: str, count: int) -> None:
    """As :meth:`tenants._Bench._open`, for a model that fails at its first request."""
    for number in range(count):
        client = Client(FakeBed(), "", Path())
        client.call("open", **self._job(url, self._settings.model(number), "freeze"))
        self._clients.append(client)


def test_the_gate_keeps_order_and_budget() -> None:
    gate, running, most = MemoryGate(10), [0], [0]
    order: list[int] = []
    lock = threading.Lock()

    def one(number: int, need: int) -> None:
        with gate.job(number, need):
            with lock:
                order.append(number)
                running[0] += need
                most[0] = max(most[0], running[0])
            time.sleep(0.01)
            with lock:
                running[0] -= need

    needs = [6, 5, 4, 1, 10, 2]
    threads = [threading.Thread(target=one, args=each) for each in reversed(list(enumerate(needs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == list(range(6)) and order[0] == 0 and most[0] <= 10
    assert order.index(4) > max(order.index(n) for n in range(4)) and order[-1] == 5


def test_jobs_that_do_not_fit_hold_nobody_up() -> None:
    class Job:
        used_bytes = 5

        def run(self, samples: int) -> float:
            time.sleep(0.15)
            return 0.1

    found = run_whole_jobs([Job(), Job(), Job()], [5, 50, 6], 10, 1)  # type: ignore[list-item]
    first, last = found["seconds"]
    assert last > first >= 0.15 and len(found["errors"]) == 1 and found["opening"] == [0.1, 0.1]
    assert found["memory"] and all(used == 15 for _, used in found["memory"])


def test_gauges_are_read_by_their_whole_name() -> None:
    text = (
        '# HELP hapi_device_memory_bytes Bytes.\nhapi_device_memory_bytes{device="cpu",kind="weights"} 5.5e+06\n'
        'hapi_device_memory_bytes{device="cpu",kind="activations"} 10.0\n'
        'hapi_device_memory_bytes_more 3\nhapi_model_cache_bytes{device="cpu"} 17.0\n'
    )
    assert read_gauges(text) == {"used": 5.5e6 + 10, "weights": 17.0} and read_gauges("") == {}


@pytest.mark.long
def test_a_small_real_run(forked_tiers: None, tmp_path: Path) -> None:
    """Every job is finished, memory stays within the budget, and a shared backbone is told."""
    settings = TenantsSettings(
        models=("resnet18",), modes=("auto", "store"), counts=(2,), samples=32, request_size=32
    )
    results = Results(tmp_path / "t.jsonl", {})
    measure_tenants(LooseBed("a test"), settings, results, lambda line: None)
    rows = tenants_rows(results.records, settings.samples)
    assert [(row.mode, len(row.seconds), row.errors) for row in rows] == [("auto", 2, ()), ("store", 2, ())]
    (auto, store) = rows
    assert 0 < auto.most_memory <= auto.budget and store.most_memory > 0
    (sharing,) = [r for r in results.records if r["kind"] == "sharing"]
    first, both = sharing["resident"]
    # Tensors with the same content, such as fresh statistics of BatchNorm, are resident once.
    assert 0.98 * sharing["front_bytes"] < first <= sharing["front_bytes"]
    assert 0 < both - first <= sharing["differing_bytes"] < sharing["front_bytes"]
    json.dumps([row.to_json() for row in rows])
