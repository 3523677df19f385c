"""``hapi plan``: measured, replayed, what-ifs, and what people type wrongly."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hapi.cli.main import main
from hapi.profiler.profile import Job, Profile


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(("plan", *arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile of resnet18, measured here."""
    path = str(tmp_path_factory.mktemp("plan") / "profile.json")
    assert main(("plan", "resnet18", "--input-size", "32", "--save-profile", path, "--device", "cpu")) == 0
    return path


def document(capsys: pytest.CaptureFixture[str], saved: str, *flags: str) -> dict[str, Any]:
    code, out, err = run(capsys, "--profile", saved, "--json", *flags)
    assert (code, err) == (0, "")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_the_table_and_every_strategy(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, _ = run(capsys, "--profile", saved, "--bs", "64", "--samples", "10k", "--bandwidth", "100Mbps")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("resnet18: freeze 11, training batch 64, 10000 samples an epoch, 100.0 Mbit/s")
    assert [line.split()[0] for line in lines[2:14]] == [str(split) for split in range(12)]
    assert sum("<- auto" in line for line in lines) == 1
    names = [line.split()[0] for line in lines if line.startswith("  ") and ": " in line and "split" in line]
    assert names == ["auto", "hapi", "none", "freeze", "min", "nsg", "bandwidth"]
    assert any(line.startswith("measured ") for line in lines)
    assert any(line.startswith("assumed: ") for line in lines)


@pytest.mark.slow
def test_a_precision_halves_what_crosses(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    arguments = ("resnet18", "--input-size", "32", "--device", "cpu", "--frozen-precision", "bf16", "--json")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    exact, half = document(capsys, saved)["candidates"], json.loads(out)["candidates"]
    wires = [
        (e["estimate"]["wire_bytes"], h["estimate"]["wire_bytes"]) for e, h in zip(exact, half, strict=True)
    ]
    assert wires[0][0] == wires[0][1], "stored samples are what they were"
    assert all(h == pytest.approx(e / 2) for e, h in wires[1:])
    code, _, err = run(capsys, "--profile", saved, "--frozen-precision", "bf16")
    assert code == 2 and "--frozen-precision is part of the profile" in err


def test_a_measured_profile_is_sound(saved: str) -> None:
    profile = Profile.load(saved)
    assert profile.last_split == 11 and len(profile.layers) == 14
    assert all(layer.client_seconds > 0 for layer in profile.layers)
    assert all(x.server_seconds == x.client_seconds for x in profile.layers)
    assert profile.step_seconds > 0 and profile.update_seconds > 0 and profile.client_tier.decode_seconds > 0
    assert profile.samples.tensor_bytes == 3 * 32 * 32 * 4 and profile.samples.stored_bytes == 110_000


def test_what_ifs(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    plain = document(capsys, saved)
    fast = document(capsys, saved, "--server-speed", "4x")
    stages = [d["candidates"][11]["estimate"]["stages"] for d in (plain, fast)]
    assert stages[0]["server"] > 3 * stages[1]["server"] and stages[0]["client"] == stages[1]["client"]
    slow = document(capsys, saved, "--bandwidth", "1Mbps")
    assert slow["bits_per_second"] == 1e6
    assert slow["candidates"][0]["estimate"]["stages"]["network"] == pytest.approx(128 * 110_000 * 8 / 1e6)
    tensors = document(capsys, saved, "--stored-bytes", "tensor")
    assert tensors["candidates"][0]["estimate"]["wire_bytes"] == 128 * 3 * 32 * 32 * 4
    assert plain["strategies"]["freeze"] == 11 and plain["strategies"]["none"] == 0
    for name in plain["strategies"]:
        chosen = document(capsys, saved, "--strategy", name)
        assert chosen["strategy"] == name and chosen["split"] == plain["strategies"][name]


def test_memory_that_nothing_fits_says_what_would(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    code, out, err = run(capsys, "--profile", saved, "--memory", "64MiB", "--bs", "4096")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "no split fits the client's memory" in err and "would fit (--bs)" in err
    code, out, _ = run(
        capsys, "--profile", saved, "--memory", "64MiB", "--bs", "4096", "--strategy", "freeze"
    )
    assert code == 0 and "<- freeze, but does not fit the memory" in out
    assert "auto      nothing fits the memory" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give a MODEL"),
        (["resnet18", "--strategy", "best"], "known are auto, hapi"),
        (["resnet18", "--bs", "0"], "--bs/--batch-size: expected 1 to"),
        (["resnet18", "--bs", "-3"], "--bs"),
        (["resnet18", "--samples", "many"], "--samples"),
        (["resnet18", "--bandwidth", "0bps"], "out of range"),
        (["resnet18", "--bandwidth", "100"], "--bandwidth: '100' has no unit: 100Mbps or 100MB/s?"),
        (["resnet18", "--bandwidth", "1G"], "unknown unit"),
        (["resnet18", "--memory", "16G"], "ambiguous"),
        (["resnet18", "--stored-bytes", "0"], "--stored-bytes: expected 1 to 1TiB, or 'tensor', got '0'"),
        (
            ["resnet18", "--stored-bytes", ""],
            "cannot read ''; write it as 64MiB or 1.5GB; expected 1 to 1TiB",
        ),
        (["resnet18", "--input-size", "32", "--freeze", "99"], "--freeze"),
        (["resnet18", "--input-size", "0"], "--input-size: expected 1 to 4096"),
        (["resnet18", "--input-size", "9" * 30], "--input-size: '999"),
        (["resnet18", "--input-size", "32", "--blocks", "nope"], "no layer can end at 'nope'"),
        (["no_such_net"], "no_such_net"),
        (["os:getcwd"], "returned a str"),
        (["--profile", "/no/such/file"], "cannot be read"),
        (["--profile", ""], "cannot be read"),
    ],
)
def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    code, out, err = run(capsys, *flags)
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["alexnet"], "is of 'resnet18'"),
        (["--freeze", "3"], "part of the profile"),
        (["--server-speed", "fast"], "--server-speed: expected 1e-06x to 1000000x, got 'fast'"),
        (["--server-speed", "0x"], "--server-speed: expected 1e-06x to 1000000x"),
        (["--server-speed", "nan"], "--server-speed: expected 1e-06x to 1000000x"),
        (["--save-profile", "/proc/x"], "cannot be written"),
        (["--save-profile", "/dev/null"], "is not a plain file"),
        (["--save-profile", "."], "is not a plain file"),
        (["--save-profile", ""], "is not a plain file"),
        (["--figure", ""], "must end in .png"),
    ],
)
def test_what_a_replay_refuses(
    capsys: pytest.CaptureFixture[str], saved: str, flags: list[str], message: str
) -> None:
    code, out, err = run(capsys, "--profile", saved, *flags)
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1


