"""What people type: other names of flags and commands, files of settings as a flag, the settings printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.harness import ServerProcess, server
from support.local_job import pack_blobs
from support.train_cli import FAST, refused
from support.waiting import until

from hapi.cli import server as server_command
from hapi.cli import train as command
from hapi.cli.main import main
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.config.settings import load
from hapi.errors import ConfigError, UnauthorizedError
from hapi.train.settings import TrainSettings


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_other_names_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        "train",
        "--learning-rate",
        "0.25",
        "--batch-size",
        "7",
        "--output-dir",
        "runs/a",
        "--print-config",
    )
    assert yaml.safe_load(out) == {"lr": 0.25, "bs": 7, "output": "runs/a"}


def test_printed_settings_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        "vgg11",
        "--profile-epoch",
        "1,2",
        "--epochs",
        "5",
        "--server",
        "http://a:1,http://b:2",
    ]
    first = printed(capsys, "train", *arguments, "--print-config")
    (tmp_path / "job.yaml").write_text(first)
    assert printed(capsys, "train", "--config", str(tmp_path / "job.yaml"), "--print-config") == first
    assert printed(capsys, "train", str(tmp_path / "job.yaml"), "--print-config") == first
    everything = yaml.safe_load("\n".join(line.removeprefix("# ") for line in first.splitlines()))
    assert (
        everything["lr"] == 0.01 and everything["model"] == "vgg11" and everything["profile_epoch"] == [1, 2]
    )


def test_a_servers_settings_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "server", "--store", str(tmp_path), "--port", "0", "--print-config")
    assert yaml.safe_load(out) == {"store": str(tmp_path), "port": 0}
    assert server_command.main(["--print-config", "--port", "x", "--store", "s"]) == 2
    assert "--port" in capsys.readouterr().err


def test_one_file_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("bs: 3\n")
    line = refused(capsys, str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"), *FAST)[1]
    assert "--config" in line and "a.yaml" in line
    assert "none.yaml" in refused(capsys, "--config", str(tmp_path / "none.yaml"))[1]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    store = tmp_path_factory.mktemp("status") / "store"
    pack_blobs(store)
    with server(store, HAPI_TOKEN="a token of status".replace(" ", "-")) as running:
        yield running


@pytest.mark.slow
def test_what_a_server_does(
    busy: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAPI_TOKEN", "a-token-of-status")
    assert command.main(["--server", busy.url, *FAST, "--split", "freeze"]) == 0
    capsys.readouterr()
    lines = printed(capsys, "status", busy.url).splitlines()
    assert lines[0].startswith(f"{busy.url}: serving, hapi ") and "slots busy, 0 queued" in lines[0]
    assert lines[1].startswith("  cpu: 0 requests, memory ") and "COS batch" in lines[1]

    def has_served() -> bool:  # a request counts once it is over, which a trainer may see earlier
        found = printed(capsys, "status", busy.url).splitlines()
        return any(line.startswith("  tenant ") and " 0 served" not in line for line in found)

    until(has_served, 10, "a request that counts")
    assert json.loads(printed(capsys, "status", busy.url, "--json"))["fleet"]["states"] == {"serving": 1}


@pytest.mark.slow
def test_a_server_that_does_not_answer(
    busy: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, url, says in (
        ("a-wrong-token", busy.url, "the token is wrong"),
        ("", busy.url, "no token was sent, and this server wants one"),
        ("", "http://127.0.0.1:1", "127.0.0.1:1"),
        ("", "store:8099", "store:8099"),
    ):
        monkeypatch.setenv("HAPI_TOKEN", token)
        assert main(["status", url]) in (1, 2)
        err = capsys.readouterr().err
        assert err.startswith("hapi status: error: ") and says in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_session_sends_the_token_that_commands_send(
    busy: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SessionSettings(server=(busy.url,), model="squeezenet1_1", weights="random:0", split="freeze")
    for token, says in (("a-wrong-token", "the token is wrong"), ("", "no token was sent")):
        monkeypatch.setenv("HAPI_TOKEN", token)
        with pytest.raises(UnauthorizedError, match=says):
            Session.open(settings)
    monkeypatch.setenv("HAPI_TOKEN", "a-token-of-status")
    with Session.open(settings) as session:
        assert session.job_context.weights == "random:0"


def test_other_names_of_settings(tmp_path: Path) -> None:
    """In Python and in files too; one value is kept."""
    settings = TrainSettings(batch_size=7, learning_rate=0.25, output_dir="runs/a")  # type: ignore[call-arg]
    assert settings == TrainSettings(bs=7, lr=0.25, output="runs/a")
    assert (settings.batch_size, settings.learning_rate) == (7, 0.25)  # type: ignore[attr-defined]
    assert SessionSettings(batch_size=7) == SessionSettings(bs=7)  # type: ignore[call-arg]
    assert replace(settings, bs=8).bs == 8
    with pytest.raises(TypeError, match="'batch_size' is another name of 'bs'; give one of them"):
        TrainSettings(bs=7, batch_size=7)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="batchsize"):
        TrainSettings(batchsize=7)  # type: ignore[call-arg]
    file = tmp_path / "job.yaml"
    file.write_text("batch_size: 7\nlearning_rate: 0.25\n")
    loaded = load(TrainSettings, file)
    assert (loaded.value.bs, loaded.value.lr) == (7, 0.25) and loaded.origins["bs"].endswith("job.yaml:1:13")
    file.write_text("batch_size: 7\nbs: 8\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:2:1: key 'bs' appears twice"):
        load(TrainSettings, file)
