"""``hapi plan``: what whole jobs cost by what is kept, and what people type wrongly about it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.profiler_tools import crafted, free_server, free_tier, turning

from hapi.cache.writing.fast_part import FastPart
from hapi.cli.main import main, whole_parser
from hapi.cli.planning.reuse import ReuseTerms, terms_of
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.facts import KeptShare, Prices, ReuseFacts, Storage
from hapi.profiler.strategies import plan


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = str(tmp_path / "profile.json")
    crafted(
        [60_000, 1_000, 10], [0.01] * 3, [0.01] * 3, client_tier=free_tier("cpu"), step_seconds=1e-4
    ).save(path)
    return path


def test_seconds_and_money_side_by_side(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--epochs", "30", "--cache", "100GB", "--disk-write", "200MB/s", "--egress", "0.09"]
    assert main(["plan", "--profile", saved, *flags, "--server-price", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("whole job of 30 epochs"))
    table = lines[begin + 1 : begin + 6]
    assert table[0].split()[:5] == ["KEPT", "CUT", "SPLIT", "JOB", "MONEY"]
    assert [line.split("  ")[0] for line in table[1:]] == [
        "nothing", "samples here", "features there", "features here",
    ]  # fmt: skip
    assert table[4].endswith("<- least time") and "no --server-cache" in table[3]
    assert lines[begin + 6].startswith("  keep here: 30 epochs in ") and "instead of" in lines[begin + 6]
    assert max(map(len, table)) <= 100


def test_the_codecs_that_a_run_measured_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "profile.json"
    crafted([60_000] * 3, [0.01] * 3, [0.01] * 3, client_tier=free_tier("cpu"), step_seconds=1e-4).save(
        str(saved)
    )
    figures = {"name": "zeros", "ratio": 8.0, "encode_rate": 5e9, "decode_rate": 5e9}
    report = {
        "epochs": [],
        "plan": {"profile": json.loads(saved.read_text())},
        "cache": {"codecs": [{"cut": 2, "codec": "zeros", "measured": [figures]}]},
        "wire_codec": {"measured": {"1": [{**figures, "name": "planes"}]}},
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    flags = ["--bandwidth", "10Mbps", "--disk-read", "20MB/s"]
    assert main(["plan", "--profile", str(tmp_path / "report.json"), *flags, "--json"]) == 0
    reuse = json.loads(capsys.readouterr().out)["reuse"]
    costs = {one["mode"]: one["cost"]["choice"] for one in reuse["candidates"] if one["cost"]}
    assert costs["keep here"]["codec"]["name"] == "zeros"
    assert main(["plan", "--profile", str(tmp_path / "report.json"), *flags]) == 0
    assert "features here as zeros, sent as planes" in capsys.readouterr().out


def test_the_split_of_a_full_cache_follows_that_of_one_that_fills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "profile.json")
    turning().save(saved, Job(alternate=False))
    flags = ["--samples", "1000", "--bs", "64", "--epochs", "30", "--cache", "600kB"]
    assert main(["plan", "--profile", saved, *flags]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("features here"))
    assert row.split()[2:6] == ["2", "0,", "then", "2"] and row.endswith("<- least time")


def test_a_disk_that_becomes_slower(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache", "100GB", "--disk-read", "1GB/s", "--disk-write", "500MB/s"]
    flags += ["--epochs", "3", "--samples", "3000000"]
    slower = ["--disk-fast", "1MB", "--disk-slow-write", "10kB/s"]
    found = []
    for more in ([], slower, ["--disk-fast", "1TB", "--disk-slow-write", "10kB/s"]):
        terms, document = replayed(saved, capsys, *flags, *more)
        (kept,) = (one for one in document["reuse"]["candidates"] if one["mode"] == "keep samples")
        found.append(kept["cost"]["kept"])
    assert found[1] < 0.9 and found[0] == found[2] == 1.0
    terms, _ = replayed(saved, capsys, *flags, *slower)
    client = terms.facts.client
    assert client is not None and (client.write, client.slow_write, client.fast_bytes) == (5e8, 1e4, 10**6)


def test_what_runs_found_out_about_a_disk_is_planned_with(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hapi.cache.disk_rates.measure_disk", lambda folder: (8e8, 4e8))
    FastPart(10**9, 4e8, 5e7).save(tmp_path)
    terms, _ = replayed(saved, capsys, "--cache", "1GB", "--cache-dir", str(tmp_path))
    assert terms.facts.client == Storage(bytes=10**9, read=8e8, write=4e8, slow_write=5e7, fast_bytes=10**9)
    named, _ = replayed(
        saved, capsys, "--cache", "1GB", "--cache-dir", str(tmp_path), "--disk-write", "200MB/s"
    )
    assert named.facts.client == Storage(bytes=10**9, read=8e8, write=2e8), (
        "a rate that was named is that rate"
    )
    elsewhere, _ = replayed(saved, capsys, "--cache", "1GB", "--cache-dir", str(tmp_path / "new"))
    assert elsewhere.facts.client == Storage(bytes=10**9, read=8e8, write=4e8)


def test_both_tiers_on_one_machine(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as a run's plan, whose profile says so."""
    tier = free_tier("cpu", processors=2, decode_seconds=0.002)
    profile = crafted(
        [10, 10], [0.004, 0.0], server_tier=tier, client_tier=tier, server=free_server(concurrency=4),
        step_seconds=0.004,
    )  # fmt: skip
    profile.save(saved)
    two = replayed(saved, capsys, "--bandwidth", "20Gbps")[1]
    one = replayed(saved, capsys, "--one-machine")[1]
    assert one["candidates"] != two["candidates"] and one["bits_per_second"] == 20e9
    link = replace(profile.link, bits_per_second=20e9)
    shared = replace(profile, one_machine=True, link=link)
    own = plan("auto", shared, Job.load(saved) or Job())
    assert one["candidates"] == json.loads(json.dumps([asdict(candidate) for candidate in own.candidates]))
    shared.save(saved)
    again = replayed(saved, capsys, "--one-machine")[1]
    assert again["candidates"] == one["candidates"] == replayed(saved, capsys)[1]["candidates"]
    (samples,) = (c for c in again["reuse"]["candidates"] if c["mode"] == "keep samples")
    assert samples["cost"] is None and "this machine" in samples["rejected"]
    assert main(["plan", "--profile", saved, "--one-machine"]) == 0
    assert "both tiers on one machine" in capsys.readouterr().out.splitlines()[0]


