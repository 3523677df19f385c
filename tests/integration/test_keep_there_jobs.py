"""Whole trainings that leave the keeping to the server: chosen by the plan, followed, reported, and shared by jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.harness import hapi, losses, packed_digits, report_of, server, train

pytestmark = pytest.mark.slow
COUNT = 160
COMMON = (
    "--model", "resnet18", "--weights", "random:0", "--image-size", "32", "--freeze", "4", "--bs", "32",
    "--request-size", "32", "--lr", "0.002", "--no-progress",
)  # fmt: skip
KEEPING = ("--cos-batch", "16", "--device", "cpu", "--share-memory", "64MiB", "--cache-dir")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


def slowed(path: Path) -> Path:
    """The profile with layers that take a second each, so that nobody would compute them twice."""
    document = json.loads(path.read_text())
    for layer in document["layers"]:
        layer |= {"server_seconds": 1.0, "client_seconds": 1.0}
    document["link"]["bits_per_second"] = 1e10
    path.write_text(json.dumps(document))
    return path


def of_epochs(report: dict[str, Any], name: str) -> list[Any]:
    return [entry[name] for entry in report["epochs"]]


def check_hapi_plan(report: dict[str, Any], path: Path) -> None:
    """Told that both tiers are on one machine, ``hapi plan`` plans from a run's measurements as the run did."""
    plan = report["plan"]
    apart = {**report, "plan": {**plan, "profile": {**plan["profile"], "one_machine": False}}}
    path.write_text(json.dumps(apart))
    command = (
        "plan",
        "--profile",
        str(path),
        "--bandwidth",
        f"{plan['profile']['link']['bits_per_second']:.6f}b/s",
    )
    seconds = [
        [candidate["estimate"]["epoch_seconds"] for candidate in found["candidates"]]
        for found in (
            plan,
            *(json.loads(hapi(*command, *more, "--json").stdout) for more in (["--one-machine"], [])),
        )
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
    assert seconds[0] != pytest.approx(seconds[2], rel=1e-2)


def test_jobs_share_what_the_server_keeps(store: Path, tmp_path: Path) -> None:
    profile, plain = tmp_path / "profile.json", tmp_path / "plain.json"
    with server(store, "--share-memory", "0") as alone:
        train(
            *COMMON,
            "--server",
            alone.url,
            "--epochs",
            "3",
            "--report",
            str(plain),
            "--save-profile",
            str(profile),
        )
    assert report_of(plain)["plan"]["profile"]["one_machine"], (
        "a server on the loopback shares the processors"
    )
    check_hapi_plan(report_of(plain), tmp_path / "apart.json")
    planned = (
        "--profile",
        str(slowed(profile)),
        "--replan",
        "off",
        "--egress",
        "0.1",
        "--server-price",
        "0.5",
    )
    with server(store, *KEEPING, str(tmp_path / "kept")) as running:
        reports = []
        for number, own in enumerate(
            (
                ("--cache", "off"),
                # A cache with too little room for all of the features, which are 16 KiB each.
                ("--cache", "auto", "--cache-dir", str(tmp_path / "own"), "--cache-size", "1MiB"),
            )
        ):
            path = tmp_path / f"{number}.json"
            done = train(
                *COMMON, *planned, *own, "--server", running.url, "--epochs", "3", "--report", str(path),
                "--html", str(tmp_path / f"{number}.html"),
            )  # fmt: skip
            assert "had been kept by the server" in done.stdout and ", money " in done.stdout
            reports.append(report_of(path))
    for report, had in zip(reports, (0, COUNT), strict=True):
        assert losses(report) == losses(report_of(plain))
        assert report["plan"]["reuse"]["mode"] == "keep there"
        assert of_epochs(report, "keeping") == ["keep there"] * 3
        assert of_epochs(report, "server_kept_samples") == [had, COUNT, COUNT]
        assert of_epochs(report, "features_kept") == [0] * 3
    page = (tmp_path / "1.html").read_text()
    assert "Kept: features there." in page and "The choice of what is kept" in page
    again = json.loads(hapi("plan", "--profile", str(tmp_path / "1.json"), "--json").stdout)["reuse"]
    assert again["mode"] == "keep there" and again["prices"] == {"egress": 0.1, "server": 0.5, "trainer": 0.0}
