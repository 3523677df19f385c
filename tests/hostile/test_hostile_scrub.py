"""Damage in the store of a real server that nobody asks for: found, told, and no hindrance to work or the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.harness import ServerProcess, hapi
from support.http_tools import exchange, metric, until

pytestmark = pytest.mark.slow


def test_a_server_finds_damage_before_a_job_does(tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    for name in ("sound", "damaged"):
        hapi("pack", "sklearn:digits", f"{store}/{name}", "--image-size", "32", "--limit", "60", "--quiet")
    shard = next((store / "datasets" / "damaged").rglob("shard-*.bin"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    server = ServerProcess(store, "--scrub-rate", "1GiB", log=log)
    try:
        until(lambda: metric(server.port, "hapi_scrub_last_complete_timestamp") > 0, 60, "a whole pass")
        text = exchange(server.port, "GET", "/metrics").body.decode()
        assert 'hapi_scrub_damaged{dataset="damaged"} 1.0' in text and 'dataset="sound"' not in text
        until(lambda: "scrub: damage in" in log.read_text(), 20, "the log's line")
        (line,) = [line for line in log.read_text().splitlines() if "scrub: damage in" in line]
        assert "damaged" in line and "fails its checksum" in line
    finally:
        assert server.stop() == 0


def test_a_slow_scrub_ends_with_its_server(tmp_path: Path) -> None:
    hapi("pack", "sklearn:digits", f"{tmp_path}/digits", "--image-size", "32", "--limit", "60", "--quiet")
    server = ServerProcess(tmp_path, "--scrub-rate", "10")
    try:
        until(lambda: metric(server.port, "hapi_scrub_bytes_total") > 0, 60, "the first block")
    finally:
        assert server.stop() == 0  # in the middle of minutes of work
