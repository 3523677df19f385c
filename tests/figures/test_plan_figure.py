"""Figures of plans: files that open, marks that are there, nothing read as markup or formulas."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from support.profiler_tools import crafted

from hapi.errors import UsageError
from hapi.figures.canvas import COLOURS
from hapi.figures.plan import layers_svg, plan_figure, stages_svg
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import Plan, plan

JOB = Job(bs=100, samples=1000, request_size=10)


def profile_with(layers: int) -> Profile:
    sizes = [9000 // (i + 1) + 10 for i in range(layers)]
    return crafted(sizes, [0.001] * layers, freeze=layers - 2, last_split=layers - 2, step_seconds=0.001)


def planned(profile: Profile, job: Job = JOB) -> Plan:
    return plan("auto", profile, job)


@pytest.mark.long_cases(".pdf-%PDF", ".PNG-\\x89PNG")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_suffix_is_the_format_and_the_bytes_repeat(tmp_path: Path, suffix: str, magic: bytes) -> None:
    profile = profile_with(5)
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        plan_figure(planned(profile), profile, JOB, str(path))
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["plan.gif", "plan", "plan.html"])
def test_another_suffix_is_refused_before_anything_is_drawn(tmp_path: Path, name: str) -> None:
    profile = profile_with(5)
    with pytest.raises(UsageError, match=r"must end in \.png, \.svg or \.pdf"):
        plan_figure(planned(profile), profile, JOB, str(tmp_path / name))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    profile = profile_with(5)
    with pytest.raises(UsageError, match="cannot be written"):
        plan_figure(planned(profile), profile, JOB, str(tmp_path / "none" / "plan.png"))


@pytest.mark.long_cases("150")
@pytest.mark.slow
@pytest.mark.parametrize("layers", [5, 40, 150])
def test_labels_stay_apart_whatever_the_number_of_layers(layers: int) -> None:
    profile = profile_with(layers)
    svg = layers_svg(profile, 2)
    root = ET.fromstring(svg)
    labels = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if t.text and "layer" in t.text]
    assert 4 <= len(labels) <= 41
    assert ("layer1 1" if layers < 40 else "layer2 2" if layers == 40 else "layer4 4") in labels


@pytest.mark.slow
def test_splits_that_do_not_fit_are_hatched_and_named() -> None:
    profile = profile_with(6)
    peaks = [c.estimate.memory.peak for c in planned(profile).candidates]
    job = replace(JOB, memory_bytes=(min(peaks) + max(peaks)) // 2)
    found = planned(profile, job)
    assert 0 < sum(not c.fits for c in found.candidates) < len(found.candidates)
    tight = stages_svg(found.candidates, found.split, profile, job)
    assert "does not fit" in tight and "<pattern" in tight
    roomy = stages_svg(planned(profile).candidates, found.split, profile, JOB)
    assert "does not fit" not in roomy and "<pattern" not in roomy


@pytest.mark.slow
def test_a_split_many_times_dearer_is_cut_off_and_says_so() -> None:
    slow = crafted([100, 10**9, 10, 10], [0.0001] * 4, freeze=3, last_split=3, step_seconds=0.001)
    found = planned(slow)
    svg = stages_svg(found.candidates, found.split, slow, JOB)
    seconds = found.candidates[2].estimate.stages.network
    assert seconds > 60 and f"{int(seconds) // 60}min" in svg


@pytest.mark.slow
def test_svg_follows_the_page_and_names_are_plain_text() -> None:
    profile = profile_with(5)
    evil = replace(profile.layers[0], name="<script>$\\frac{</a>")
    profile = replace(profile, layers=(evil, *profile.layers[1:]), model="</svg><script>")
    svg = layers_svg(profile, 2)
    assert "<script" not in svg and "&lt;script&gt;$\\frac{" in svg
    assert ET.fromstring(svg).tag.endswith("svg")
    assert not [c for c in COLOURS.values() if c in svg] and "var(--server)" in svg


@pytest.mark.slow
def test_a_drawings_title_holds_no_character_that_a_page_may_not() -> None:
    assert "of a\ufffdb: output" in layers_svg(replace(profile_with(3), model="a\x00b"), 1)


@pytest.mark.slow
def test_two_inline_figures_share_no_id() -> None:
    profile = profile_with(5)
    found = planned(profile)
    both = [layers_svg(profile, 2), stages_svg(found.candidates, 2, profile, JOB)]
    ids = [{e.get("id") for e in ET.fromstring(svg).iter() if e.get("id")} for svg in both]
    assert ids[0] and ids[1] and not ids[0] & ids[1]


@pytest.mark.slow
def test_a_free_link_and_layers_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    nothing = crafted([0, 0, 0, 0, 0], [0.0] * 5, freeze=3, last_split=3)
    plan_figure(planned(nothing), nothing, JOB, str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_drawing_loads_matplotlib_late_and_never_torch() -> None:
    code = "import sys, hapi.figures.plan; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
