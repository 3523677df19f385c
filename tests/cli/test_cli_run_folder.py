"""The folder that each run of ``hapi-train`` leaves in ``runs/``, and the log in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.forked import ForkedProcess
from support.harness import ServerProcess, report_of
from support.train_cli import FAST, refused

from hapi.api.model_files import load_model
from hapi.cli import train as command
from hapi.text import printable
from hapi.train.checkpoints.checkpoint import claimed
from hapi.train.settings import TrainSettings

JOB = FAST[1:]
"""Without its ``--no-output``."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir())


@pytest.mark.slow
def test_a_run_leaves_its_folder(
    running: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--server", running.url, *JOB]) == 0
    (made,) = runs(folder)
    assert re.fullmatch(r"digits-resnet18-\d{8}-\d{6}", made.name)
    names = sorted(path.name for path in made.iterdir())
    assert names == ["best.safetensors", "checkpoint.pt", "log.txt", "model.safetensors", "report.json"]
    out = capsys.readouterr().out
    place = f"runs/{made.name}"
    assert out.count(f"\nrun   {place}\n") == 2, "at the start and at the end"
    assert out.endswith(f"\nnext  hapi predict {place}/best.safetensors IMAGE\n")
    log = (made / "log.txt").read_text()
    lines = [re.sub(r"^\S+ \S+ ", "", line) for line in log.splitlines()]
    assert [line for line in lines if not line.startswith("INFO ")] == out.splitlines()
    assert sum("offload: not needed" in line for line in lines) == 1
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d model resnet18", log)
    assert report_of(made / "report.json")["settings"]["output"] == place

    again = ["--server", running.url, *JOB, "--output", place, "--resume", "--epochs", "2"]
    assert command.main(again) == 0
    assert (made / "log.txt").read_text().startswith(log), "the log goes on"
    assert load_model(made / "model.safetensors").card.epoch == 2
    assert len(runs(folder)) == 1

    capsys.readouterr()
    for name in ("best.safetensors", "report.json"):  # as after a kill in the last save
        (made / name).unlink()
    assert command.main(again) == 0
    out = capsys.readouterr().out
    said = "\nthe training had ended; saved what was missing of it: best.safetensors, report.json\n"
    assert f"{said}run   {place}\nnext  hapi predict {place}/best.safetensors IMAGE\n" in out, out
    assert command.main(again) == 0
    assert "nothing to do: the checkpoint has 2 epochs already" in capsys.readouterr().out


@pytest.mark.slow
def test_files_that_are_named_go_there_and_none_without_a_folder(
    running: ServerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["--checkpoint", "c.pt", "--report", "r.json"]
    assert command.main(["--server", running.url, *JOB, *named]) == 0
    (made,) = runs(folder)
    assert sorted(p.name for p in made.iterdir()) == ["best.safetensors", "log.txt", "model.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == ["c.pt", "r.json", "runs"]
    for nothing in (["--no-output"], ["none.yaml"]):
        Path("none.yaml").write_text("output: null\n")
        assert command.main(["--server", running.url, *JOB, *nothing]) == 0
    monkeypatch.setenv("HAPI_TRAIN_OUTPUT", "null")
    assert command.main(["--server", running.url, *JOB]) == 0
    assert runs(folder) == [made]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [["--model", "resnet1"], ["--split", "12"], ["--split", "freeze", "--save-profile", "p.json"]]
)
def test_what_fails_before_it_starts_leaves_nothing(
    running: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    for output in ([], ["--output", "new/er", "--report", "other/r.json"]):
        code, _ = refused(capsys, "--server", running.url, *JOB, *wrong, *output)
        assert code == 2 and list(folder.iterdir()) == []


def test_a_dead_server_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "--server", "http://127.0.0.1:9", "--patience", "0.1s", *JOB)
    assert list(folder.iterdir()) == []
    (folder / "file").touch()
    refused(capsys, "--store", "store", *JOB, "--report", "new/r", "--trace", "file/trace")
    assert [path.name for path in folder.iterdir()] == ["file"], "also when an output cannot be written"


def test_no_place_for_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs").touch()
    code, line = refused(capsys, "--store", "store", *JOB)
    assert code == 2 and "runs: cannot be written there" in line and "--output DIR" in line


@pytest.mark.slow
def test_the_log_has_warnings_and_the_end(running: ServerProcess, folder: Path) -> None:
    """What the process says is as without a log: warnings once on stderr; the error's line is the last."""
    exploding = ["--lr", "1e6", "--weight-decay", "1e3", "--epochs", "9"]
    command_line = ["hapi.cli.train", "--server", running.url, *JOB, *exploding]
    process = ForkedProcess(command_line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = process.communicate(100)
    assert process.wait() == 3
    (made,) = runs(folder)
    log = (made / "log.txt").read_text()
    warning, error = errors.splitlines()
    assert warning.startswith("the loss has grown") and log.count(f" WARNING hapi.client: {warning}\n") == 1
    assert "diverged" in error and log.endswith(f" {error}\n") and log.count(error) == 1
    assert report_of(made / "report.json")["ended"]["how"] == "diverged"


# -- --log -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_loggers(running: ServerProcess, folder: Path) -> None:
    arguments = ["--server", running.url, *JOB, "--epochs", "2", "--log", "csv", "--log-every", "1"]
    assert command.main([*arguments, "--log", "tensorboard,csv"]) == 0
    (made,) = runs(folder)
    assert len((made / "steps.csv").read_text().splitlines()) == 9
    assert len((made / "epochs.csv").read_text().splitlines()) == 3
    assert len(list((made / "tensorboard").iterdir())) == 1
    assert report_of(made / "report.json")["settings"]["log_every"] == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["--log", "tensorbord"], "--log: expected one of csv, tensorboard, wandb, mlflow"),
        (["--log", "csv", "--no-output"], "--log: needs a run folder; leave --no-output out"),
        (["--log-every", "0"], "--log-every: expected a number from 1"),
        (
            ["--log", "csv,wandb"],
            "--log wandb: needs wandb, which is not installed: pip install 'hapi-split[wandb]'",
        ),
    ],
)
def test_loggers_that_cannot_be(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: list[str],
    match: str,
) -> None:
    """Said before anything starts: no server is asked."""
    monkeypatch.setattr("hapi.train.loggers.choose._installed", lambda package: package != "wandb")
    code, line = refused(capsys, "--server", "http://127.0.0.1:9", *JOB, *wrong)
    assert code == 2 and match in line and list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_cannot_begin_leaves_the_folder_alone(
    running: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is that of a run that is at work, or of one that was begun otherwise."""
    job = ("--server", running.url, *JOB, "--output", "mine")
    assert command.main(job) == 0
    before = {path.name: path.read_bytes() for path in (folder / "mine").iterdir()}
    capsys.readouterr()
    with claimed("mine/checkpoint.pt", "--output mine"):
        code, line = refused(capsys, *job, "--resume", "--epochs", "2")
    assert code == 1 and "--output mine: another hapi-train is writing there" in line
    code, line = refused(capsys, *job, "--resume", "--seed", "3")
    assert code == 1 and "its seed is 0, this one's 3" in line
    assert {path.name: path.read_bytes() for path in (folder / "mine").iterdir()} == before


@pytest.mark.parametrize(
    "settings", [{"model": "nets:small"}, {"model": "store:small", "allow_model": ("nets:small",)}]
)
def test_the_next_command_allows_the_factory(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command._say_next(TrainSettings(output="a", **settings))
    assert capsys.readouterr().out.endswith("a/best.safetensors IMAGE --allow-model nets:small\n")


def test_the_next_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    for place, shown in (("my runs/a", "'my runs/a/best.safetensors'"), ("a\nb", "'a\nb/best.safetensors'")):
        command._say_next(TrainSettings(output=place))
        name, line = capsys.readouterr().out.split("\n", 1)
        assert name == f"run   {printable(place)}" and line == f"next  hapi predict {shown} IMAGE\n"