def test_the_document_has_it(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", saved, "--json", "--epochs", "1", "--server-cache", "1GB"]) == 0
    reuse = json.loads(capsys.readouterr().out)["reuse"]
    assert reuse["mode"] == "recompute" and "one epoch only" in reuse["reason"]
    assert {one["mode"]: one["cost"] is None for one in reuse["candidates"]}["keep there"] is False
    assert reuse["prices"] == {"egress": 0.0, "server": 0.0, "trainer": 0.0}
    assert main(["plan", "--profile", saved, "--json", "--cache", "0"]) == 0
    assert "there is no cache" in json.loads(capsys.readouterr().out)["reuse"]["reason"]


@pytest.fixture
def reported(saved: str, tmp_path: Path) -> str:
    """The report of a run that kept features beside the store, at its prices."""
    facts = ReuseFacts(
        client=Storage(bytes=10**6, read=3e8, write=1e8),
        server=Storage(bytes=10**10, read=5e8, write=2e8),
        server_kept=(KeptShare(cut=3, share=0.25),),
        samples=4000,
    )
    reuse = {"facts": facts.to_json(), "prices": {"egress": 0.5, "server": 2.0, "trainer": 0.0}}
    job = {"bs": 64, "samples": 4000, "epochs": 7}
    plan = {"profile": Profile.load(saved).to_json(), "job": job, "reuse": {**reuse, "objective": "money"}}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"epochs": [], "plan": plan}))
    return str(path)


