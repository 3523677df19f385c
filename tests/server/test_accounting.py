"""Accounts of tenants: days, files, full disks, and the sums of a real server that is reloaded and killed."""

from __future__ import annotations

import csv
import logging
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from support.harness import server as running_server
from support.http_tools import EXTRACT, SAMPLES, Known, exchange, until

from hapi.errors import UsageError
from hapi.repository.opening import open_model
from hapi.server.tenants import accounting
from hapi.server.tenants.accounting import COLUMNS, Account, Accounts
from hapi.store.open import open_store

NOON = 1_900_000_000.0
DAY, NEXT = "2030-03-17", "2030-03-18"


def rows(folder: Path) -> list[dict[str, str]]:
    """All rows of all files."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            found += list(csv.DictReader(file))
    return found


def test_a_day_has_its_own_file(tmp_path: Path) -> None:
    now = [NOON]
    accounts = Accounts(str(tmp_path / "new" / "accounts"), "5e1f", clock=lambda: now[0])
    folder = tmp_path / "new" / "accounts"
    assert [path.name for path in folder.iterdir()] == [f"{DAY}-5e1f.csv"] and rows(folder) == []
    use = Account(served=1, samples=4, sent_bytes=100, cost_seconds=0.25, pack_bytes=7)
    for _ in range(2):
        accounts.add("vision", use)
    accounts.add("a,b", Account(shed=1))
    now[0] += 86400
    accounts.add("vision", use)
    accounts.write()
    expected = [
        (DAY, "5e1f", "a,b", "0", "1", "0", "0", "0.000000", "0"),
        (DAY, "5e1f", "vision", "2", "0", "8", "200", "0.500000", "14"),
        (NEXT, "5e1f", "vision", "1", "0", "4", "100", "0.250000", "7"),
    ]
    assert [tuple(row[c] for c in COLUMNS) for row in rows(folder)] == expected
    assert list(accounts._days) == [NEXT], "days that are written and over take no memory"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    accounts.write()
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_clock_that_is_set_back_over_midnight_loses_nothing(tmp_path: Path) -> None:
    now = [NOON]
    accounts = Accounts(str(tmp_path), "5e1f", clock=lambda: now[0])
    for day in (0, 1, 0, 1, 0):
        now[0] = NOON + day * 86400
        accounts.add("vision", Account(samples=1))
        if day:
            accounts.write()
    accounts.write()
    counted = Counter(row["day"] for row in rows(tmp_path) for _ in range(int(row["samples"])))
    assert counted == {DAY: 3, NEXT: 2}


def test_servers_share_a_folder(tmp_path: Path) -> None:
    for server in ("one", "two"):
        accounts = Accounts(str(tmp_path), server, clock=lambda: NOON)
        accounts.add("vision", Account(samples=3))
        accounts.write()
    assert [(r["server"], r["samples"]) for r in rows(tmp_path)] == [("one", "3"), ("two", "3")]


def test_what_cannot_be_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [NOON]
    accounts = Accounts(str(tmp_path), "5e1f", clock=lambda: now[0])
    accounts.add("vision", Account(samples=1))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(accounting, "write_atomically", full)
        for _ in range(3):
            accounts.write()
        now[0] += 86400
        accounts.add("vision", Account(samples=2))
        accounts.write()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == ["accounts not written"]
    accounts.write()
    assert [(r["day"], r["samples"]) for r in rows(tmp_path)] == [(DAY, "1"), (NEXT, "2")]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=f"--accounts {tmp_path}/file/a: cannot be written: Not a directory"):
        Accounts(str(tmp_path / "file" / "a"), "5e1f")


@pytest.mark.slow
def test_a_server_keeps_accounts(folder: Path, known: Known, tmp_path: Path) -> None:
    tenants, kept = tmp_path / "tenants.yaml", tmp_path / "accounts"
    tenants.write_text("vision: {token: vision-secret}\nleaving: {token: leaving-secret}\n")
    arguments = ("--tenants", str(tenants), "--accounts", str(kept))
    with running_server(folder, *arguments, log=tmp_path / "log") as running:

        def ask(token: str, path: str, body: object) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return exchange(running.port, "POST", path, body, headers).status

        assert ask("vision-secret", EXTRACT, known.extract()) == 200
        assert ask("leaving-secret", SAMPLES, known.samples()) == 200
        assert ask("leaving-secret", SAMPLES, known.samples([10**6])) == 404
        pack = (
            open_model(open_store(str(folder)), "pushed")
            .manifest.packs[0]
            .rsplit("/", 1)[1]
            .partition(".")[0]
        )
        headers = {"Authorization": "Bearer vision-secret"}
        packed = exchange(running.port, "GET", f"/v1/packs/{pack}", None, headers)
        assert packed.status == 200
        tenants.write_text("vision: {token: vision-second}\n")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: ask("vision-second", SAMPLES, known.samples()) == 200, 20, "a reload")
        assert running.stop() == 0
    totals: Counter[tuple[str, str]] = Counter()
    for row in rows(kept):  # of two days if it is midnight
        for name in ("served", "samples", "sent_bytes", "pack_bytes"):
            totals[row["tenant"], name] += int(row[name])
        assert float(row["cost_seconds"]) > 0 and row["shed"] == "0"
    assert totals["vision", "served"] == 2 and totals["vision", "samples"] == 7
    assert totals["leaving", "served"] == 1 and totals["leaving", "samples"] == 3
    assert totals["vision", "sent_bytes"] > 4 * 16384
    assert totals["vision", "pack_bytes"] == len(packed.body) > 0 == totals["leaving", "pack_bytes"]
