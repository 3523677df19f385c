"""What a server reads in the background to find damage: its rate, its pauses, its end, and what it tells."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import exchange, metric, served, until

from hapi.errors import StoreError
from hapi.repository.opening import open_model
from hapi.server.scrub import Scrub
from hapi.store.base import ReadPart
from hapi.store.local import LocalStore
from hapi.wire.messages import STATUS_PATH

FAST = 1 << 40


@pytest.fixture(autouse=True)
def _priority_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests a thread of the lowest priority takes seconds for what takes milliseconds."""
    monkeypatch.setattr("hapi.server.scrub._NICE", 0)


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the store with digits and a pushed model."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


def damage(folder: Path, pattern: str) -> None:
    path = next(iter(sorted(folder.rglob(pattern))))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def pack_of_model(folder: Path) -> str:
    """The end of the pushed model's last pack; the folder may hold packs of others."""
    return open_model(LocalStore(folder), "pushed").manifest.packs[-1]


def passed(scrub: Scrub) -> None:
    """One whole pass."""
    before = scrub.last_complete
    scrub.start()
    until(lambda: scrub.last_complete > before, 30, "the end of a pass")
    scrub.stop()
    scrub.join(240)


def test_a_sound_store_is_read_whole(own: Path) -> None:
    scrub = Scrub(LocalStore(own), FAST)
    passed(scrub)
    stored = sum(path.stat().st_size for path in own.rglob("shard-*.bin"))
    weights = sum(path.stat().st_size for path in own.rglob("packs/*.safetensors"))
    assert stored < scrub.bytes <= stored + weights
    assert scrub.damaged == {} and scrub.to_json()["findings"] == 0


def test_damage_is_a_line_and_a_count_until_it_is_mended(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    sound = shutil.copytree(own, own.parent / "sound")
    damage(own, "shard-00001.bin")
    damage(own, pack_of_model(own))
    scrub = Scrub(LocalStore(own), FAST)
    passed(scrub)
    assert scrub.damaged == {"digits": 1, "model:pushed@1": 1}
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == 2 and "shard-00001.bin: sample" in lines[0] and "fails its digest" in lines[1]
    shutil.rmtree(own / "datasets")
    shutil.copytree(sound / "repository", own / "repository", dirs_exist_ok=True)
    again = Scrub(LocalStore(own), FAST)
    again._damaged = dict(scrub.damaged)
    passed(again)
    assert again.damaged == {}


def test_many_findings_are_few_lines(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in own.rglob("shard-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    scrub = Scrub(LocalStore(own), FAST)
    passed(scrub)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert scrub.damaged["digits"] == 40 and len(lines) == 21 and "hapi verify names all" in lines[-1]


def test_what_is_replaced_or_packed_meanwhile_is_no_damage(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "datasets" / "half").mkdir()
    (own / "datasets" / "half" / "packing.json").write_bytes(b"{}")

    class Replaced(LocalStore):
        def read_many(self, parts: Any, *more: Any) -> None:
            super().read_many(parts, *more)
            manifest = own / "datasets" / "digits" / "manifest.json"
            if manifest.exists():  # the new one is whole, and lies elsewhere
                text = manifest.read_text().replace('"pack": "', '"pack": "9')
                manifest.write_text(text)
                for shard in own.rglob("shard-*.bin"):
                    shard.unlink()

    scrub = Scrub(Replaced(own), FAST)
    scrub.start()
    until(lambda: not list(own.rglob("shard-*.bin")), 30, "the replacement")
    time.sleep(0.3)
    scrub.stop()
    scrub.join(240)
    assert "digits" not in scrub.damaged and scrub.last_complete == 0


def test_the_rate_is_kept_to(own: Path) -> None:
    scrub = Scrub(LocalStore(own), 20_000)
    began = time.monotonic()
    scrub.start()
    until(lambda: scrub.bytes > 0, 30, "the first block")
    time.sleep(1.0)
    scrub.stop()
    scrub.join(240)
    largest = max(path.stat().st_size for path in own.rglob("shard-*.bin"))
    assert 0 < scrub.bytes <= 20_000 * (time.monotonic() - began) + largest


def test_it_stands_still_while_requests_wait_and_leaves_at_once(own: Path) -> None:
    waiting = threading.Event()
    waiting.set()
    scrub = Scrub(LocalStore(own), FAST, busy=waiting.is_set)
    scrub.start()
    time.sleep(0.5)
    assert scrub.bytes == 0
    waiting.clear()
    until(lambda: scrub.last_complete > 0, 30, "a pass")
    scrub.stop()
    scrub.join(240)
    assert not any(t.name == "hapi-scrub" for t in threading.enumerate())


def test_a_store_that_fails_is_no_damage_and_no_end(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(LocalStore):
        def read_many(self, parts: list[ReadPart], *more: Any) -> None:
            if parts and parts[0].key.startswith("datasets/"):
                raise StoreError("the store is down; start it")
            super().read_many(parts, *more)

    damage(own, pack_of_model(own))
    scrub = Scrub(Failing(own), FAST)
    scrub.start()
    until(lambda: "model:pushed@1" in scrub.damaged, 30, "the second one")
    scrub.stop()
    scrub.join(240)
    assert "digits" not in scrub.damaged and scrub.last_complete == 0
    assert "scrub: digits cannot be read: the store is down" in caplog.text


def test_a_server_tells_of_it(own: Path) -> None:
    damage(own, "shard-00001.bin")
    with served(own, scrub_rate=FAST) as server:
        server.application.scrub.start()
        until(lambda: server.application.scrub.last_complete > 0, 30, "a pass")
        told = exchange(server.port, "GET", STATUS_PATH).json()["scrub"]
        assert told["damaged"] == told["findings"] == 1 and told["rate"] == FAST and told["last_complete"] > 0
        assert (
            'hapi_scrub_damaged{dataset="digits"} 1.0'
            in exchange(server.port, "GET", "/metrics").body.decode()
        )
        assert metric(server.port, "hapi_scrub_bytes_total") == told["bytes"] > 0
        assert metric(server.port, "hapi_scrub_last_complete_timestamp") == pytest.approx(
            told["last_complete"], abs=1
        )


def test_it_is_off_unless_asked_for(own: Path) -> None:
    with served(own) as server:
        server.application.scrub.start()
        assert server.application.scrub._thread is None
        assert exchange(server.port, "GET", STATUS_PATH).json()["scrub"]["rate"] == 0


def test_a_pass_that_fails_as_nobody_expects_is_followed_by_the_next(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, names = [MemoryError(), ValueError("a defect")], LocalStore.list_names

    def list_names(self: LocalStore, prefix: str) -> list[str]:
        if failures:
            raise failures.pop()
        return names(self, prefix)

    monkeypatch.setattr("hapi.server.scrub.PASS_SECONDS", 0.0)
    monkeypatch.setattr(LocalStore, "list_names", list_names)
    scrub = Scrub(LocalStore(own), FAST)
    passed(scrub)
    assert scrub.bytes and "unexpected error" in caplog.text
