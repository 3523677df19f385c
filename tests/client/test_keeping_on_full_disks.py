"""Whole jobs that keep features on a real disk which fills up: the same losses, and one line that says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.disks import small_disk, small_ext4
from support.harness import of_epochs
from support.kept_tools import SAMPLES, Counting, check_same, kept_service, train

from hapi.server.service import Service

JOB: dict[str, Any] = {
    "split": 5,
    "freeze": 8,
    "cache": "on",
    "cache_memory": 0,
    "cache_size": 1 << 30,
}
DISKS = [pytest.param(small_disk, 96, id="tmpfs"), pytest.param(small_ext4, 256, id="ext4")]
"""Disks with less room than the features take, which are 192 KiB, but some."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with kept_service(tmp_path_factory.mktemp("full") / "store") as running:
        yield running


def lines_about(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hapi.cache"]


@pytest.mark.slow_except("ext4")
@pytest.mark.parametrize(("disk", "kibibytes"), DISKS)
def test_a_job_goes_on_when_the_disk_is_full(
    service: Service,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    disk: Callable[[Path, int], AbstractContextManager[Path]],
    kibibytes: int,
) -> None:
    """What was kept before is read, by this job and the next; nothing that was half written is believed."""
    reference = train(service, None, **{**JOB, "cache": "off"})
    with disk(tmp_path / "disk", kibibytes) as folder, caplog.at_level(logging.WARNING):
        found = train(service, folder / "cache", **JOB)
        check_same(reference, found)
        (line,) = lines_about(caplog)
        assert "No space left on device" in line and "training goes on" in line and "\n" not in line
        assert (
            found[0]["cache"]["why"]
            == "nothing more can be written to the cache's disk: No space left on device"
        )
        hits = of_epochs(found[0], "feature_hits")
        assert hits[0] == 0 < hits[1] < SAMPLES
        counting = Counting(service)
        check_same(reference, train(counting, folder / "cache", **JOB))
        assert counting.asked <= 3 * SAMPLES


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_beginning(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = train(service, None, **{**JOB, "cache": "off"})
    with small_disk(tmp_path / "disk", 64) as folder, caplog.at_level(logging.WARNING):
        (folder / "other").write_bytes(bytes(63 << 10))
        found = train(service, folder / "cache", **JOB)
        check_same(reference, found)
        assert of_epochs(found[0], "feature_hits") == [0, 0, 0]
        assert len(lines_about(caplog)) == 1 and found[0]["cache"]["why"]