def replayed(path: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[ReuseTerms, Any]:
    args = whole_parser().parse_args(["plan", "--profile", path, "--json", *flags])
    assert main(["plan", "--profile", path, "--json", *flags]) == 0
    return terms_of(args), json.loads(capsys.readouterr().out)


def test_a_report_brings_its_caches_prices_and_objective(
    reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terms, document = replayed(reported, capsys)
    assert terms.facts.client == Storage(bytes=10**6, read=3e8, write=1e8) and terms.facts.samples == 4000
    assert terms.facts.server_share(3) == 0.25
    assert (terms.prices, terms.objective) == (Prices(egress=0.5, server=2.0), "money")
    reuse = document["reuse"]
    assert (reuse["objective"], reuse["epochs"], reuse["prices"]["server"]) == ("money", 7, 2.0)


def test_a_report_from_before_rounding_was_of_meaning(
    reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(Path(reported).read_text())
    facts = document["plan"]["reuse"]["facts"]
    del facts["rounded"]
    for kept in facts["server_kept"]:
        del kept["split"]
    Path(reported).write_text(json.dumps(document))
    terms, _ = replayed(reported, capsys)
    assert terms.facts.server_share(3) == 0.25 and not terms.facts.rounded


def test_flags_come_before_the_report(reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    terms, document = replayed(
        reported, capsys, "--cache", "5GB", "--server-cache", "0", "--disk-read", "1GB/s", "--egress", "0",
        "--objective", "time", "--epochs", "3", "--samples", "100",
    )  # fmt: skip
    assert terms.facts.client == Storage(bytes=5 * 10**9, read=1e9, write=1e8)
    assert terms.facts.server is None and terms.facts.samples is None
    assert (terms.prices, terms.objective) == (Prices(server=2.0), "time")
    assert document["reuse"]["epochs"] == 3
    rates, _ = replayed(reported, capsys, "--disk-write", "2MB/s")
    disks = (rates.facts.client, rates.facts.server)
    assert all(disk is not None and disk.write == 2e6 for disk in disks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"facts": None}, "plan.reuse.facts"),
        ({"objective": "fame"}, "plan.reuse.objective: expected one of time, money"),
        ({"prices": {"egress": "x"}}, "plan.reuse.prices"),
        ({"prices": None}, "plan.reuse.prices"),
    ],
)
def test_a_report_that_is_wrong_there_is_one_line(
    reported: str, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    document = json.loads(Path(reported).read_text())
    document["plan"]["reuse"] |= change
    Path(reported).write_text(json.dumps(document))
    assert main(["plan", "--profile", reported]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--epochs", "0"], "expected 1 to"),
        (["--egress", "-1"], "expected 0 to"),
        (["--server-price", "nan"], "expected 0 to"),
        (["--cache", "1e40GB"], "--cache"),
        (["--cache", "lots"], "--cache"),
        (["--disk-write", "0"], "expected 1B/s to"),
        (["--disk-write", "fast"], "write it as 200MB/s"),
        (["--disk-fast", "1GB"], "--disk-slow-write and --disk-fast say together"),
        (["--disk-slow-write", "1MB/s"], "--disk-slow-write and --disk-fast say together"),
        (
            ["--one-machine", "--server-speed", "2x"],
            "--server-speed: with --one-machine both tiers are as fast",
        ),
        (["--disk-read", "200Mbps"], "--disk-read"),
        (["--objective", "fame"], "invalid choice"),
        (["--objective", "money"], "give a price"),
    ],
)
def test_wrong_values_are_told_in_one_line(
    saved: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    try:
        code = main(["plan", "--profile", saved, *flags])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and said in capsys.readouterr().err
