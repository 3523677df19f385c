"""Checkpoints of trainings that hold settings and figures beside the weights: read without any code of theirs."""

from __future__ import annotations

import argparse
import datetime
import io
import os
import subprocess
import sys
import types
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from support.threads import at_once
from test_sources_safetensors import content, expected

from hapi.errors import ModelError
from hapi.repository.sources.inert_objects import Inert
from hapi.repository.sources.open import open_source

STATE = {"stem.weight": torch.randn(4, 3), "head.bias": torch.ones(5)}
BESIDE: dict[str, Any] = {
    "args": argparse.Namespace(lr=0.1, data=Path("/data"), nested=argparse.Namespace(widths=[1, 2])),
    "settings": types.SimpleNamespace(depth=3),
    "best": np.float64(0.75),
    "count": np.int64(3),
    "history": np.linspace(0, 1, 5, dtype=np.float32),
    "names": np.array(["ants", "bees"]),
    "rng": np.random.get_state(),
    "begun": datetime.datetime(2026, 11, 27, 9, tzinfo=datetime.UTC),
    "took": datetime.timedelta(hours=3),
    "home": PurePosixPath("/runs"),
}


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("name", [*BESIDE, "all"])
def test_what_stands_beside_the_weights_is_passed_over(tmp_path: Path, name: str, new_format: bool) -> None:
    beside = BESIDE if name == "all" else {name: BESIDE[name]}
    path = tmp_path / "checkpoint.pth"
    torch.save({**beside, "model": STATE, "epoch": 3}, path, _use_new_zipfile_serialization=new_format)
    assert content(path) == expected(STATE)
    allowed = [each for each in torch.serialization.get_safe_globals() if isinstance(each, tuple)]
    assert not [each for each in allowed if each[0] is Inert]  # not even within this process, later on


def renamed(value: Any, old: bytes, new: bytes) -> bytes:
    """A file of torch.save in which a module has another name of the same length."""
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    assert len(old) == len(new) and old in out.getvalue()
    return out.getvalue().replace(old, new)


def test_other_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    path.write_bytes(renamed({"model": STATE, "args": BESIDE["args"]}, b"cargparse\nN", b"cargparsf\nN"))
    with pytest.raises(ModelError, match=r"it asks for argparsf.Namespace, which may run code"):
        open_source(path)


class Calls:
    """A pickle that calls, with arguments that are no constants."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(evil=Calls(os.system, ("touch never",))),
        Calls(argparse.Namespace, (), {"evil": Calls(subprocess.call, (["touch", "never"],))}),
        Calls(eval, ("open('never', 'w')",)),
    ],
)
def test_code_within_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": STATE, "args": value}, "m.pth")
    with pytest.raises(ModelError, match="which is never loaded: it asks for"):
        open_source("m.pth")
    assert not Path("never").exists()


def test_nothing_of_them_is_imported_or_changed(tmp_path: Path) -> None:
    """Not even the name's module: a checkpoint of omegaconf is read without it, and NumPy's types stay as they are."""
    swapped = Calls(np.dtype, ("f8", False, False), (3, ">", None, None, None, -1, -1, 0))
    torch.save({"model": STATE, "best": swapped}, tmp_path / "m.pth")
    assert content(tmp_path / "m.pth") == expected(STATE)
    assert np.dtype("f8").byteorder == "=" and np.float64(1.0) == 1.0
    (module := types.ModuleType("omegaconf.dictconfig")).DictConfig = type(  # type: ignore[attr-defined]
        "DictConfig", (), {"__module__": "omegaconf.dictconfig", "__qualname__": "DictConfig"}
    )
    sys.modules |= {"omegaconf": types.ModuleType("omegaconf"), "omegaconf.dictconfig": module}
    try:
        torch.save({"model": STATE, "cfg": module.DictConfig()}, tmp_path / "o.pth")
    finally:
        del sys.modules["omegaconf"], sys.modules["omegaconf.dictconfig"]
    assert content(tmp_path / "o.pth") == expected(STATE)
    assert "omegaconf" not in sys.modules


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (BESIDE["args"], "it is an object of settings or figures; save model.state_dict"),
        ({"args": BESIDE["args"]}, "'args' is an object of settings or figures; save model.state_dict"),
    ],
)
def test_settings_alone_are_no_weights(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "m.pth")
    with pytest.raises(ModelError, match=words):
        open_source(tmp_path / "m.pth")


def test_several_threads_read(tmp_path: Path) -> None:
    torch.save({"model": STATE, **BESIDE}, tmp_path / "m.pth")

    def read(number: int) -> None:
        del number
        for _ in range(5):
            assert content(tmp_path / "m.pth") == expected(STATE)

    at_once(4, read)


def test_an_inert_object_keeps_nothing() -> None:
    found = Inert(1, [2], three=3)
    found.__setstate__({"a": 1})
    assert vars(found) == {}
