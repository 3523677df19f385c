"""Whole jobs with real processes: embedded server, kills, restarts, resume, Ctrl-C, tokens."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.forked import OWN_SERVERS
from support.harness import (
    DIGITS_JOB,
    RESNET_JOB,
    ServerProcess,
    hapi,
    losses,
    packed_digits,
    report_of,
    run,
    server,
    start_train,
    train,
    wait_for,
)
from support.proxy import gated
from support.waiting import PATIENCE

COUNT = 256
BATCHES = ("--bs", "64", "--request-size", "16")
COMMON = (*DIGITS_JOB, *BATCHES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run that nothing happens to."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    train(*COMMON, "--server", running.url, "--epochs", "3", "--report", str(path))
    return report_of(path)


def check_same(report: dict[str, Any], reference: dict[str, Any]) -> None:
    assert losses(report) == pytest.approx(losses(reference), rel=1e-4)
    assert [e["samples"] for e in report["epochs"]] == [e["samples"] for e in reference["epochs"]]


@pytest.mark.slow
def test_the_report_has_what_it_must(undisturbed: dict[str, Any]) -> None:
    keys = {"epoch", "split", "seconds", "samples", "bytes_received", "loss", "accuracy"}
    keys |= {"server_seconds", "network_seconds", "client_seconds", "stall_seconds"}
    assert len(undisturbed["epochs"]) == 3
    for epoch in undisturbed["epochs"]:
        assert keys <= set(epoch)
        assert epoch["samples"] == COUNT
        assert epoch["bytes_received"] > COUNT * 8  # at least a label each, whatever the split
        for part in ("server_seconds", "client_seconds", "network_seconds", "stall_seconds"):
            assert 0 <= epoch[part] <= epoch["seconds"] * 1.05
    for key in ("model", "layers", "freeze", "batch_size", "request_size", "peak_memory_bytes", "retries"):
        assert undisturbed[key] or key == "retries"
    assert losses(undisturbed)[-1] < losses(undisturbed)[0]


@pytest.mark.slow
def test_embedded_server_alone(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = train(*COMMON, "--epochs", "3", "--report", str(report), HAPI_STORE=str(store))
    assert "(embedded)" in done.stdout
    check_same(report_of(report), undisturbed)


@pytest.mark.slow
def test_a_server_killed_and_restarted(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with server(store) as first, gated(first.port, 9) as gate:
        job = start_train(*COMMON, "--server", gate.url, "--epochs", "3", "--report", str(report))
        gate.wait()
        first.kill()
        gate.open()
        time.sleep(0.5)
        assert job.poll() is None, job.stdout.read()  # type: ignore[union-attr]
        second = first.restarted()
        try:
            output = job.communicate(timeout=240)[0]
            assert job.returncode == 0, output
        finally:
            second.kill()
    document = report_of(report)
    check_same(document, undisturbed)
    assert document["retries"] > 0


@pytest.mark.slow
def test_one_of_two_servers_killed(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with server(store) as first, gated(first.port, 5) as gate, server(store) as second:
        job = start_train(
            *COMMON, "--server", gate.url, "--server", second.url, "--epochs", "3", "--report", str(report)
        )
        gate.wait()
        first.kill()
        gate.open()
        output = job.communicate(timeout=240)[0]
        assert job.returncode == 0, output
    check_same(report_of(report), undisturbed)


@pytest.mark.slow
def test_three_servers_and_other_batches(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with (
        server(store, "--cos-batch", "1") as a,
        server(store, "--cos-batch", "128", "--no-model-reuse") as b,
        server(store, "--cos-batch", "7") as c,
    ):
        arguments = [x for url in (a.url, b.url, c.url) for x in ("--server", url)]
        train(*COMMON, *arguments, "--request-size", "128", "--epochs", "3", "--report", str(report))
    check_same(report_of(report), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["none", "min", "layer2.1", "3"])
def test_every_kind_of_split(
    running: ServerProcess, undisturbed: dict[str, Any], tmp_path: Path, split: str
) -> None:
    report = tmp_path / "report.json"
    train(*COMMON, "--server", running.url, "--split", split, "--epochs", "1", "--report", str(report))
    assert losses(report_of(report))[0] == pytest.approx(losses(undisturbed)[0], rel=1e-4)


@pytest.mark.slow
def test_chunk_windows_however_they_are_read(running: ServerProcess, store: Path, tmp_path: Path) -> None:
    arguments = (*COMMON, "--epochs", "2", "--shuffle", "chunks:20:4", "--validation", "0.25")
    done = train(*arguments, "--server", running.url, "--report", str(tmp_path / "a.json"))
    assert "order chunks:20:4\n" in done.stdout
    with server(store, "--chunk-cache", "0") as other:
        train(*arguments, "--server", other.url, "--split", "none", "--report", str(tmp_path / "b.json"))
    check_same(report_of(tmp_path / "a.json"), report_of(tmp_path / "b.json"))


@pytest.mark.slow
def test_interrupted_and_resumed(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report, checkpoint = tmp_path / "report.json", tmp_path / "training.pt"
    arguments = (
        *COMMON,
        "--epochs",
        "3",
        "--report",
        str(report),
        "--checkpoint",
        str(checkpoint),
        "--resume",
    )
    with server(store) as running, gated(running.port, 12) as gate:
        job = start_train(*arguments, "--server", gate.url)
        gate.wait()
        job.send_signal(signal.SIGINT)
        gate.open()
        output = job.communicate(timeout=240)[0]
        assert job.returncode == 130, output
        assert "--resume" in output
        interrupted = report_of(report)
        assert len(interrupted["epochs"]) < 3
        train(*arguments, "--server", running.url, "--split", "min")
    check_same(report_of(report), undisturbed)


@pytest.mark.slow
def test_sigkill_and_resume(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """With the run folder alone, and then with more epochs."""
    folder = tmp_path / "run"
    checkpoint, report, model = (
        folder / name for name in ("checkpoint.pt", "report.json", "model.safetensors")
    )
    with server(store) as running, gated(running.port, 14) as gate:
        job = start_train(
            *COMMON, "--epochs", "3", "--output", str(folder), "--checkpoint-every", "2", "--server", gate.url,
        )  # fmt: skip
        gate.wait()
        wait_for(checkpoint.exists, what="a checkpoint")
        job.kill()
        job.communicate()
        gate.open()
        assert not report.exists()
        train("--resume", "--output", str(folder))
        check_same(report_of(report), undisturbed)
        resumed = model.read_bytes()
        train("--resume", "--output", str(folder), "--epochs", "4", "--server", running.url)
        assert len(report_of(report)["epochs"]) == 4 and model.read_bytes() != resumed
        failed = train("--resume", "--output", str(folder), "--bs", "32", code=1)
    assert "--bs 32" in failed.stderr and "its bs is 64, this one's 32; leave it out" in failed.stderr


@pytest.mark.slow
def test_sigkill_and_resume_with_another_learning_rate(store: Path, tmp_path: Path) -> None:
    report, checkpoint = tmp_path / "report.json", tmp_path / "training.pt"
    arguments = (
        *COMMON, "--report", str(report), "--checkpoint", str(checkpoint), "--checkpoint-every", "1", "--resume",
    )  # fmt: skip
    with server(store) as running:
        job = start_train(*arguments, "--epochs", "5000", "--server", running.url)
        wait_for(checkpoint.exists, what="a checkpoint")
        job.kill()
        job.communicate()
        told = train(*arguments, "--epochs", "2", "--lr", "0.003", "--server", running.url)
    found = report_of(report)
    changed = {entry["setting"]: entry for entry in found["changes"]}
    assert changed.keys() == {"lr", "epochs"} and changed["lr"]["after"] == 0.003
    assert "--lr is 0.003 and no longer" in told.stderr
    assert changed["epochs"]["before"] == 5000 and len(found["epochs"]) >= 2


@pytest.mark.slow
def test_resume_refuses_another_job(running: ServerProcess, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "training.pt")
    job = (*COMMON, "--server", running.url, "--checkpoint", checkpoint)
    train(*job, "--epochs", "1")
    failed = train(*job, "--bs", "32", "--epochs", "1", "--resume", code=1)
    assert "its bs is 64, this one's 32" in failed.stderr
    Path(checkpoint).write_bytes(b"garbage")
    failed = train(*job, "--resume", code=2)
    assert "is not a checkpoint" in failed.stderr


@pytest.mark.slow
def test_embedded_server_dies_with_its_trainer(store: Path, tmp_path: Path) -> None:
    job = start_train(*COMMON, "--store", str(store), "--epochs", "5000", **{OWN_SERVERS: "1"})
    children: list[int] = []

    def found() -> bool:
        listing = run(["pgrep", "-P", str(job.pid)], None, PATIENCE, {}).stdout.split()
        children[:] = [int(c) for c in listing]
        return bool(children)

    wait_for(found, what="an embedded server")
    job.kill()
    job.communicate()
    wait_for(lambda: not any(_alive(c) for c in children), what="the end of the embedded server")


@pytest.mark.slow
def test_tokens(store: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("a-long-secret\n")
    with server(store, "--token-file", str(secret)) as running:
        arguments = (*COMMON, "--server", running.url, "--epochs", "1")
        refused = train(*arguments, code=1)
        assert "token" in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert "token" in train(*arguments, code=1, HAPI_TOKEN="wrong").stderr
        train(*arguments, "--token-file", str(secret))


@pytest.mark.slow
def test_sigterm_drains(store: Path, tmp_path: Path) -> None:
    with server(store, log=tmp_path / "log") as running:
        # Patient enough for the requests under way: the server would count those that it leaves as 499.
        job = start_train(*COMMON, "--server", running.url, "--epochs", "1000", "--patience", "5s")
        _after_some_requests(tmp_path / "log", 3)
        assert running.stop() == 0
        job.communicate(timeout=240)
        assert job.returncode == 1
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] in ("draining", "stopped")] == ["draining", "stopped"]
    assert all(e["status"] in (200, 503) for e in events if e["event"] == "request")


@pytest.mark.slow
def test_pushed_models_and_checkpoints(store: Path, running: ServerProcess, tmp_path: Path) -> None:
    """The same weights give the same training: random by seed, pushed, from a local file, and from shards."""
    import torch
    import torchvision

    torch.manual_seed(0)
    path = tmp_path / "weights.pth"
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), path)
    hapi("push", "resnet18", f"{store}/backbone", "--weights", str(path), "--input-size", "32")
    shards = tmp_path / "shards"
    hapi("pull", f"{store}/backbone", "--output", str(shards), "--shard-size", "20MB")
    assert (shards / "model.safetensors.index.json").is_file()
    first: list[float] = []
    files = [["--weights", str(path)] for path in (path, shards, shards / "model.safetensors.index.json")]
    for ways in (["--weights", "random"], ["--model", "store:backbone"], *files):
        report = tmp_path / "report.json"
        train(
            *RESNET_JOB, *BATCHES, "--server", running.url, "--store", str(store), "--epochs", "1", "--split", "5",
            *ways, "--report", str(report),
        )  # fmt: skip
        first = first or losses(report_of(report))
        assert losses(report_of(report)) == pytest.approx(first, rel=1e-6)
    listed = hapi("ls", str(store)).stdout
    assert "backbone" in listed


@pytest.mark.slow
def test_validation_and_trace(running: ServerProcess, tmp_path: Path) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    train(
        *COMMON, "--server", running.url, "--epochs", "1", "--validation", "0.25", "--report", str(report),
        "--trace", str(trace),
    )  # fmt: skip
    epoch = report_of(report)["epochs"][0]
    assert epoch["samples"] == COUNT * 3 // 4
    assert 0 <= epoch["validation_accuracy"] <= 1
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"request", "train step"} <= names


def _after_some_requests(log: Path, count: int) -> None:
    wait_for(
        lambda: log.exists() and log.read_text().count('"/v1/extract"') >= count, what=f"{count} requests"
    )


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # also when it goes while it is looked at
        return False
