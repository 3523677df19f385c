"""Runs of hapi-train: what they say, how they stop, and the runs that the documents show."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import runpy
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import OWN_SERVERS, ForkedProcess
from support.harness import (
    ROOT,
    THIN,
    ServerProcess,
    environment,
    report_of,
    run,
    server,
    start_new_train,
    start_train,
    train,
    wait_for,
)
from support.local_job import pack_blobs
from support.train_cli import FAST, refused

from hapi.cli import train as command
from hapi.cli.main import main


@pytest.mark.slow
def test_frozen_layers_in_bf16_over_a_real_server(
    capsys: pytest.CaptureFixture[str],
    running: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hapi.models.graph.precision.arithmetic_type", lambda *_: torch.float32)
    received = {}
    for kind in ("fp32", "bf16"):
        report = tmp_path / f"{kind}.json"
        flags = ["--split", "4", "--frozen-precision", kind, "--report", str(report), "--cache", "off"]
        assert command.main(["--server", running.url, *FAST, *flags]) == 0
        received[kind] = report_of(report)["epochs"][0]["bytes_received"]
        out = " ".join(capsys.readouterr().out.split())
        assert (f"in {kind}, split 4" in out) is (kind != "fp32")
        assert ("note --frozen-precision: cpu has no units for bf16" in out) is (kind != "fp32")
    assert received["bf16"] == pytest.approx(received["fp32"] / 2, rel=0.02)


@pytest.mark.slow
def test_a_batch_beyond_the_data_and_a_diverging_loss(
    capsys: pytest.CaptureFixture[str], running: ServerProcess, tmp_path: Path
) -> None:
    report = tmp_path / "deep" / "er" / "report.json"
    page = tmp_path / "report.html"
    arguments = ["--server", running.url, *FAST, "--bs", "1024", "--report", str(report)]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "note  --bs 1024 is more than the 200 samples: every epoch is one batch of 200" in out
    assert report_of(report)["epochs"][0]["samples"] == 200
    outputs = ["--report", str(report), "--html", str(page)]
    exploding = ["--lr", "1e6", "--weight-decay", "1e3", "--epochs", "9"]
    assert command.main(["--server", running.url, *FAST, *exploding, *outputs]) == 3
    assert "diverged after" in page.read_text(encoding="utf-8")
    error = capsys.readouterr().err
    assert error.startswith("hapi-train: error: training has diverged: ") and error.count("\n") == 1
    assert "learning rate 1e+06; lower --lr" in error
    document = json.loads(report.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["ended"]["how"] == "diverged" and document["ended"]["detail"] in error


@pytest.mark.slow
def test_several_data_sets_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        assert (
            main(["pack", "sklearn:digits", f"{tmp_path}/{name}", "--image-size", "32", "--limit", "20"]) == 0
        )
    capsys.readouterr()
    monkeypatch.setenv("HAPI_STORE", str(tmp_path))
    code, line = refused(capsys, *FAST)
    assert code == 2 and "several datasets, choose one with --dataset: one, two" in line


@pytest.mark.slow
def test_a_run_goes_on_with_its_dataset_when_others_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digits = ["pack", "sklearn:digits", "--image-size", "32", "--limit", "20"]
    assert main([*digits, f"{tmp_path}/store/one"]) == 0
    monkeypatch.setenv("HAPI_STORE", f"{tmp_path}/store")
    assert command.main([*FAST[1:], "--output", f"{tmp_path}/run"]) == 0
    assert main([*digits, f"{tmp_path}/store/two"]) == 0
    capsys.readouterr()
    assert command.main(["--resume", f"{tmp_path}/run", "--epochs", "2"]) == 0
    assert "data  one, 20 samples" in capsys.readouterr().out
    assert command.main([*FAST, "--dataset", "one", "--validation", "two"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note --validation two: it has the training samples themselves; 0.1 holds others out" in out


@pytest.mark.slow
def test_a_store_beside_servers_is_not_ignored_in_silence(
    capsys: pytest.CaptureFixture[str],
    running: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value, flags, said in (
        ("HAPI_SERVER", running.url, ["--store", str(tmp_path)], True),
        ("HAPI_STORE", str(tmp_path), ["--server", running.url], False),
    ):
        with monkeypatch.context() as m:
            m.setenv(variable, value)
            assert command.main([*FAST, *flags]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert (f"note --store {tmp_path}: not used, because HAPI_SERVER names servers" in out) is said


@pytest.mark.slow
def test_the_issues_first_command(store: Path) -> None:
    """Nothing but a model and a batch size, where exactly one dataset is in reach; in the poorest of locales."""
    done = run(
        [sys.executable, "-m", "hapi.cli.train", "--no-output", "--model", "resnet50", "--bs", "1024", "--epochs", "1"],
        0, 200, {"HAPI_STORE": str(store), "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert "(embedded)" in done.stdout and "resnet50, 22 layers" in done.stdout
    assert re.search(r"^epoch +0 +split +21 .* loss \d", done.stdout, re.MULTILINE)
    assert "note  --bs 1024" in done.stdout
    assert done.stderr == ""


@pytest.mark.long_cases("0")
@pytest.mark.slow
@pytest.mark.parametrize("columns", [0, 30, 100])
def test_live_progress_on_a_terminal(running: ServerProcess, columns: int) -> None:
    """Also on one that does not tell its width (taken for 80); what does not fit is left out, and nothing wraps."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [
        "hapi.cli.train", "--server", running.url, "--weights", "random", "--bs", "10", "--epochs", "1", "--no-output",
        "--threads", "1", "--split", "1",  # whose outputs are so large that no machine shows 0.0 MB/s
    ]  # fmt: skip
    process = ForkedProcess(command, stdout=slave, stderr=slave, env=environment(TERM="xterm"))
    try:
        os.close(slave)
        text = _read_all(master)
        assert process.wait(240) == 0
    finally:
        process.kill()
        os.close(master)
    figures = r", loss \d+\.\d{4}, acc \d+\.\d%, lr 0.01" if columns != 30 else ""
    costs = r", (\d+)/s, ([\d.]+) MB/s, stall (\d+)%" if columns == 100 else "()()()"
    shown = re.findall(rf"epoch 0:[^\r]* (\d+)/20 <[\d:?]+{figures}{costs}", text)
    assert len(shown) > 3, text
    for _, samples, megabytes, stall in shown if columns == 100 else ():
        assert 0 < int(samples) < 1e5 and 0 <= float(megabytes) < 1e3 and 0 <= int(stall) <= 100
    assert columns != 100 or any(float(megabytes) > 0 for _, _, megabytes, _ in shown)
    assert max(len(line) for line in re.split(r"[\r\n]+", text) if line.startswith("epoch 0:")) < (
        columns or 80
    )
    assert re.search(r"\r +\repoch   0  split +[0-9/]+ ", text), "the bar is wiped before the epoch's line"


