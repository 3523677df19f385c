"""Values that users' modules hold, and hooks on them, are in the digest of layers, or forbid keeping."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.graph.user_code import unidentified_layer

NAME = "users_held_net"
HEAD = """
import functools
import os
import random
import threading
import types
from collections import deque, namedtuple
from enum import Enum
from typing import NamedTuple
import numpy as np
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.put(by)

    def forward(self, x):
        return self.apply_to(x) if x.sum() < 1e9 else -x  # torch.fx cannot trace it

    def put(self, by):
        pass

class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by

class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

class Settings(NamedTuple):
    by: float

class Table(dict):
    def __getattr__(self, name):
        return self[name]

class Steps(list):
    pass

def scaled(by):
    def scale(x, by=by):
        return x * by
    return scale

def scale(x, by):
    return x * by

def negative(x):
    return -x
"""
GATE = """
class Own(Gate):
    def put(self, by):
        self.{put}

    def apply_to(self, x):
        return {apply}

def net():
    return nn.Sequential(nn.Linear(6, 6), Own({by}), nn.Linear(6, 2))
"""
HELD = {
    "a private number": ("_by = by", "x * self._by"),
    "a number of numpy": ("by = np.float32(by)", "x * float(self.by)"),
    "an array of numpy": ("by = np.array([by])", "x * float(self.by[0])"),
    "an object": ("scale = Scale(by)", "x * self.scale.by"),
    "an object that is called": ("_scale = Scale(by)", "self._scale(x)"),
    "an object with slots": ("scale = Slotted(by)", "x * self.scale.by"),
    "objects in a list": ("scales = [Scale(1.0), Scale(by)]", "self.scales[1](x)"),
    "a namespace": ("config = types.SimpleNamespace(by=by)", "x * self.config.by"),
    "a method of an object": ("scale = Scale(by).__call__", "self.scale(x)"),
    "a module in a list": ("acts = [nn.LeakyReLU(by)]", "self.acts[0](x)"),
    "a tuple with names": ("settings = [Scale(Settings(by))]", "x * self.settings[0].by.by"),
    "a user's kind of dictionary": ("table = [Scale(Table(by=by))]", "x * self.table[0].by.by"),
    "a user's kind of list": ("steps = [Scale(Steps([by]))]", "x * self.steps[0].by[0]"),
    "a queue": ("steps = deque([by])", "x * self.steps[0]"),
    "a default": ("scale = scaled(by)", "self.scale(x)"),
}
"""What ``put`` does, and what forward gives."""
NAMED = {
    "a type of elements": ("BY = torch.{}", "x.to(BY).float()", ("float16", "bfloat16")),
    "an enumeration's member": (
        "class Mode(Enum):\n    ONE = 1\n    TWO = 2\nBY = Mode.{}", "x * BY.value", ("ONE", "TWO"),
    ),
    "a partial function": ("BY = functools.partial(scale, by={})", "BY(x)", ("2.0", "3.0")),
    "a number of numpy": ("BY = np.float32({})", "x * float(BY)", ("2.0", "3.0")),
    "an array of numpy": ("BY = np.array([{}])", "x * float(BY[0])", ("2.0", "3.0")),
    "a tuple with names": ("BY = Settings({})", "x * BY.by", ("2.0", "3.0")),
    "a tuple with names by a function": (
        "Pair = namedtuple('Pair', 'one two', defaults=[{}])\nBY = Pair(1.0)", "x * BY.two", ("2.0", "3.0"),
    ),
    "a user's kind of dictionary": ("BY = Table(by={})", "x * BY.by", ("2.0", "3.0")),
    "a user's kind of list": ("BY = Steps([{}])", "x * BY[0]", ("2.0", "3.0")),
    "a class's own table": ("class Holder:\n    table = Table(by={})", "x * Holder.table.by", ("2.0", "3.0")),
    "a queue": ("BY = deque([{}])", "x * BY[0]", ("2.0", "3.0")),
    "a table that is not written to": ("BY = types.MappingProxyType({{'by': {}}})", "x * BY['by']", ("2.0", "3.0")),
    "slices": ("BY = [slice({}, 6)]", "x * x[:, BY[0]].sum(1, keepdim=True)", ("2", "3")),
    "methods of a tuple with names": (
        "class Own(NamedTuple):\n    by: float\n    def times(self, x): return x * self.by * {}\nBY = Own(1.0)",
        "BY.times(x)", ("2.0", "3.0"),
    ),
    "a module": ("BY = nn.LeakyReLU({})", "BY(x)", ("0.2", "0.3")),
    "an object": ("BY = Scale({})", "BY(x)", ("2.0", "3.0")),
    "a table of functions": ("BY = {{'act': {}}}", "BY['act'](x)", ("torch.abs", "negative")),
}  # fmt: skip
"""A value that the code names, what forward gives, and two contents."""
HOOKS = {
    "a function": "lambda m, i, o: o * {}",
    "a function with a closure": "hooked({})",
    "an object": "Hook({})",
    "a method": "Hook({}).run",
    "a partial function": "functools.partial(run, {})",
}
HOOKED = """
class Hook:
    def __init__(self, by, lock=None):
        self.by, self.lock = by, lock

    def __call__(self, module, inputs, outputs):
        return outputs * self.by

    run = __call__

