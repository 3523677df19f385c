"""A trainer whose output, disk or numbers fail it: it goes on where it can, and keeps what it has where it cannot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.disks import small_disk
from support.forked import ForkedProcess
from support.harness import (
    THIN,
    ServerProcess,
    environment,
    losses,
    packed_digits,
    report_of,
    start_train,
    train,
    wait_for,
)
from support.proxy import gated

from hapi.train.checkpoints.checkpoint_files import existing

pytestmark = pytest.mark.slow
JOB = (
    *THIN,
    "--freeze",
    "13",
    "--weights",
    "random",
    "--epochs",
    "3",
    "--bs",
    "50",
    "--no-progress",
    "--split",
    "freeze",
)
GATED = 8
"""Requests that one of them makes in its first two epochs."""
TRAIN = ["hapi.cli.train", "--no-output", "--threads", "1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), 200)


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job when nothing is in its way."""
    report = tmp_path_factory.mktemp("undisturbed") / "report.json"
    train("--server", running.url, *JOB, "--report", str(report))
    return losses(report_of(report))


def is_finite(path: Path) -> bool:
    state = torch.load(path, weights_only=True)
    return all(bool(value.isfinite().all()) for value in state["trained"].values())


# -- diverged ----------------------------------------------------------------------------------------------------


def test_a_diverged_run_keeps_what_was_finite(running: ServerProcess, tmp_path: Path) -> None:
    path, report = tmp_path / "training.pt", tmp_path / "report.json"
    arguments = (
        "--server", running.url, *JOB, "--checkpoint", str(path), "--checkpoint-every", "1", "--keep", "2",
        "--lr", "1e6", "--weight-decay", "1e3", "--epochs", "50", "--report", str(report),
    )  # fmt: skip
    done = train(*arguments, code=3)
    assert re.search(
        r"^hapi-train: error: training has diverged: .* at epoch \d+, batch \d+, ", done.stderr, re.M
    )
    assert "Traceback" not in done.stderr
    assert report_of(report)["ended"]["how"] == "diverged"
    kept = existing(path)
    assert len(kept) == 2 and all(is_finite(file) for file in kept)
    again = train(*arguments, "--resume", code=3)
    assert "training has diverged" in again.stderr and all(is_finite(file) for file in existing(path))


# -- output that is lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "told", "lost"),
    [
        (
            "| head -n 1",
            "hapi-train: stdout cannot be written (Broken pipe); the work goes on",
            "stdout: Broken pipe",
        ),
        pytest.param(
            "> /dev/full",
            "hapi-train: stdout cannot be written (No space left on device); the work goes on",
            "stdout: No space left on device",
            marks=pytest.mark.long,
        ),
        (">&- 2>&- <&-", "", "stdout: it was closed at the start"),
        pytest.param("> /dev/full 2>&1", "", "stdout: No space left on device", marks=pytest.mark.long),
    ],
)
def test_training_without_its_output(
    running: ServerProcess, undisturbed: list[float], tmp_path: Path, shell: str, told: str, lost: str
) -> None:
    report, page, trace = (tmp_path / name for name in ("report.json", "page.html", "trace.json"))
    outputs = ["--report", str(report), "--trace", str(trace)]
    if "head" in shell:  # drawing takes most of the test's time
        outputs += ["--html", str(page)]
    if "head" in shell:
        done = into_head(*TRAIN, "--server", running.url, *JOB, *outputs)
    else:
        script = f'"$0" -m "$@" {shell}'
        command = ["bash", "-c", script, sys.executable, *TRAIN, "--server", running.url, *JOB, *outputs]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == told
    document = report_of(report)
    assert losses(document) == undisturbed and document["ended"]["how"] == "finished"
    assert any(line.startswith(lost) for line in document["troubles"])
    assert trace.exists() and page.exists() == ("head" in shell)


def into_head(*command: str) -> subprocess.CompletedProcess[str]:
    """How the command ends, and its errors, where what reads its output has enough after a line."""
    with subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as head:
        job = ForkedProcess(command, stdout=head.stdin, stderr=subprocess.PIPE, env=environment())
        head.stdin.close()  # type: ignore[union-attr]
        try:
            _, errors = job.communicate(240)
        finally:
            job.kill()
    return subprocess.CompletedProcess(command, job.wait(), "", errors)


