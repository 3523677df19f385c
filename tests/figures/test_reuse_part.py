"""What a page and a figure tell of the choice of what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.profiler_tools import crafted, free_tier, turning
from support.report_tools import KEPT

from hapi.errors import ConfigError
from hapi.figures import html
from hapi.figures.html import page
from hapi.figures.plan import plan_figure
from hapi.figures.reading import Run
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import Prices, ReuseFacts, Storage
from hapi.profiler.reuse.over_epochs import courses
from hapi.profiler.strategies import plan

DISK = Storage(bytes=10**11, read=5e8, write=2e8)
JOB = Job(bs=100, samples=1000, epochs=12, request_size=50)
PRICES = Prices(egress=0.09, server=0.5)


def profile() -> Profile:
    return crafted(
        [60_000, 1_000, 10], [0.01] * 3, [0.01] * 3, client_tier=free_tier("cpu"), step_seconds=1e-4
    )


def document(prices: Prices = PRICES) -> dict[str, Any]:
    """The report of a real run, with a choice as a run would write it."""
    found = choose_reuse(profile(), JOB, ReuseFacts(client=DISK), prices=prices)
    report = copy.deepcopy(KEPT)
    paid = {"egress": prices.egress, "server": prices.server, "trainer": prices.trainer}
    report["plan"]["reuse"] = {**found.to_json(), "facts": ReuseFacts(client=DISK).to_json(), "prices": paid}
    for entry in report["epochs"]:
        entry |= {
            "keeping": "keep there", "feature_hits": 5, "feature_misses": 35, "features_kept": 0,
            "features_skipped": 0, "feature_bytes_read": 1000, "feature_bytes_written": 0,
            "feature_read_seconds": 0.5, "server_kept_samples": 30,
        }  # fmt: skip
        if prices != Prices():
            entry["money"] = 0.0125
    return report


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("epochs_svg", "layers_svg", "learning_svg", "stages_svg", "timeline_svg"):
        monkeypatch.setattr(html, name, lambda *_: "<svg></svg>")


def test_the_page_has_the_choice_its_alternatives_and_each_epoch() -> None:
    text = page(Run.from_json(document()))
    assert "The choice of what is kept" in text and "for a job of 12 epochs" in text
    assert "Kept: features here." in text and "12 epochs in" in text
    for name in ("nothing", "samples here", "features there"):
        assert f">{name}</th>" in text
    assert "the server keeps no features" in text and "times the time" in text
    for head in ("Money", "The server had", "Missed", "Received", "Kept as"):
        assert f">{head}</th>" in text
    assert text.count(">0.0125</td>") == len(KEPT["epochs"]) and ">features there</td>" in text
    assert ">30</td>" in text and ">5</td>" in text


@pytest.mark.slow
def test_the_first_sentence_is_about_the_job_with_what_is_kept() -> None:
    text = page(Run.from_json(report := document()))
    reuse = report["plan"]["reuse"]
    assert "and to keep features here: by estimate 12 epochs take" in text and ", the last of them " in text
    assert "Keeping nothing would take" in text and "by estimate an epoch takes" not in text
    for candidate in reuse["candidates"]:
        if candidate["cost"] is not None:
            del candidate["cost"]["last_epoch_seconds"]
    assert "the last of them" not in page(Run.from_json(report))
    reuse["mode"] = "recompute"
    assert "by estimate an epoch takes" in page(Run.from_json(report))


@pytest.mark.slow
def test_the_page_draws_what_is_possible() -> None:
    priced, free = (page(Run.from_json(document(prices))) for prices in (PRICES, Prices()))
    label = "Costs of the job by what is kept: nothing, samples here, features here"
    for text in (priced, free):
        assert f'aria-label="{label}"' in text and "Seconds of the job" in text
    assert "Its money" in priced and "Its money" not in free
    report = document()
    report["plan"]["reuse"]["candidates"] = []
    assert "The choice of what is kept" in page(Run.from_json(report))


def test_money_is_left_out_where_nothing_has_a_price() -> None:
    text = page(Run.from_json(document(Prices())))
    assert "The choice of what is kept" in text and ">Money</th>" not in text


def test_the_page_tells_the_split_of_a_full_cache() -> None:
    report, disk = document(), Storage(bytes=600_000, read=1e9, write=1e9)
    job = Job(bs=64, samples=1000, epochs=12, alternate=False)
    found = choose_reuse(turning(), job, ReuseFacts(client=disk))
    report["plan"]["reuse"].update(found.to_json())
    assert ">0, then 2</td>" in page(Run.from_json(report))


def test_a_report_of_before_is_read() -> None:
    report = document()
    report["plan"]["reuse"].pop("prices")
    costs = [option["cost"] for option in report["plan"]["reuse"]["candidates"] if option["cost"]]
    for choice in (cost["choice"] for cost in costs):
        choice.update(choice.pop("crossing"))
    for entry in report["epochs"]:
        for name in ("keeping", "server_kept_samples", "money"):
            entry.pop(name)
    assert "The choice of what is kept" in page(Run.from_json(report))
    assert "The choice of what is kept" not in page(Run.from_json(KEPT))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(mode=3), "reuse.mode: expected text"),
        (lambda r: r.pop("reason"), "reuse: field 'reason' is missing"),
        (
            lambda r: r["candidates"][0]["cost"].update(seconds=-1),
            r"candidates\[0\].cost.seconds: is negative",
        ),
        (lambda r: r["candidates"][0]["cost"].update(money="much"), "cost.money: expected a number"),
        (lambda r: r["prices"].update(egress=None), "prices.egress"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], object], said: str) -> None:
    report = document()
    reuse = copy.deepcopy(report["plan"]["reuse"])
    reuse["candidates"] = list(reuse["candidates"])
    change(reuse)
    report["plan"]["reuse"] = reuse
    with pytest.raises(ConfigError, match=said):
        Run.from_json(report)


def test_everything_in_it_is_escaped() -> None:
    report, evil = document(), "<script>alert(1)</script>"
    report["plan"]["reuse"] |= {"mode": evil, "reason": evil, "objective": evil}
    first, *others = report["plan"]["reuse"]["candidates"]
    report["plan"]["reuse"]["candidates"] = [{**first, "mode": evil, "rejected": evil}, *others]
    report["epochs"][0]["keeping"] = evil
    assert "<script" not in page(Run.from_json(report))


@pytest.mark.slow
@pytest.mark.parametrize("prices", [Prices(), PRICES], ids=["seconds", "seconds and money"])
def test_the_figure_of_a_plan_draws_jobs_by_their_epochs(tmp_path: Path, prices: Prices) -> None:
    given, facts = profile(), ReuseFacts(client=DISK, server=DISK)
    drawn = courses(given, JOB, facts, prices, "time")
    path = tmp_path / "plan.svg"
    plan_figure(plan("auto", given, JOB), given, JOB, str(path), courses=drawn, kept="keep here")
    text = path.read_text(encoding="utf-8")
    assert "Jobs by their epochs" in text and ("Their money" in text) is (prices != Prices())
    assert "mathdefault" not in text
    for name in ("nothing", "samples here", "features there", "features here"):
        assert f">{name}<" in text
    alone = replace(JOB, epochs=1)
    once = courses(given, alone, facts, prices, "time")
    plan_figure(plan("auto", given, alone), given, alone, str(path), courses=once, kept="recompute")
