"""Whole jobs whose split is chosen: reports, equal losses, profiles that are kept, kills, a link that changes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.harness import (
    DIGITS_JOB,
    RESNET_JOB,
    ServerProcess,
    environment,
    hapi,
    losses,
    new_train,
    packed_digits,
    report_of,
    server,
    start_train,
    train,
    wait_for,
)
from support.local_job import pack_blobs
from support.proxy import gated

from benchmarks.testbed.testbed import ADDRESS, TestBed, why_not
from hapi.client.planning.drift import DriftDetector
from hapi.client.planning.link_probe import LinkProbe
from hapi.client.planning.profile_phase import ENOUGH_DONE
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import plan

FREEZE, COUNT, BATCHES = 11, 200, 10
COMMON = (*DIGITS_JOB, "--bs", "20", "--request-size", "10", "--prefetch-bytes", "0")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


def job(
    running: ServerProcess, folder: Path, *arguments: str, code: int = 0, train: Any = train
) -> dict[str, Any]:
    """The report of a job with these arguments besides the common ones."""
    path = folder / "report.json"
    done = train(*COMMON, "--server", running.url, "--report", str(path), *arguments, code=code)
    assert code or "done in" in done.stdout
    return report_of(path)


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return job(running, tmp_path_factory.mktemp("report"), "--split", "freeze", "--epochs", "4")


def check_same(report: dict[str, Any], reference: dict[str, Any]) -> None:
    count = len(report["epochs"])
    assert losses(report) == pytest.approx(losses(reference)[:count], rel=1e-4)
    for entry in report["epochs"]:
        assert entry["samples"] == COUNT and sum(n for _, n in entry["splits"]) == BATCHES


@pytest.fixture(scope="module")
def auto(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run under ``auto`` that is profiled in epoch 0, in a process whose memory is its own from the start; and where
    its profile was kept."""
    folder = tmp_path_factory.mktemp("auto")
    profile = folder / "kept" / "profile.json"
    arguments = ("--split", "auto", "--epochs", "3", "--save-profile", str(profile))
    return job(running, folder, *arguments, train=new_train), profile


def test_auto(auto: tuple[dict[str, Any], Path], undisturbed: dict[str, Any]) -> None:
    report, _ = auto
    check_same(report, undisturbed)
    ran = dict(report["epochs"][0]["splits"])
    assert min(ran[0], ran[FREEZE]) >= ENOUGH_DONE, "batches of both splits alternate while they are profiled"
    assert report["epochs"][0]["estimated_seconds"] is None
    plan = report["plan"]
    assert [c["estimate"]["split"] for c in plan["candidates"]] == list(range(FREEZE + 1))
    changes = plan["changes"]
    # On a slow machine the profile is whole while the last batches of epoch 0 are under way.
    assert changes[0]["from"] == FREEZE and (changes[0]["epoch"] == 0 or changes[0]["batch"] == 0)
    assert changes[0]["why"].startswith("profiled")
    for entry in report["epochs"][1:]:
        if len(entry["splits"]) == 1:
            # How near it comes goes by what else this machine does.
            assert entry["estimated_seconds"] > 0
    profile = Profile.from_json(plan["profile"])
    assert profile.link.bits_per_second > 0 and profile.samples.encoded  # how fast goes by what else runs
    assert profile.server_tier.decode_seconds > 0 and profile.client_tier.decode_seconds > 0
    assert all(x.server_seconds > 0 for x in profile.layers[:FREEZE])
    spans = report["timeline"]["spans"]
    assert {s["stage"] for s in spans} == {"server", "network", "client"}
    assert all(0 <= s["start"] <= s["end"] for s in spans)
    assert plan["memory"]["predicted"] > 0 and plan["memory"]["observed"] > 0


