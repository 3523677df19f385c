"""``hapi rm`` and ``hapi gc``: what the user sees of them; the groups and exit codes in every help."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.harness import ROOT
from support.local_job import pack_blobs

from hapi.cli import server, train
from hapi.cli.entry import EXIT_INTERRUPTED
from hapi.cli.main import COMMANDS, GROUPS, main
from hapi.cli.shared.common import EXIT_DIVERGED, EXIT_FAILED, EXIT_OK, EXIT_USAGE
from hapi.repository.packs.place import pack_key
from hapi.store.open import open_store


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def store(tmp_path: Path) -> str:
    np.savez(tmp_path / "dots.npz", x=np.zeros((6, 3, 8, 8), dtype=np.uint8), y=[0, 1, 2, 0, 1, 2])
    assert main(["pack", str(tmp_path / "dots.npz"), f"{tmp_path}/store/dots", "--quiet"]) == 0
    open_store(f"{tmp_path}/store").put(pack_key("a" * 32), b"weights")
    return f"{tmp_path}/store"


def test_nothing_without_yes(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = open_store(store).list()
    code, out, err = ran(capsys, "rm", f"{store}/dots")
    assert code == 2 and f"would remove dataset {store}/dots: 1 object," in out and "--keep-old 0" in out
    assert err == "hapi rm: error: nothing was removed; add --yes to do it\n"
    code, out, err = ran(capsys, "gc", store)
    assert code == 0 and "would remove 1 object, 7 B; add --yes" in out and not err
    assert open_store(store).list() == before


def test_removed_and_collected(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "rm", f"{store}/dots/", "--yes")
    assert code == 0 and "more stay for running jobs for 24h" in out
    assert "DATA SET" not in ran(capsys, "ls", store)[1]
    assert ran(capsys, "rm", f"{store}/dots", "--yes", "--keep-old", "0")[0] == 0
    assert ran(capsys, "gc", store, "--yes")[1].endswith("removed 1 object, 7 B\n")
    assert not open_store(store).list()
    code, _, err = ran(capsys, "rm", f"{store}/dots", "--yes")
    assert (
        code == 1
        and err.startswith("hapi rm: error: there is no dataset or model 'dots'")
        and err.count("\n") == 1
    )


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack_blobs(tmp_path / "store")
    for arguments, code in (
        (("rm", "flowers"), 2),
        (("rm", "memory://x/flowers", "--yes"), 2),
        (("gc", f"{tmp_path}/none"), 1),
        (("gc",), 2),
        (("gc", f"{tmp_path}/store", "--older-than", "-1"), 2),
    ):
        found, _, err = ran(capsys, *arguments)
        assert found == code and err.count("\n") == 1 and "error" in err


def test_every_help_has_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    helps = [ran(capsys, *arguments, "--help")[1] for arguments in ((), *((name,) for name in COMMANDS))]
    for program in (train, server):
        assert program.main(["--help"]) == 0
        helps.append(capsys.readouterr().out)
    for text in helps:
        plain = " ".join(text.split())
        assert re.search(r"Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted", plain)
    assert "3 the training diverged" in " ".join(helps[-2].split())
    assert all(f"\n{title}:\n" in helps[0] for title in GROUPS)
    assert all(
        re.search(rf"^  {name} +\w", helps[0], re.MULTILINE) for name in (*COMMANDS, "train", "server")
    )


def test_the_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page[page.index("| exit code of any command |") :].split("\n\n")[0]
    codes = (EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED)
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == list(codes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "a command is missing; write hapi COMMAND"),
        (("pak",), "there is no command pak; did you mean pack?"),
        (("xyzzy",), "there is no command xyzzy"),
        (("--verson",), "unknown argument --verson"),
        (("ls",), "STORE[/NAME]"),
        (("status",), "URL"),
        (("plan",), "give a MODEL, such as resnet50"),
        (("ls", "/nowhere/store"), "/nowhere/store"),
        (("verify", "/nowhere/store/x"), "/nowhere/store"),
    ],
)
def test_one_clear_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, *arguments)
    assert code in (1, 2) and says in err and err.count("\n") == 1
