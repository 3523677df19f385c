"""The identity of layers under other versions of Python: all that Hapi itself hashes, without what torch traces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)
USERS_NET = '''
"""Its documentation."""
import math
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from functools import partial

SCALE, NAMES = 1e-5, {"low": 0.5, "high": (1, -0.0, float("inf"))}

class Mode(Enum):
    NEAREST = "nearest"
    LINEAR = "linear"

class Parts(IntFlag):
    FIRST = 1
    SECOND = 2

@dataclass
class Config:
    """Settings."""

    rate: float = 0.1
    names: set = field(default_factory=lambda: {f"n{i}" for i in range(9)})

def scaled(x, *more, by: "float" = SCALE, **named):
    """Scale."""
    text = f"{by!r:>{len(more) + 8}} {x=} {NAMES['low']:.3e}" "and" f"{Mode.LINEAR}"
    match more:
        case [first, *others] if (count := len(others)) > 1:
            return x * first + count
        case {"key": value, **kept} | [{"key": value, **kept}]:
            return value
    try:
        return [y @ x for y in more if y not in (None, ...)] or (lambda z, /: z ** 2)(x)
    except* (ValueError, KeyError) as error:
        raise RuntimeError(text) from error
    finally:
        del named

async def gathered(values):
    async with values as opened:
        return [item async for item in opened] + [await one for one in values]

class Net:
    """A network."""
    slope: float = 0.25

    def __init__(self):
        self.scaled = partial(scaled, by=2.0)

    @property
    def shift(self): return math.sqrt(self.slope) if self.slope else -1_000.5e-3j

    @classmethod
    def made(cls, *, deep=True): global _made; _made = cls(); return _made
'''
PROGRAM = """
import json, math, operator, sys
from functools import partial

import users_net
from hapi.models.graph.architecture import ArchitectureGraph
from hapi.models.graph.digest import value_text
from hapi.models.graph.user_code import user_code

graphs, digests = json.load(sys.stdin)
found = []
for configs, nodes in graphs:
    graph = ArchitectureGraph(tuple(configs), tuple(map(tuple, nodes)))
    content = graph.content([digests[: node[0]] for node in nodes])
    found.append([one.hex() for one in (*graph.structure(), *content)])
values = [
    None, True, 0, -(10**30), 0.1 + 0.2, 1e300, 5e-324, -0.0, math.inf, math.nan, 2.5 - 1e-9j, "é\\u2028'\\"\\x00",
    b"\\xff\\x00'", range(1, 9, 2), slice(None, -1), [1, (2.0, [])], frozenset("abc"),
    {"b": {3, 1.5, "x"}, 1: frozenset("abc"), (1, 2): None},
    users_net.Mode.LINEAR, users_net.Parts.FIRST | users_net.Parts.SECOND, users_net.Config(), users_net.Config,
    partial(users_net.scaled, 3, by=0.5), operator.add, operator.getitem, math.sqrt, len, dict,
    str.join, users_net.Net(),
]
found.append([value_text(value, {}) for value in values])
things = (users_net.scaled, users_net.gathered, users_net.Net, users_net.Config, users_net.Mode)
found.append([user_code(thing) for thing in things])
print(json.dumps(found))
"""
WITHOUT_TORCH = '''
import sys, types

class Stand(types.ModuleType):
    """Has a class of every name: types of which no value here is."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)

ABSENT = ["numpy", "torch", "torch.fx", "torch.nn"]
ABSENT += map("hapi.models.{}".format, ("tensors", "graph.cuts", "graph.segment"))
for name in ABSENT:
    sys.modules[name] = Stand(name)
sys.modules["torch"].fx, sys.modules["torch"].nn = sys.modules["torch.fx"], sys.modules["torch.nn"]
'''


def interpreters() -> Iterator[tuple[tuple[int, int], str]]:
    """Versions that Hapi supports, and an interpreter of each that is here."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    for minor in range(OLDEST[1], OLDEST[1] + 10):
        for folder in folders:
            found = folder / f"python3.{minor}"
            if found.exists() and "shims" not in found.parts:
                yield (3, minor), str(found)
                break


def graphs(count: int) -> list[tuple[list[str], list[list[int]]]]:
    """Random graphs: (configurations, nodes)."""
    rng, found = random.Random(7), []
    for _ in range(count):
        configs = [f"é {i} {rng.random()!r}" for i in range(rng.randint(1, 5))]
        nodes = [
            [rng.randrange(len(configs)), *(rng.randrange(place) for _ in range(rng.randint(0, 3)) if place)]
            for place in range(rng.randint(1, 30))
        ]
        found.append((configs, nodes))
    return found


@pytest.mark.slow
def test_other_versions_of_python_hash_the_same(tmp_path: Path) -> None:
    (tmp_path / "users_net.py").write_text(USERS_NET, encoding="utf-8")
    others = {version: path for version, path in interpreters() if version != sys.version_info[:2]}
    if not others:
        pytest.skip("needs another version of Python")
    given = json.dumps([graphs(50), ["d1", "d2", "d3", "d4", "d5"]])
    found = {}
    for version, python in {sys.version_info[:2]: sys.executable, **others}.items():
        own = python == sys.executable
        done = subprocess.run(
            [python, "-c", PROGRAM if own else WITHOUT_TORCH + PROGRAM],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env={
                "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
                "PYTHONHASHSEED": str(version[1]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONIOENCODING": "utf-8",
            },
        )
        assert done.returncode == 0, (version, done.stderr)
        found[version] = json.loads(done.stdout)
    *own_digests, own_code = found.pop(sys.version_info[:2])
    assert all(own_code)
    for version, (*digests, code) in found.items():
        assert digests == own_digests and code == own_code, version
