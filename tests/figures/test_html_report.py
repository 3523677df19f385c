"""The HTML report: complete, escaped, tolerant of what a report lacks, strict about what is not one."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.report_tools import KEPT

from hapi.cli.main import main
from hapi.errors import ConfigError, UsageError
from hapi.figures.html import page
from hapi.figures.reading import Run, load_run
from hapi.figures.run import epochs_svg, learning_svg
from hapi.profiler.profile import PROFILE_VERSION

VOID = {"meta", "link", "br"}


class Balanced(HTMLParser):
    """Follows the tags of a page, and fails on one that is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(document: dict[str, Any]) -> tuple[Balanced, str]:
    reader = Balanced()
    reader.feed(page(Run.from_json(document)))
    reader.close()
    assert reader.open == []
    return reader, " ".join(" ".join(reader.words).split())


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(KEPT)
    change(document)
    return document


def test_a_real_run_shows_choice_time_learning_and_conditions() -> None:
    reader, words = parsed(KEPT)
    assert reader.tags.count("svg") == 5
    split, name = KEPT["plan"]["split"], KEPT["split_name"]
    assert f"auto chose split {split} ({name}): by estimate an epoch takes" in words
    assert "was the bottleneck" in words and "than estimated" in words
    for heading in (
        "Where the time went",
        "Loss and accuracy",
        "The choice of the split",
        "Changes of the split",
    ):
        assert heading in words
    assert KEPT["versions"]["torch"] in words and "Validation accuracy" in words
    assert "chosen by auto" in words and KEPT["plan"]["candidates"][0]["rejected"] in words


def test_nothing_is_loaded_from_elsewhere_and_no_script_runs() -> None:
    html = page(Run.from_json(KEPT))
    reader, _ = parsed(KEPT)
    assert "script" not in reader.tags
    assert "src=" not in html and "@import" not in html and "url(http" not in html
    assert html.count("<caption>") == html.count("<table")
    assert html.count('role="img" aria-label="') == html.count("<svg") == 5


@pytest.mark.slow
def test_everything_from_outside_is_escaped() -> None:
    evil = "\"><script>alert(1)</script><b x='$\\frac{"

    def poison(d: dict[str, Any]) -> None:
        d["model"] = d["split_name"] = d["freeze_name"] = d["strategy"] = evil
        d["dataset"]["name"] = d["servers"][0] = d["classes"][0] = d["versions"]["torch"] = evil
        d["settings"][evil] = evil
        plan = d["plan"]
        plan["strategy"] = plan["profile"]["model"] = evil
        plan["profile"]["notes"] = [evil]
        plan["changes"] = [{"epoch": 0, "batch": 1, "from": 1, "to": 2, "why": evil}]
        plan["strategies"] = {evil: 1}
        for layer, candidate in zip(plan["profile"]["layers"], plan["candidates"], strict=False):
            layer["name"] = candidate["name"] = candidate["rejected"] = evil
        for span in d["timeline"]["spans"]:
            span["name"] = evil

    reader, words = parsed(changed(poison))
    assert not {"script", "b"} & set(reader.tags)
    assert words.count("alert(1)") > 20


LACKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "a fixed split": lambda d: (d.pop("plan"), d.update(strategy=None)),
    "no plan and no timeline": lambda d: (d.pop("plan"), d.pop("timeline")),
    "one epoch": lambda d: d.update(epochs=d["epochs"][:1]),
    "no epoch": lambda d: d.update(epochs=[], seconds=0.0),
    "a profile that is not whole": lambda d: [
        d["plan"].pop(k) for k in ("profile", "candidates", "strategies")
    ],
    "null losses": lambda d: [e.update(loss=None, accuracy=None) for e in d["epochs"]],
    "a loss that is not finite": lambda d: d["epochs"][0].update(loss=math.nan),
    "a loss beyond all bounds": lambda d: d["epochs"][0].update(loss=1e30, validation_loss=1e299),
    "an epoch of no time": lambda d: [
        e.update({k: 0.0 for k in e if k.endswith("seconds") and k != "server_stage_seconds"})
        for e in d["epochs"]
    ],
    "no estimates, no splits": lambda d: [(e.pop("estimated_seconds"), e.pop("splits")) for e in d["epochs"]],
    "an old report": lambda d: [d.pop(k) for k in ("plan", "timeline", "settings", "versions", "hapi")],
    "no spans": lambda d: d["timeline"].update(spans=[]),
    "no change": lambda d: d["plan"].update(changes=[]),
    "a strategy for which nothing fits": lambda d: d["plan"]["strategies"].update(hapi=None),
    "a hundred epochs": lambda d: d.update(epochs=[{**d["epochs"][1], "epoch": i} for i in range(100)]),
}


@pytest.mark.long_cases("a hundred epochs", "null losses", "an epoch of no time", "a loss beyond all bounds")
@pytest.mark.slow
@pytest.mark.parametrize("what", LACKING)
def test_a_report_may_lack_much(what: str) -> None:
    _, words = parsed(changed(LACKING[what]))
    assert "resnet18 on photos" in words


def test_of_a_plan_in_another_versions_form_the_run_is_shown_all_the_same() -> None:
    reader, words = parsed(
        changed(lambda d: d["plan"]["profile"].update(version=PROFILE_VERSION + 1, novelty=[]))
    )
    assert f"({PROFILE_VERSION + 1}, this one reads {PROFILE_VERSION})" in words
    assert f"auto chose split {KEPT['split']} ({KEPT['split_name']})." in words
    assert "being profiled" not in words and reader.tags.count("svg") == 3


OFFLOAD = {
    "where": "disk", "why": "the training <b>does not fit</b>", "folders": ["/scratch <x>"], "state_bytes": 800_000_000,
    "disk_bytes": 2_400_000_000, "bytes_freed": 1_000_000_000, "bytes_a_step": 2_000_000_000, "read_rate": 1e9,
    "write_rate": 5e8, "step_seconds": 40.0,
    "cost": {
        "taken_steps": 20, "redone_steps": 1, "bytes_read": 16_000_000_000, "bytes_written": 24_000_000_000,
        "waited_seconds": 10.0, "read_seconds": 12.0, "write_seconds": 20.0,
    },
}  # fmt: skip


def test_states_elsewhere_are_told_with_their_cost() -> None:
    reader, words = parsed(changed(lambda d: d.update(offload=OFFLOAD)))
    assert "b" not in reader.tags and "does not fit" in words and "/scratch <x>" in words
    assert "The optimiser's states were on disk: steps waited for them 25% of their time." in words
    for cell in ("762.9 MiB", "2.24 GiB", "1.12 GiB", "2.00 s", "1.50 s", "500.0 ms", "1.60 s", "1.25×"):
        assert f" {cell} " in words, cell
    assert "953.7 MiB/s" in words


@pytest.mark.parametrize(
    "offload", [{"where": "off", "why": "all fits"}, None, {"where": "disk", "cost": {}}]
)
def test_without_offloading_nothing_is_said_of_it(offload: Any) -> None:
    _, words = parsed(changed(lambda d: d.update(offload=offload)))
    assert "Offloaded states" not in words


