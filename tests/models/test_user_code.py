"""A user's own code is in the digest of the layers that run it: what changes results changes it, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.graph.user_code import DIGITS, unidentified_layer, user_code

NAME = "users_net"
SOURCE = '''
import functools
import math
import torch
from torch import nn

SCALE, LR = 2.0, 0.1
LIMITS = {"low": 0.5}
class Settings:
    """Of it."""
    gain = 1.5

def squash(x, by=1.0):
    """Squash."""
    return torch.tanh(x * by)

def train(lr=LR):
    return lr

def traced_as_is(value):
    return float(value)

class Base(nn.Module):
    def after(self, x):
        return x + 1  # one

class Gate(Base):
    """Branches on its data."""

    slope = 0.25

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    @staticmethod
    def shift():
        return 3.0

    @property
    def gain(self):
        return Settings.gain * LIMITS["low"]

    def forward(self, x):
        if x.sum() > 0:
            return self.after(squash(self.inner(x)) * SCALE) * self.gain * self.slope
        return x - self.shift() * math.pi
'''
CHANGES = (
    ("x.sum() > 0", "x.sum() > 1"),
    ("math.pi", "math.e"),
    ("x + 1", "x + 2"),
    ("torch.tanh(x * by)", "torch.tanh(x) * by"),
    ("by=1.0", "by=2.0"),
    ("SCALE, LR = 2.0", "SCALE, LR = 3.0"),
    ("return 3.0", "return 4.0"),
    ("gain = 1.5", "gain = 2.5"),
    ('"low": 0.5', '"low": 0.6'),
    ("slope = 0.25", "slope = 0.5"),
    ("nn.Linear(6, 6)", "nn.Linear(6, 6, bias=True)"),
)
"""Each may change what Gate gives."""
NO_CHANGES = (
    ("  # one", "  # two"),
    ('"""Branches on its data."""', '"""Has two branches."""'),
    ('    """Squash."""\n', ""),
    ("LR = 2.0, 0.1", "LR = 2.0, 0.2"),
    ("return lr", "return 2 * lr"),
    ("\n\nclass Gate", "\n\nOTHER = 5\n\n\n\nclass Gate"),
    ("x - self.shift() * math.pi", "x - (\n            self.shift() * math.pi\n        )"),
)


def imported(folder: Path, source: str = SOURCE) -> ModuleType:
    path = folder / f"{NAME}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_left_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # two files of one second and size look the same to it
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def model_of(gate: type[nn.Module]) -> LayeredModel:
    torch.manual_seed(0)
    return layered(nn.Sequential(nn.Linear(6, 6), gate(), nn.Linear(6, 2)), (6,))


def test_what_may_change_results_changes_the_digest(tmp_path: Path) -> None:
    found = [user_code(imported(tmp_path, SOURCE).Gate)]
    found += [user_code(imported(tmp_path, changed(*change)).Gate) for change in CHANGES]
    assert len(set(found)) == len(found) == len(CHANGES) + 1
    assert all(digest is not None and len(digest) == DIGITS for digest in found)


def test_what_does_not_change_results_does_not(tmp_path: Path) -> None:
    expected = user_code(imported(tmp_path / "elsewhere", SOURCE).Gate)
    for change in NO_CHANGES:
        assert user_code(imported(tmp_path, changed(*change)).Gate) == expected, change


@pytest.mark.parametrize("thing", [nn.Linear, nn.functional.relu, torch.tanh, "text", 3, None, len])
def test_libraries_have_versions_instead(thing: Any) -> None:
    assert user_code(thing) == ""


def test_a_layer_of_torch_whose_forward_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [user_code(nn.ReLU)]
    for source in (SOURCE, changed("torch.tanh(x * by)", "torch.tanh(x) * by")):
        source += "\ndef forward(self, x):\n    return squash(x)\n"
        monkeypatch.setattr(nn.ReLU, "forward", imported(tmp_path, source).forward)
        found.append(user_code(nn.ReLU))
        model = layered(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (6,))
        found.append(model.prefix_digest(2))
    assert None not in found and len(set(found)) == 5


def test_changes_of_a_running_program_count(tmp_path: Path) -> None:
    module = imported(tmp_path)
    found = {user_code(module.Gate)}
    module.SCALE = 5.0
    found.add(user_code(module.Gate))
    module.Gate.slope = 7.0
    found.add(user_code(module.Gate))
    module.Gate.after = module.squash
    found.add(user_code(module.Gate))
    assert len(found) == 4 and None not in found


def test_source_that_is_not_what_runs_is_none(tmp_path: Path) -> None:
    module = imported(tmp_path)
    (tmp_path / f"{NAME}.py").write_text(changed("x + 1", "x + 2"))
    assert user_code(module.Gate) is None
    (tmp_path / f"{NAME}.py").unlink()
    assert user_code(module.Gate) is None
    space: dict[str, Any] = {"__name__": "typed_in"}
    exec(SOURCE, space)
    assert user_code(space["Gate"]) is None and user_code(space["squash"]) is None


def test_layers_that_run_it_have_it_in_their_digest(tmp_path: Path) -> None:
    digests = []
    for source in (SOURCE, changed("x.sum() > 0", "x.sum() > 1"), changed("return lr", "return 2 * lr")):
        model = model_of(imported(tmp_path, source).Gate)
        assert model.traced.opaque == ("1",) and unidentified_layer(model, 3) is None
        digests.append(model.prefix_digests())
    before, other, same = digests
    assert before == same and before[:2] == other[:2]
    assert all(one != two for one, two in zip(before[2:], other[2:], strict=True))
    space: dict[str, Any] = {"__name__": "typed_in"}
    exec(SOURCE, space)
    model = model_of(space["Gate"])
    assert unidentified_layer(model, 1) is None
    layer, why = unidentified_layer(model, 2) or (None, "")
    assert layer is model.layers[1] and why.startswith("runs typed_in.Gate, whose source")


IMPORTED = """
import torch