def run(by, module, inputs, outputs):
    return outputs * by

def hooked(by):
    return lambda m, i, o: o * by

def net():
    found = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    found[1].register_forward_hook({hook})
    return found
"""


@pytest.fixture(autouse=True)
def no_left_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))


def model_of(folder: Path, source: str) -> LayeredModel:
    """The layers of the network that a user's file of this source makes."""
    path = folder / f"{NAME}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + source)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return layered(module.net(), (6,))


def check_changes(folder: Path, one: str, two: str) -> None:
    """Layer 2 gives other features with the two sources, and has another digest; elsewhere the same as before."""
    x, features, digests = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), [], []
    for place, source in (("here", one), ("here", two), ("elsewhere", one)):
        model = model_of(folder / place, source)
        assert unidentified_layer(model, 3) is None
        digests.append(model.prefix_digests())  # while this source is the one that runs
        features.append(model.segment(0, 2, frozen=True)(x))
    assert not torch.equal(features[0], features[1]) and torch.equal(features[0], features[2])
    assert digests[0][:2] == digests[1][:2] and digests[0] == digests[2]
    assert all(first != second for first, second in zip(digests[0][2:], digests[1][2:], strict=True))


@pytest.mark.parametrize("held", HELD)
def test_attributes_of_a_users_module(tmp_path: Path, held: str) -> None:
    put, apply = HELD[held]
    one, two = (GATE.format(put=put, apply=apply, by=by) for by in (0.25, 0.5))
    check_changes(tmp_path, one, two)


@pytest.mark.parametrize("named", NAMED)
def test_values_that_a_users_code_names(tmp_path: Path, named: str) -> None:
    value, apply, contents = NAMED[named]
    one, two = (value.format(content) + GATE.format(put="by = by", apply=apply, by=1) for content in contents)
    check_changes(tmp_path, one, two)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(tmp_path: Path, hook: str) -> None:
    one, two = (HOOKED.format(hook=HOOKS[hook].format(by)) for by in (2.0, 3.0))
    check_changes(tmp_path, one, two)


def test_hooks_before_a_layer(tmp_path: Path) -> None:
    source = HOOKED.replace("register_forward_hook", "register_forward_pre_hook")
    one, two = (source.format(hook=f"lambda m, i: (i[0] * {by},)") for by in (2.0, 3.0))
    check_changes(tmp_path, one, two)


PARAMETRISED = """
class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * {} if x.sum() < 1e9 else -x

def net():
    own = Own(6, 6)
    nn.utils.parametrize.register_parametrization(own, "weight", nn.Identity())
    return nn.Sequential(nn.Linear(6, 6), own, nn.Linear(6, 2))
"""


def test_classes_that_torch_derives_from_a_users(tmp_path: Path) -> None:
    check_changes(tmp_path, PARAMETRISED.format(2.0), PARAMETRISED.format(3.0))