@pytest.mark.slow
def test_an_interrupted_run_says_so() -> None:
    _, words = parsed(changed(lambda d: d.update(epochs=d["epochs"][:2])))
    assert "stopped after 2 of 5 epochs" in words


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("model"), "report: field 'model' is missing"),
        (lambda d: d.update(epochs={"a": 1}), "report.epochs: expected a list"),
        (lambda d: d["epochs"][0].update(seconds="5"), r"epochs\[0\].seconds: expected a number, found str"),
        (lambda d: d["epochs"][0].update(seconds=-1), r"epochs\[0\].seconds: is negative"),
        (lambda d: d["epochs"][0].update(splits=[[1]]), "expected pairs of split and batches"),
        (lambda d: d["plan"]["candidates"].pop(), "candidates: expected 12 by its profile, found 11"),
        (lambda d: d["plan"].update(split=99), "99 is beyond the last one"),
        (lambda d: d["plan"]["profile"].update(freeze=99), "freeze 99"),
        (lambda d: d["timeline"]["spans"][0].update(stage="moon"), "expected one of server, network, client"),
        (lambda d: d["plan"]["job"].update(bs=0), "bs is 0"),
        (
            lambda d: d.update(offload=OFFLOAD | {"state_bytes": -1}),
            "report.offload.state_bytes: expected a whole",
        ),
        (lambda d: d.update(offload=OFFLOAD | {"cost": 3}), "report.offload.cost: expected an object"),
    ],
)
def test_what_is_there_must_be_right(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Run.from_json(changed(change))


def test_a_job_of_an_earlier_version_is_filled_up() -> None:
    document = copy.deepcopy(KEPT)
    for name in ("weights_from",):
        document["plan"]["job"].pop(name, None)
    plan = Run.from_json(document).plan
    assert plan is not None and plan.job.weights_from is None


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("plan", "job", "memory_bytes"), "8GB", r"job\.memory_bytes: expected a number, found str"),
        (("plan", "job", "memory_bytes"), 10**400, r"job\.memory_bytes: the number is out of range"),
        (("plan", "job", "memory_bytes"), -5, r"job\.memory_bytes: the number is out of range"),
        (("plan", "job", "weights_from"), True, r"job\.weights_from: expected a number, found bool"),
        (("plan", "candidates", 0, "estimate", "epoch_range"), [1, 10**400], "expected two numbers"),
    ],
)
def test_odd_numbers_are_one_line(place: tuple[Any, ...], value: Any, said: str) -> None:
    document = inner = copy.deepcopy(KEPT)
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ConfigError, match=said):
        Run.from_json(document)


def test_a_report_that_is_nested_deeply_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(json.dumps({**KEPT, "servers": "DEEP"}).replace('"DEEP"', "[" * 600 + "]" * 600))
    with pytest.raises(ConfigError, match=r"deep\.json: nested too deeply"):
        load_run(str(path))


@pytest.mark.slow
def test_thousands_of_epochs_are_lines() -> None:
    """Bars of so many took minutes, and a page of megabytes."""
    few = Run.from_json(KEPT).epochs
    many = tuple(replace(few[n % len(few)], number=n) for n in range(2000))
    assert len(epochs_svg(many)) < 300 * len(many) and len(learning_svg(many)) < 300 * len(many)


@pytest.mark.slow
def test_estimates_that_cannot_be_are_left_out() -> None:
    document = copy.deepcopy(KEPT)
    for entry, seconds in zip(document["epochs"], (5.0, -5.0), strict=False):
        entry["estimated_seconds"] = seconds
    assert "<h1>" in page(Run.from_json(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a": 1}', "[" * 5000, "\x00\xff"])
def test_a_foreign_file_is_one_line_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"foreign\.json: ") as found:
        load_run(str(path))
    assert "\n" not in str(found.value) and "--report" in str(found.value)


def test_hapi_report_writes_the_page_beside_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps(KEPT), encoding="utf-8")
    assert main(["report", str(source)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'run.html'}\n"
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page(Run.from_json(KEPT))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.json"]


@pytest.mark.parametrize("target", ["run.json", "."])
def test_hapi_report_refuses_a_place_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps(KEPT), encoding="utf-8")
    assert main(["report", str(source), "--html", str(tmp_path / target)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert json.loads(source.read_text(encoding="utf-8")) == KEPT


@pytest.mark.parametrize("name", [".", "/", ""])
def test_a_report_that_is_no_file_is_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["report", name]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_making_a_page_needs_no_torch() -> None:
    code = "import sys, hapi.cli.report; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False False"