def test_the_report_of_a_run_is_replayed(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"epochs": [], "plan": {"profile": json.loads(Path(saved).read_text())}}))
    assert document(capsys, str(report)) == document(capsys, saved)
    report.write_text(json.dumps({"epochs": []}))
    code, out, err = run(capsys, "--profile", str(report))
    assert (code, out, err.count("\n")) == (2, "", 1) and f"{report}: is the report of a run without a" in err


def test_a_damaged_profile_is_named(capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path) -> None:
    broken = json.loads(Path(saved).read_text())
    broken["layers"][2]["server_seconds"] = "fast"
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    code, _, err = run(capsys, "--profile", str(path))
    assert code == 2 and "layers[2].server_seconds: expected a number, found str" in err


def test_a_replay_does_not_import_torch(saved: str) -> None:
    program = (
        "import sys; from hapi.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) * 7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "--profile", saved], capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def plan_in_a_new_process(tmp_path: Path, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """What ``hapi plan --json`` prints, and which heavy modules its process had imported at its end."""
    heavy = ("numpy", "torch", "torchvision", "torch._dynamo", "sympy", "aiohttp")
    code = (
        "import sys; from hapi.cli.main import main; "
        f"code = main(('plan', 'resnet18', '--input-size', '32', '--device', 'cpu', '--json', *{flags!r})); "
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240, env=environment
    )
    return json.loads(done.stdout), ast.literal_eval(done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_the_answer_is_quick_the_first_time_and_at_once_the_second(tmp_path: Path) -> None:
    """What makes it quick: no compiler is imported for the first answer, and not even torch for the second."""
    first, imported = plan_in_a_new_process(tmp_path)
    assert imported == ["numpy", "torch", "torchvision"]
    second, imported = plan_in_a_new_process(tmp_path)
    assert imported == []
    assert second["candidates"] == first["candidates"]
    assert second["notes"][:-1] == first["notes"] and "--remeasure measures again" in second["notes"][-1]
    what_if, imported = plan_in_a_new_process(tmp_path, "--stored-bytes", "tensor", "--bandwidth", "10Mbps")
    assert imported == [] and what_if["candidates"][0]["estimate"]["wire_bytes"] == 128 * 3 * 32 * 32 * 4


@pytest.mark.slow
def test_a_kept_profile_that_is_damaged_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ("squeezenet1_1", "--input-size", "32", "--device", "cpu", "--json")
    assert run(capsys, *flags)[0] == 0
    (path,) = (tmp_path / "hapi").glob("plan-*.json")
    kept = json.loads(path.read_text())
    kept["content"]["layers"][0]["output_bytes"] = "many"
    path.write_text(json.dumps(kept))
    code, out, err = run(capsys, *flags)
    assert (code, err) == (0, "") and "kept in" not in json.loads(out)["notes"][-1]
    assert "kept in" in json.loads(run(capsys, *flags)[1])["notes"][-1]
    assert "kept in" not in json.loads(run(capsys, *flags, "--remeasure")[1])["notes"][-1]


def test_a_cache_that_cannot_be_written_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, out, err = run(capsys, "squeezenet1_1", "--input-size", "32", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["notes"][-1].startswith("nothing is kept for the next time: ")


@pytest.mark.slow
def test_a_figure_is_drawn_beside_the_table(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    figure = tmp_path / "plan.svg"
    code, out, err = run(capsys, "--profile", saved, "--figure", str(figure))
    assert (code, err) == (0, "") and "choice of each strategy" in out
    assert "as stored" in figure.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--figure", "p.svg", "--save-profile", "x/../p.svg"],
            "--figure p.svg: it is the same file as --save-profile; give another name",
        ),
        (
            ["--profile", "kept.svg", "--figure", "kept.svg"],
            "--figure kept.svg: it is the same file as --profile",
        ),
        (
            ["--profile", "kept.svg", "--save-profile", "link"],
            "--save-profile link: it is the same file as --profile",
        ),
        (["--figure", "kept.svg/z.svg"], "--figure kept.svg/z.svg: cannot be written there"),
        (["--figure", "x/y.svg"], "--figure x/y.svg: is not a plain file"),
    ],
)
def test_a_file_has_one_use_and_can_be_written(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    """Found out before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "y.svg").mkdir(parents=True)
    (tmp_path / "kept.svg").write_text("kept")
    (tmp_path / "link").symlink_to("kept.svg")
    code, out, err = run(capsys, *flags, "no-such-model")
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert (tmp_path / "kept.svg").read_text() == "kept"