def _read_all(descriptor: int) -> str:
    received = b""
    with contextlib.suppress(OSError):  # a terminal's way to say that the other end is closed
        while part := os.read(descriptor, 65536):
            received += part
    return received.decode()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    return [int(c) for c in run(["pgrep", "-P", str(pid)], None, 10, {}).stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 2.7, *(pytest.param(s, marks=pytest.mark.long) for s in (1.2, 5.7))])
def test_ctrl_c_at_the_start(store: Path, delay: float) -> None:
    """During the imports, while the embedded server starts, while the model is built."""
    job = start_new_train(*FAST, "--model", "resnet50", "--store", str(store), "--epochs", "50")
    maps = Path(f"/proc/{job.pid}/maps")
    # Before our own imports Python itself starts, and nothing of ours can answer.
    wait_for(lambda: not maps.exists() or "numpy" in maps.read_text(), 60, "the first of the imports")
    time.sleep(delay)
    children = children_of(job.pid)
    job.send_signal(signal.SIGINT)
    output = job.communicate(timeout=240)[0]
    # Python 3.11 ends itself by the signal when it came in code made from a string (dataclasses, torch.fx), caught or
    # not. A shell shows 130 for both.
    assert job.returncode in (130, -signal.SIGINT), output
    assert "Traceback" not in output and output.endswith("hapi-train: interrupted\n")
    wait_for(lambda: not any(alive(c) for c in children), 15, "the end of the embedded server")