def test_a_terminal_that_goes_away(running: ServerProcess, tmp_path: Path) -> None:
    """Under nohup the hang-up is ignored; writing to the terminal then fails, also the progress bar's."""
    report = tmp_path / "report.json"
    ours, theirs = os.openpty()
    arguments = [*TRAIN, "--server", running.url, *JOB[:-3], "--split", "freeze", "--report", str(report)]
    try:
        job = ForkedProcess(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True
        )
    finally:
        os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    try:
        assert job.wait(240) == 0
    finally:
        job.kill()
        job.wait()
    assert any("Input/output error" in line for line in report_of(report)["troubles"])


# -- disks that are full -----------------------------------------------------------------------------------------


def test_a_checkpoint_disk_that_is_full_for_a_while(
    running: ServerProcess, undisturbed: list[float], tmp_path: Path
) -> None:
    """Full after the first epochs; freed while training runs. The earlier checkpoint stays whole meanwhile."""
    with small_disk(tmp_path / "disk", 1024) as disk, gated(running.port, GATED) as gate:
        path, report = disk / "training.pt", tmp_path / "report.json"
        arguments = ("--server", gate.url, *JOB, "--epochs", "12", "--checkpoint", str(path))
        job = start_train(*arguments, "--report", str(report), "--patience", "600")
        try:
            gate.wait()
            wait_for(path.exists, what="a checkpoint")
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            gate.open()
            said = ""
            while "cannot be written" not in said:
                line = job.stdout.readline()  # type: ignore[union-attr]
                assert line, said
                said += line
            assert "No space left on device (at epoch " in said and "; training goes on" in said
            assert is_finite(path)
            (disk / "filler").unlink()
            said += job.communicate(240)[0]
        finally:
            job.kill()
        assert job.wait() == 0, said
        assert "was written, after " in said
        document = report_of(report)
        assert losses(document)[:3] == undisturbed and len(losses(document)) == 12
        assert len(document["troubles"]) == 2
        assert torch.load(path, weights_only=True)["progress"]["epoch"] == 12
        assert [p.name for p in disk.iterdir()] == ["training.pt"]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(running: ServerProcess, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        path, report = disk / "training.pt", tmp_path / "report.json"
        arguments = (
            "--server", running.url, *JOB, "--checkpoint", str(path), "--report", str(report), "--patience", "2s",
        )  # fmt: skip
        done = train(*arguments, code=1)
        assert done.stderr.endswith(
            f"hapi-train: error: --checkpoint {path}: cannot be written: No space left on device\n"
        )
        assert "Traceback" not in done.stderr
        assert len(report_of(report)["epochs"]) == 3
        assert not list(disk.iterdir())


def test_reports_on_a_full_disk(running: ServerProcess, undisturbed: list[float], tmp_path: Path) -> None:
    """Each output is written as far as it can be; the report says which could not."""
    with small_disk(tmp_path / "disk", 20) as disk:
        report = tmp_path / "report.json"
        outputs = (
            "--html",
            str(disk / "page.html"),
            "--trace",
            str(disk / "t.json"),
            "--report",
            str(report),
        )
        done = train("--server", running.url, *JOB, *outputs, code=1)
        assert "--html" in done.stderr and "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr and "final loss" in done.stdout
        assert losses(report_of(report)) == undisturbed
        assert any("--html" in line for line in report_of(report)["troubles"])


def test_a_sample_cache_on_a_full_disk(running: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--server", running.url, *JOB[:-2], "--split", "0", "--report", str(report))
    train(*arguments)
    expected = losses(report_of(report))
    for size in (8, 204):  # room for nothing but the folder; room for some samples
        with small_disk(tmp_path / f"disk{size}", size) as disk:
            cache = ("--cache", "on", "--cache-dir", str(disk / "cache"))
            done = train(*arguments, *cache, "--cache-size", "1GB")
            assert losses(report_of(report)) == expected
            assert "Traceback" not in done.stderr


# -- killed ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("call", ["replace", "make_way", "hardlink_to"])
def test_killed_while_the_files_change_places(
    running: ServerProcess, undisturbed: list[float], tmp_path: Path, call: str
) -> None:
    """SIGKILL right after a file system call of the rotation; resumed, the losses are those of an undisturbed run."""
    path, report = tmp_path / "training.pt", tmp_path / "report.json"
    program = (
        "import os, pathlib, sys\n"
        "from hapi.train.checkpoints import checkpoint, checkpoint_files\n"
        "name, at = sys.argv.pop(1), 5\n"
        "owner = checkpoint if name == 'make_way' else pathlib.Path\n"
        "plain = getattr(owner, name)\n"
        "def call(first, second):\n"
        "    global at\n"
        "    plain(first, second)\n"
        "    at -= 'training.pt' in str(first)\n"
        "    if not at: os.kill(os.getpid(), 9)\n"
        "setattr(owner, name, call)\n"
        "from hapi.cli.train import main\n"
        "sys.exit(main())"
    )
    arguments = (
        "--no-output", "--server", running.url, *JOB, "--threads", "1", "--checkpoint", str(path), "--checkpoint-every",
        "1", "--keep", "3", "--report", str(report), "--resume",
    )  # fmt: skip
    killed = subprocess.run(
        [sys.executable, "-c", program, call, *arguments], env=environment(), capture_output=True, timeout=240
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert path.exists()
    places = [torch.load(file, weights_only=True)["progress"] for file in existing(path)]
    order = [(p["epoch"], p["batch"]) for p in places]
    assert order == sorted(order, reverse=True) and len(order) >= 2
    train(*arguments)
    assert losses(report_of(report)) == pytest.approx(undisturbed, rel=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "report.json", "training.pt", "training.pt.1", "training.pt.2",
    ]  # fmt: skip


def test_killed_at_any_moment(running: ServerProcess, undisturbed: list[float], tmp_path: Path) -> None:
    path, report = tmp_path / "training.pt", tmp_path / "report.json"
    arguments = (
        "--server", running.url, *JOB, "--checkpoint", str(path), "--checkpoint-every", "1", "--keep", "2",
        "--resume", "--report", str(report),
    )  # fmt: skip
    for pause in (0.0, 0.11, 0.23):
        job: ForkedProcess = start_train(*arguments)
        try:
            seen = path.stat().st_ino if path.exists() else 0
            wait_for(
                lambda j=job, s=seen: j.poll() is not None or (path.exists() and path.stat().st_ino != s),
                60,
                "a checkpoint",
            )
            time.sleep(pause)
        finally:
            job.kill()
            job.communicate()
    train(*arguments)
    assert losses(report_of(report)) == pytest.approx(undisturbed, rel=1e-6)


def test_preempted_with_states_on_a_disk(running: ServerProcess, tmp_path: Path) -> None:
    """The checkpoint has all that a training goes on from, so the folder of the states is emptied."""
    checkpoint, states = tmp_path / "training.pt", tmp_path / "states"
    report, plain = tmp_path / "report.json", tmp_path / "plain.json"
    job = ("--server", running.url, *JOB, "--optimizer", "adamw", "--clip-norm", "1", "--ema", "0.9")
    kept = ("--checkpoint", str(checkpoint), "--checkpoint-every", "1", "--offload", "disk")
    folder = ("--offload-dir", str(states))
    preempted = start_train(*job, *kept, *folder, "--epochs", "5000")
    try:
        wait_for(checkpoint.exists, 240, "a checkpoint")
        assert list(states.iterdir())
        preempted.send_signal(signal.SIGTERM)
        output = preempted.communicate(timeout=240)[0]
    finally:
        preempted.kill()
    assert preempted.returncode == 130, output
    assert not list(states.iterdir())
    done = torch.load(checkpoint, weights_only=True)["progress"]["epoch"]
    until = ("--epochs", str(max(3, done + 1)))
    train(*job, *kept, *folder, *until, "--resume", "--report", str(report))
    train(*job, *until, "--offload", "off", "--report", str(plain))
    assert losses(report_of(report)) == losses(report_of(plain))
    assert report_of(report)["offload"]["where"] == "disk" and not list(states.iterdir())


# -- interrupted at the very start -------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.05, 0.1, 0.2])
def test_ctrl_c_right_after_the_start(delay: float) -> None:
    """Python speaks as it does until the first modules have set the handler; nothing else is in a traceback."""
    program = "import sys; from hapi.cli.entry import train; sys.exit(train())"
    job = subprocess.Popen(
        [sys.executable, "-c", program, "--store", "/nowhere"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    time.sleep(delay)
    job.send_signal(signal.SIGINT)
    output = job.communicate(timeout=240)[0]
    assert not re.search(r'File ".*hapi/(?!__init__\.py|cli/__init__\.py|cli/entry\.py)', output), output
    # Python's own handler raises KeyboardInterrupt, and in .pth files or locks of imports Python says so and goes on.
    if "hapi-train: " in output and "KeyboardInterrupt" not in output:
        assert output == "hapi-train: interrupted\n" and job.returncode == 130
    assert job.returncode != 0
