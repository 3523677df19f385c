"""Settings that a checkpoint keeps, and those of a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.train_cli import refused

from hapi.config.fields import settings_fields
from hapi.config.settings import Loaded
from hapi.errors import ConfigError, ConflictError, UsageError
from hapi.train.checkpoints.kept_settings import (
    ALTERNATIVES,
    OF_ONE_PROCESS,
    PATHS,
    KeptSettings,
    read_kept,
    settings_to_keep,
    with_kept,
)
from hapi.train.settings import TrainSettings


def given(**values: Any) -> Loaded[TrainSettings]:
    return Loaded(value=TrainSettings(**values), origins={name: f"--{name}" for name in values})


def kept(settings: TrainSettings) -> KeptSettings:
    return KeptSettings("c.pt", settings_to_keep(settings, settings, "digits"))


def test_the_names_are_settings() -> None:
    names = {field.name for field in settings_fields(TrainSettings)}
    assert {*OF_ONE_PROCESS, *PATHS, *(name for group in ALTERNATIVES for name in group)} <= names


def test_settings_come_back() -> None:
    """Numbers of all kinds, words, texts that look like something else, and several values."""
    first = TrainSettings(
        model="no", bs=7, lr=1e-05, head_lr=0.1 + 0.2, freeze="1", augment=("crop", "flip"), profile_epoch=(1, 2),
        validation=0.25, server=("http://a:1", "http://b:1"), drop_last=True, timeout=1.5, memory=1 << 30,
        output="/runs/x", keep=3, checkpoint_every=2,
    )  # fmt: skip
    back = with_kept(given(resume=True, output="/runs/x"), kept(first))
    assert back.value == TrainSettings(**{**vars(first), "resume": True, "dataset": "digits"})
    assert (
        back.origins["bs"] == "c.pt" and back.origins["output"] == "--output" and "seed" not in back.origins
    )


def test_given_ones_win_where_they_may_change() -> None:
    first = TrainSettings(store="/data", lr=0.1, epochs=3, output="/runs/x")
    back = with_kept(
        given(resume=True, checkpoint="/c.pt", epochs=5, server=("http://a:1",)), kept(first)
    ).value
    assert (back.lr, back.epochs, back.server, back.store, back.output) == (
        0.1,
        5,
        ("http://a:1",),
        None,
        "/runs/x",
    )


@pytest.mark.parametrize(
    ("name", "before", "after"), [("bs", 64, 32), ("seed", 0, 1), ("optimizer", "sgd", "adamw")]
)
def test_others_are_refused(name: str, before: Any, after: Any) -> None:
    first = kept(TrainSettings(**{name: before}))
    with_kept(given(resume=True, **{name: before}), first)
    with pytest.raises(
        ConflictError, match=rf"^--{name} {after}: c.pt belongs to another job: its {name} is"
    ):
        with_kept(given(resume=True, **{name: after}), first)


@pytest.mark.parametrize(
    ("after", "idle"),
    [
        ({"offload": "off"}, {"offload_dir": ("/scratch",)}),
        ({"offload": "host"}, {"offload_dir": ("/scratch", "/other")}),
        (
            {"cache": "off"},
            {"cache_dir": "/c", "cache_size": 1 << 30, "cache_codec": "zeros", "cache_memory": 1 << 20},
        ),
        ({"split": "3"}, {"save_profile": "/p.json"}),
        ({"split": "freeze"}, {"profile": "/p.json", "objective": "money"}),
        ({"output": None, "checkpoint": "/c.pt"}, {"log": ("csv",), "push": "store/m"}),
        ({"store": "/data"}, {"server": ("https://a:1",), "ca_file": "/ca.pem", "token_file": "/token"}),
    ],
)
def test_kept_ones_end_with_what_they_are_for(after: dict[str, Any], idle: dict[str, Any]) -> None:
    """``--resume`` with ``--offload off`` cannot take back the ``--offload-dir`` of the first run."""
    first = kept(TrainSettings(output="/runs/x", **idle))
    back = with_kept(given(resume=True, **after), first)
    default = TrainSettings()
    assert {name: getattr(back.value, name) for name in idle} == {
        name: getattr(default, name) for name in idle
    }
    assert not idle.keys() & back.origins.keys()
    again = with_kept(given(resume=True, **after, **idle), first)  # given ones stay, and are refused
    assert {name: getattr(again.value, name) for name in idle} == idle


def test_a_run_without_a_folder_stays_without() -> None:
    back = with_kept(given(resume=True, checkpoint="/c.pt"), kept(TrainSettings(checkpoint="/c.pt")))
    assert back.value.output is None and "output" in back.origins


def test_paths_hold_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pth").touch()
    values = settings_to_keep(
        *[TrainSettings(store="data", weights="w.pth", class_weights="balanced", output="run", html="run/page.html",
                        report="run/report.json", profile="memory://x", init_from="old.pt", resume=True)] * 2,
        "digits",
    )  # fmt: skip
    assert values == {
        "store": f"{tmp_path}/data", "weights": f"{tmp_path}/w.pth", "class_weights": "balanced",
        "output": f"{tmp_path}/run", "html": f"{tmp_path}/run/page.html", "profile": "memory://x",
        "dataset": "digits",
    }  # fmt: skip


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"c\.pt.*nonsense"):
        with_kept(given(resume=True), KeptSettings("c.pt", {"nonsense": 1}))


def test_no_checkpoint_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    assert read_kept(str(path)) is None
    path.write_bytes(b"hours of work")
    with pytest.raises(UsageError, match=r"^--resume: .*c\.pt"):
        read_kept(str(path))


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    for arguments, message in (
        (
            (folder,),
            f"{folder}: is a folder, no file of settings; to go on with the run in it, give --resume {folder}",
        ),
        (
            ("--resume", folder),
            f"--resume {folder}: no run to go on with: there is no {folder}/checkpoint.pt",
        ),
        (("--resume", folder, "--output", "x"), "--output x: the run folder is given already"),
        (
            ("--resume", f"{folder}/no"),
            f"--resume {folder}/no: no run to go on with: there is no such folder",
        ),
    ):
        code, line = refused(capsys, *arguments)
        assert code == 2 and message in line