class Gate(torch.nn.Module):
    def forward(self, x):
        {line}
        return helpers.scaled(x) if x.sum() < 1e9 else -x
"""


@pytest.mark.parametrize(
    "line", ["import users_net_helpers as helpers", "from users_net_helpers import inside as helpers"]
)
def test_what_a_function_imports_when_it_runs_counts(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for by in (2.0, 3.0, 2.0):
        monkeypatch.delitem(sys.modules, "users_net_helpers", raising=False)
        (tmp_path / "users_net_helpers.py").write_text(
            f"BY = {by}\ndef scaled(x):\n    return x * BY\nclass inside:\n    scaled = scaled\n"
        )
        found.append(user_code(imported(tmp_path, IMPORTED.format(line=line)).Gate))
    assert found[0] == found[2] != found[1] and None not in found


def test_what_a_package_imports_of_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, found = tmp_path / "users_package", []
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "net.py").write_text(IMPORTED.format(line="from . import helpers"))
    for by in (2.0, 3.0):
        for name in [name for name in sys.modules if name.startswith("users_package")]:
            monkeypatch.delitem(sys.modules, name)
        (folder / "helpers.py").write_text(f"def scaled(x):\n    return x * {by}\n")
        importlib.invalidate_caches()
        found.append(user_code(importlib.import_module("users_package.net").Gate))
    assert found[0] != found[1] and None not in found


def test_other_projects_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take long, or do more than define something."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "users_net_other.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "others"))
    lines = ("import users_net_other as helpers", "import users_net_absent as helpers")
    found = [user_code(imported(tmp_path / "own", IMPORTED.format(line=line)).Gate) for line in lines]
    assert None not in found and "users_net_other" not in sys.modules


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    expected = user_code(imported(tmp_path).Gate)
    code = f"import {NAME}; from hapi.models.graph.user_code import user_code; print(user_code({NAME}.Gate))"
    for seed in ("1", "2"):
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        assert found.stdout.strip() == expected
