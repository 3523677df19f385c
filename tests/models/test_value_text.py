"""The text of settings in a layer's identity: equal for equal values, another for any other, whatever they spell."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.forked import environment
from torch import nn

from hapi.models.graph.digest import module_settings, value_text


class Mode(Enum):
    NEAREST = 1
    LINEAR = 2


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Config:
    act: Any = "relu"
    more: Any = None
    seen: int = field(default=0, compare=False)


def function(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


NAMES = st.text(alphabet="ab'\"\\:,{}[]()<>%0123", max_size=8)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, -0.0, 1.0, 2.5, float("nan")]), NAMES,
    st.binary(max_size=3), st.sampled_from([1j, 1 + 2j]), st.sampled_from([*Mode, *Level]),
    st.builds(range, st.integers(0, 3)),
    st.sampled_from([torch.float32, torch.int8, torch.channels_last]), st.sampled_from([function, nn.ReLU, len]),
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(NAMES, st.integers(-3, 3), st.none()), inner, max_size=3),
        st.frozensets(st.one_of(NAMES, st.integers(-3, 3)), max_size=3),
        st.builds(Config, inner, inner),
        st.builds(lambda value: partial(function, scale=value), inner),
    ),
    max_leaves=6,
)


def meaning(value: Any) -> Any:
    """The value as nested tuples that are equal where its meaning is."""
    if isinstance(value, Config):
        return "config", meaning(value.act), meaning(value.more)
    if isinstance(value, partial):
        return "partial", meaning(value.keywords)
    if isinstance(value, list | tuple):
        return "list", *map(meaning, value)
    if isinstance(value, dict):
        return "dict", frozenset((meaning(key), meaning(held)) for key, held in value.items())
    if isinstance(value, frozenset):
        return "set", frozenset(map(meaning, value))
    return type(value).__name__, repr(value)


@given(VALUES, VALUES)
def test_texts_are_equal_where_values_are(one: Any, two: Any) -> None:
    assert (value_text(one, {}) == value_text(two, {})) == (meaning(one) == meaning(two))


@given(
    st.dictionaries(NAMES, st.one_of(NAMES, st.integers(0, 3)), max_size=4), st.randoms(use_true_random=False)
)
def test_the_order_of_a_dictionary_says_nothing(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert value_text(dict(items), {}) == value_text(value, {})


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a:1,b": 2}, {"a": 1, "b": 2}),
        ({"1": 0}, {1: 0}),
        (Mode.NEAREST, Mode.LINEAR),
        (frozenset({"a"}), frozenset({"b"})),
        (b"a", b"b"),
        (partial(function, scale=1.0), partial(function, scale=2.0)),
        (Config("relu"), Config("gelu")),
        (type("a>,<b", (), {"__module__": ""}), [type("a", (), {"__module__": ""}), type("b", (), {"__module__": ""})]),
    ],
)  # fmt: skip
def test_what_once_was_the_same(one: Any, two: Any) -> None:
    assert value_text(one, {}).strip("[]") != value_text(two, {}).strip("[]")


def test_a_data_class_that_holds_itself_and_what_it_leaves_out_of_comparisons() -> None:
    config = Config("relu")
    config.more = config
    assert value_text(config, {}) == value_text(config, {})
    assert value_text(Config(seen=1), {}) == value_text(Config(seen=2), {})


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names, self.modes = {f"n{number}" for number in range(20)}, {Mode.LINEAR: 1, Mode.NEAREST: 2}
        self.config = Config({"b", "a"}, partial(function, scale=2.0))


@pytest.mark.slow
def test_settings_are_the_same_in_a_process_with_other_hashes() -> None:
    program = (
        "import json\nfrom test_value_text import Opaque\nfrom hapi.models.graph.digest import module_settings\n"
        "print(json.dumps(module_settings(Opaque())))"
    )
    folder = str(__file__).rpartition("/")[0]
    env = environment(PYTHONHASHSEED="7")
    env["PYTHONPATH"] += f":{folder}:{folder.rpartition('/')[0]}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    there, here = json.loads(done.stdout), module_settings(Opaque())
    assert there.replace("test_value_text.", "") == here.replace(f"{__name__}.", "")