class Quantised(nn.Module):
    """A convolution on 8 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.conv(self.enter(x)))


def quantised(*, dynamic: bool, weight: float) -> LayeredModel:
    torch.manual_seed(0)
    first = nn.Linear(8, 8) if dynamic else Quantised().conv
    with torch.no_grad():
        first.weight.view(-1)[3] = weight
    if dynamic:
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(first), {nn.Linear})
        return layered(nn.Sequential(module, nn.Flatten()), (8,))
    whole = Quantised().eval()
    whole.conv, whole.qconfig = first, torch.ao.quantization.default_qconfig
    torch.ao.quantization.prepare(whole, inplace=True)
    whole(torch.linspace(-1, 1, 300).reshape(1, 3, 10, 10))
    for observer in (m for m in whole.modules() if isinstance(m, torch.ao.quantization.MinMaxObserver)):
        observer.min_val, observer.max_val = torch.tensor(-2.0), torch.tensor(2.0)  # the same scale for all
    return layered(nn.Sequential(torch.ao.quantization.convert(whole), nn.Flatten()), (3, 8, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_are_packed(dynamic: bool) -> None:
    """Quantised layers of torch hold them in no tensor that a module names."""
    one, same, two = (quantised(dynamic=dynamic, weight=weight) for weight in (0.125, 0.125, -0.125))
    assert not any("weight" in name for name in one.tensor_names(0, 1))
    assert one.prefix_digests() == same.prefix_digests()
    assert one.prefix_digest(1) != two.prefix_digest(1)


@pytest.mark.parametrize(
    ("hook", "name"), [("Hook(2.0, threading.Lock())", "Hook"), ("eval('lambda *_: None')", "<lambda>")]
)
def test_hooks_that_cannot_be_told_are_named(tmp_path: Path, hook: str, name: str) -> None:
    model = model_of(tmp_path, HOOKED.format(hook=hook))
    assert unidentified_layer(model, 1) is None
    layer, why = unidentified_layer(model, 3) or (None, "")
    assert layer is model.layers[1] and why.startswith(f"runs the hook {name}, whose source cannot be read")


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_forbid_keeping(register: str) -> None:
    model = layered(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), (6,))
    handle = getattr(nn.modules.module, register)(twice)
    try:
        assert unidentified_layer(model, 0) is None
        assert unidentified_layer(model, 2) == (
            model.layers[0],
            "runs under the hook twice of all modules, which is no part of the model",
        )
    finally:
        handle.remove()
    assert unidentified_layer(model, 2) is None


def twice(module: nn.Module, inputs: Any, outputs: Any = None) -> Any:
    return (2 * inputs[0],) if outputs is None else 2 * outputs


def test_hooks_of_torch_and_those_of_gradients_say_nothing(tmp_path: Path) -> None:
    digests = []
    for line in ("pass", "found[1].register_full_backward_hook(lambda *_: None)"):
        source = HOOKED.format(hook="lambda *_: None").replace(
            "found[1].register_forward_hook(lambda *_: None)", line
        )
        digests.append(model_of(tmp_path, source).prefix_digests())
    assert digests[0] == digests[1]
    norm = nn.utils.weight_norm(nn.Linear(6, 6))
    assert unidentified_layer(layered(nn.Sequential(norm, nn.Linear(6, 2)), (6,)), 2) is None


def test_what_cannot_be_told_counts_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with a lock, and a path: no other process would have the same."""
    held = """
def made(kind):
    return Scale([threading.Lock(), os.getpid()]) if kind == 1 else Scale("/home/somebody/" + str(os.getpid()))
"""
    for kind in (1, 2):
        source = held + GATE.format(put="scale = made(by)", apply="x * 2", by=kind)
        digests = []
        for process in (7, 8):
            monkeypatch.setattr(os, "getpid", lambda process=process: process)
            digests.append(model_of(tmp_path, source).prefix_digests())
        assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "layer",
    [
        "lambda x: torch.nn.functional.dropout(x, 0.5)",
        "lambda x: x + torch.randn_like(x)",
        "lambda x: torch.nn.functional.dropout(x, 0.5) if x.sum() < 1e9 else -x",
        "lambda x: x * random.random() if x.sum() < 1e9 else -x",
        "lambda x: x * np.random.rand() if x.sum() < 1e9 else -x",
    ],
    ids=["dropout that is always on", "noise", "in what cannot be traced", "of Python", "of numpy"],
)
def test_random_numbers_in_eval_mode_are_refused_by_name(layer: str, tmp_path: Path) -> None:
    source = f"""
class Noisy(nn.Module):
    def forward(self, x):
        return ({layer})(x)

def net():
    return nn.Sequential(nn.Linear(6, 6), Noisy(), nn.Linear(6, 2))
"""
    model = model_of(tmp_path, source)
    first = next(one for one in model.layers if one.always_random)
    assert first.name.startswith("1") and unidentified_layer(model, first.index - 1) is None
    assert unidentified_layer(model, first.index) == (
        first,
        "draws random numbers in eval mode too, so what comes after it differs from epoch to epoch",
    )


def test_dropout_of_training_is_not_refused() -> None:
    model = layered(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)), (6,))
    assert unidentified_layer(model, 3) is None and [one.random for one in model.layers] == [
        False,
        True,
        False,
    ]