@pytest.mark.slow
@pytest.mark.parametrize(("where", "number"), [("epoch", signal.SIGINT), ("validation", signal.SIGTERM)])
def test_stopped_in_training(store: Path, tmp_path: Path, where: str, number: int) -> None:
    checkpoint, report = tmp_path / "training.pt", tmp_path / "report.json"
    page = tmp_path / "report.html"
    share = "0.05" if where == "epoch" else "0.95"
    arguments = (
        *FAST, *THIN, "--store", str(store), "--bs", "10", "--validation", share, "--checkpoint", str(checkpoint),
        "--epochs", "20000", "--request-size", "10", "--report", str(report), "--html", str(page),
    )  # fmt: skip
    job = start_train(*arguments, **({OWN_SERVERS: "1"} if where == "epoch" else {}))
    wait_for(checkpoint.exists, 90, "a checkpoint")
    assert not page.exists()
    children = children_of(job.pid)
    time.sleep(0.2)
    job.send_signal(number)
    output = job.communicate(timeout=240)[0]
    assert job.returncode == 130, output
    assert "Traceback" not in output
    assert f"go on with: --resume --checkpoint {checkpoint}" in output
    assert report_of(report)["epochs"]
    assert " of 20000 epochs" in page.read_text(encoding="utf-8")
    wait_for(lambda: not any(alive(c) for c in children), 15, "the end of the embedded server")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "training.pt"]


@pytest.mark.slow
def test_ctrl_c_while_the_server_hangs(store: Path, tmp_path: Path) -> None:
    """A server that is stopped, not dead, answers nothing and closes nothing; that must not hold Ctrl-C up."""
    with server(store, log=tmp_path / "log") as hanging:
        job = start_train(
            *FAST,
            *THIN,
            "--server",
            hanging.url,
            "--epochs",
            "20000",
            "--request-size",
            "8",
            "--timeout",
            "600",
        )
        wait_for(lambda: (tmp_path / "log").read_text().count("/v1/extract") > 5, 90, "requests")
        hanging.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        job.send_signal(signal.SIGINT)
        output = job.communicate(timeout=240)[0]  # far sooner than the server counts as dead
    assert job.returncode == 130 and "Traceback" not in output


@pytest.mark.slow
def test_two_jobs_on_one_checkpoint(
    capsys: pytest.CaptureFixture[str], running: ServerProcess, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "training.pt"
    arguments = (*FAST, *THIN, "--server", running.url, "--checkpoint", str(checkpoint), "--resume")
    first = start_train(*arguments, "--epochs", "50000")
    try:
        wait_for(checkpoint.exists, 90, "a checkpoint")
        code, line = refused(capsys, *arguments)
        assert code == 1 and "another hapi-train is writing there" in line
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert command.main(arguments) == 0  # a killed job's claim counts for nothing
    assert "nothing to do" in capsys.readouterr().out


# -- runs as documented ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_experiment_runs(running: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    train(
        str(ROOT / "configs" / "alexnet.yaml"), "--server", running.url, "--image-size", "64", "--epochs", "1",
        "--report", str(report),
    )  # fmt: skip
    document: dict[str, Any] = report_of(report)
    assert (document["model"], document["layers"], document["freeze"]) == ("alexnet", 22, 17)
    assert 0 <= document["split"] < 22  # the link and the machine decide


@pytest.mark.slow
def test_the_example_of_a_custom_loop(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = str(ROOT / "examples" / "custom_loop.py")
    monkeypatch.setattr(sys, "argv", [example, str(store)])
    runpy.run_path(example, run_name="__main__")
    out, error = capsys.readouterr()
    assert len(re.findall(r"^epoch \d: loss \d\.\d+, held-out accuracy \d+\.\d%", out, re.MULTILINE)) == 3
    assert error == ""


@pytest.mark.slow
def test_a_pushed_model_of_ones_own_factory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hapi push` says it, in the folder of the factory; an installed command does not search that by itself."""
    pack_blobs(tmp_path / "store", side=8)
    (tmp_path / "hapi_test_mynet.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert main(["push", "hapi_test_mynet:make", "store/n", "--input-size", "8"]) == 0
    told = capsys.readouterr().out.strip().partition("train with: hapi-train ")[2].split()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    del sys.modules["hapi_test_mynet"]
    assert command.main([*told, "--store", "store", *FAST, "--bs", "10", "--split", "1"]) == 0
    assert "weights pushed:n" in capsys.readouterr().out