def test_a_figure_of_an_unknown_kind_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "no-such-model", "--figure", "plan.bmp")
    assert code == 2 and "must end in .png, .svg or .pdf" in err


def test_a_profile_plans_its_own_run(capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path) -> None:
    """Of a run's report, and of a profile that a run saved; flags change single facts."""
    own = {"bs": 64, "samples": 512, "epochs": 5, "memory_bytes": 1 << 34}
    report = str(tmp_path / "report.json")
    Path(report).write_text(
        json.dumps({"epochs": [], "plan": {"profile": Profile.load(saved).to_json(), "job": own}})
    )
    found = document(capsys, report)["job"]
    assert {name: found[name] for name in own} == own
    assert document(capsys, report, "--batch-size", "16")["job"] == {**found, "bs": 16}
    path = str(tmp_path / "of-a-run.json")
    Profile.load(saved).save(path, Job(bs=5, samples=50))
    assert (document(capsys, path)["job"]["bs"], document(capsys, path)["job"]["samples"]) == (5, 50)
    assert document(capsys, saved)["job"]["bs"] == 128


def test_a_model_by_its_flag(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    assert document(capsys, saved, "--model", "resnet18")["model"] == "resnet18"
    code, _, err = run(capsys, "resnet18", "--model", "resnet50")
    assert code == 2 and "a model is given already, resnet18" in err