def test_a_kept_profile_is_replayed(
    auto: tuple[dict[str, Any], Path], running: ServerProcess, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    report, path = auto
    assert Profile.load(str(path)) == Profile.from_json(report["plan"]["profile"])
    arguments = ("--split", "auto", "--profile", str(path), "--replan", "off", "--epochs", "1")
    again = job(running, tmp_path, *arguments)
    check_same(again, undisturbed)
    assert again["plan"]["changes"][0]["why"].startswith("from the given profile"), "no epoch is profiled"
    assert again["epochs"][0]["estimated_seconds"] > 0
    listed = json.loads(
        hapi("plan", "--profile", str(path), "--bs", "20", "--samples", "200", "--json").stdout
    )
    assert [c["estimate"]["split"] for c in listed["candidates"]] == list(range(FREEZE + 1))
    assert "measured on real requests" in " ".join(listed["notes"])


def test_a_profile_of_another_model(
    auto: tuple[dict[str, Any], Path], running: ServerProcess, tmp_path: Path
) -> None:
    _, path = auto
    for arguments, said in (
        (("--model", "squeezenet1_1", "--image-size", "64"), "does not fit 'squeezenet1_1'"),
        (("--split", "3"), "split 3 is fixed"),
        (("--profile", str(tmp_path / "none.json")), "none.json: cannot be read"),
    ):
        options = ("--server", running.url, "--profile", str(path), *arguments)
        failed = train(*RESNET_JOB, "--freeze", str(FREEZE), *options, code=2)
        assert said in failed.stderr and failed.stderr.count("\n") == 1


def test_a_profile_that_cannot_be_written_is_told_before_training(
    running: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    failed = train(
        *COMMON, "--server", running.url, "--save-profile", str(tmp_path / "file" / "profile.json"), code=2
    )
    assert "--save-profile" in failed.stderr and "cannot be written" in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.mark.long_cases("nsg", "bandwidth")
@pytest.mark.parametrize("strategy", ["hapi", "nsg", "bandwidth", "min"])
def test_every_strategy(
    running: ServerProcess, undisturbed: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    report = job(running, tmp_path, "--split", strategy, "--epochs", "2", "--profile-batches", "2")
    check_same(report, undisturbed)
    if strategy == "min":
        assert "plan" not in report and report["strategy"] is None
        return
    changes = report["plan"]["changes"]
    assert changes[0]["why"] == "profiled" and changes[0]["epoch"] == 0 and 4 <= changes[0]["batch"] <= 6
    assert report["epochs"][0]["splits"][0] == [0, 2] or report["plan"]["split"] == 0


def test_the_oracle(running: ServerProcess, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """12 splits of 3 batches each: the decision comes in the fourth epoch."""
    report = job(running, tmp_path, "--split", "oracle", "--epochs", "4")
    check_same(report, undisturbed)
    measured = {int(s): t for s, t in report["plan"]["measured_batch_seconds"].items()}
    assert sorted(measured) == list(range(FREEZE + 1))
    assert report["plan"]["split"] == min(measured, key=lambda s: measured[s])


def test_other_epochs_are_profiled_and_resume_goes_on_with_the_plan(
    running: ServerProcess, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--split", "auto", "--replan", "off", "--profile-epoch", "0", "--profile-epoch", "2",
               "--profile-batches", "2", "--alternate", "off", "--checkpoint", str(tmp_path / "c.pt"))  # fmt: skip
    first = job(running, tmp_path, *options, "--epochs", "1")
    report = job(running, tmp_path, *options, "--epochs", "4", "--resume")
    check_same(report, undisturbed)
    assert [change["why"] for change in report["plan"]["changes"]][:2] == ["profiled", "from the checkpoint"]
    split = first["plan"]["split"]
    assert report["epochs"][1]["splits"] == [[split, BATCHES]], "not profiled again"
    third = dict(report["epochs"][2]["splits"])
    assert third.get(0, 0) >= 2 and third.get(FREEZE, 0) >= 2


def test_a_server_killed_while_profiling(store: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with server(store) as first, gated(first.port, 5) as gate:
        training = start_train(
            *COMMON, "--split", "auto", "--server", gate.url, "--epochs", "2", "--report", str(report)
        )
        gate.wait()
        first.kill()
        gate.open()
        time.sleep(0.3)
        second = first.restarted()
        try:
            output = training.communicate(timeout=240)[0]
        finally:
            second.kill()
    assert training.returncode == 0, output
    document = report_of(report)
    check_same(document, undisturbed)
    assert document["retries"] > 0 and document["plan"]["changes"][0]["why"].startswith("profiled")
    Profile.from_json(document["plan"]["profile"])


# -- a link that changes -------------------------------------------------------------------------------------------


STEPS = (
    "--model", "resnet18", "--weights", "random", "--freeze", "12", "--bs", "12", "--request-size", "6",
    "--lr", "0.002", "--epochs", "12", "--no-progress",
)  # fmt: skip


def _steps(bed: TestBed, store: Path, out: Path, report: Path) -> None:
    """Train on the bed at 1 Gbit/s, at 4 Mbit/s from the end of the second epoch, at 1 Gbit/s from the fifth's."""
    env = environment(HAPI_TOKEN="a-test-with-a-token")
    command = [sys.executable, "-m", "hapi.cli.server", "--store", str(store), "--threads", "1"]
    command += ["--host", ADDRESS["server"], "--port", "8099"]
    serving = bed.start("server", command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert serving.stdout is not None and serving.stdout.readline().startswith("listening")
    command = [
        sys.executable,
        "-m",
        "hapi.cli.train",
        "--no-output",
        *STEPS,
        "--threads",
        "1",
        "--split",
        "auto",
        "--alternate",
        "off",
    ]
    command += ["--server", f"http://{ADDRESS['server']}:8099", "--report", str(report)]
    with out.open("w") as output:
        training = bed.start("client", command, env=env, stdout=output, stderr=output)
    for epochs, bandwidth in ((2, 4e6), (5, 1e9)):
        said = lambda n=epochs: out.read_text().count("\nepoch ") >= n or training.poll() is not None  # noqa: E731
        wait_for(said, 400, f"epoch {epochs}")
        bed.set_bandwidth(bandwidth)
    assert training.wait(400) == 0, out.read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(why_not() is not None, reason=f"no test bed here: {why_not()}")
def test_bandwidth_steps_down_and_up(tmp_path: Path) -> None:
    """Float32 samples of 64x64 (49 kB): a fast link cuts early, a slow one where little is sent."""
    store, plain, path = tmp_path / "store", tmp_path / "plain.json", tmp_path / "report.json"
    pack_blobs(store, count=120, side=64)
    with TestBed(1e9) as bed:
        _steps(bed, store, tmp_path / "out", path)
    train(*STEPS, "--store", str(store), "--split", "freeze", "--report", str(plain), seconds=600)
    report = report_of(path)
    assert losses(report) == pytest.approx(losses(report_of(plain)), rel=1e-4)
    changes = report["plan"]["changes"]
    told = [c for c in changes if "bandwidth is" in c["why"]]
    down = [c for c in told if c["to"] > c["from"] and 2 <= c["epoch"] <= 4]
    up = [c for c in told if c["to"] < c["from"] and c["epoch"] >= 5]
    assert len(changes) <= 7, changes
    # Other work on this machine may have made the two tiers such that a slow or a fast link would change nothing.
    before = [c["to"] for c in changes if c["epoch"] < 2][-1]
    assert down or not _would_help(report["plan"], 4e6, before), changes
    # At the slow link's split nothing shows that it has recovered: it is looked at after some batches. On a busy
    # machine such a look may show less than the link carries: then the plan follows what was shown.
    hoped, shown = LinkProbe.FASTER * 4e6, Profile.from_json(report["plan"]["profile"]).link.bits_per_second
    stays = report["plan"]["split"]
    assert up or report["plan"]["looks"] > 0 or not _would_help(report["plan"], hoped, stays), changes
    assert up or not _would_help(report["plan"], shown, stays), changes


def _would_help(said: dict[str, Any], bandwidth: float, split: int) -> bool:
    """Whether another split than this one is better at such a link, beyond doubt."""
    profile, job = Profile.from_json(said["profile"]), Job(**said["job"])
    there = replace(profile, link=replace(profile.link, bits_per_second=bandwidth))
    best, now = plan("auto", there, job), estimate(there, job, split)
    return (
        best.candidates[best.split].estimate.epoch_seconds
        < (1 - 2 * DriftDetector.HYSTERESIS) * now.epoch_seconds
    )
