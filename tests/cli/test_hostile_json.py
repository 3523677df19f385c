"""``hapi plan --profile`` and ``hapi report`` of JSON that no Hapi wrote: an answer, or one line; never a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.planning_tools import truth

from hapi.cli.main import main
from hapi.profiler.profile import Job
from hapi.profiler.strategies import choices, plan

NUMBERS = (10**400, 1e308, 1e17, 2**62, -1, 0, 5e-324, math.nan, math.inf, True, None, "x", [], {})


def report() -> dict[str, Any]:
    """A report of a run with a plan, as this version writes it."""
    kept = json.loads((Path(__file__).parents[1] / "support" / "run.json").read_text())
    profile, job = truth(), Job()
    found = plan("auto", profile, job)
    chosen = {
        "profile": profile.to_json(), "job": asdict(job), "split": found.split, "changes": [],
        "candidates": [asdict(c) for c in found.candidates], "strategies": choices(profile, job),
    }  # fmt: skip
    whole: dict[str, Any] = json.loads(json.dumps({**kept, "plan": {**kept["plan"], **chosen}}))
    return whole


def everywhere(document: Any, value: Any, kinds: tuple[type, ...]) -> Any:
    """``document`` with ``value`` in place of each number of ``kinds``."""
    if isinstance(document, dict):
        keep = ("freeze", "version")
        return {k: v if k in keep else everywhere(v, value, kinds) for k, v in document.items()}
    if isinstance(document, list):
        return [everywhere(item, value, kinds) for item in document]
    return value if type(document) in kinds else document


@pytest.fixture
def outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    def run(content: bytes | str, *commands: tuple[str, ...]) -> int:
        path = tmp_path / "kept.json"
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        for command in commands or (("plan", "--json"), ("plan", "--bs", "1T", "--bandwidth", "1kbps")):
            named = (
                ("--profile", str(path)) if command[0] == "plan" else (str(path), "--html", f"{path}.html")
            )
            code = main((command[0], *named, *command[1:]))
            out, err = capsys.readouterr()
            assert (code, err.count("\n"), out[:1]) in ((0, 0, out[:1]), (1, 1, ""), (2, 1, "")), (code, err)
            assert len(err) < 1500 and "NaN" not in out and "Infinity" not in out
        return int(code)

    return run


@pytest.mark.parametrize("value", NUMBERS, ids=lambda v: str(v)[:9])
def test_numbers_that_cannot_be(value: Any, outcome: Callable[..., int]) -> None:
    document = report()
    for kinds in ((int, float), (float,), (int,)):
        plan_part = {**document["plan"], "profile": everywhere(document["plan"]["profile"], value, kinds)}
        outcome(json.dumps({**document, "plan": plan_part}))
    outcome(json.dumps(everywhere(document, value, (float,))), ("report",))


@pytest.mark.slow
def test_files_that_are_none(outcome: Callable[..., int]) -> None:
    document = json.dumps(report())
    contents: tuple[bytes | str, ...] = (
        "", "null", "5", '"x"', "NaN", "[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, b"\xff\xfe{", bytes(100),
        '"\ud800"', document[:-1] + ',"settings": ' + "[" * 3000 + "]" * 3000 + "}", document[: len(document) // 2],
        '{"seconds": ' + "9" * 6000 + "}", document.replace('"version": ', '"version": ' + "9" * 6000),
        json.dumps({"model": "\x1b[31m", "dataset": {"name": "\ud800"}}),
    )  # fmt: skip
    for content in contents:
        outcome(content)
        outcome(content, ("report",))


@pytest.mark.slow
def test_the_untouched_one_is_read(outcome: Callable[..., int]) -> None:
    assert outcome(json.dumps(report())) == 0
    assert outcome(json.dumps(report()), ("report",)) == 0
