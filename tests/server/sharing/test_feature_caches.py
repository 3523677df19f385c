"""The operator's feature cache: it outlives the server, serves whoever has the same key, and never fails a request."""

from __future__ import annotations

import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.feature_tools import COUNT, KEY, SAMPLE_BYTES
from support.harness import server
from support.http_tools import EXTRACT, TENSORS, Known, exchange
from support.sharing_tools import Extracted, extracted, parsed, sharing_service

from hapi.cache import records
from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.data.manifest import InPlace
from hapi.errors import UsageError
from hapi.server.device import sizing
from hapi.server.service import Service
from hapi.server.sharing.caches import FeatureCaches
from hapi.wire.labels import SINGLE
from hapi.wire.references import Augmentation

IDS = list(range(32))


def settled(service: Service) -> None:
    """Wait until what was computed is written."""
    assert service.sharing.caches is not None and service.sharing.caches.written(60)


def segments(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(("segment-", "open-"))]


def filled(folder: Path, known: Known, cache: Path) -> Extracted:
    """The answer of a server that had nothing, and kept it in ``cache``."""
    with sharing_service(folder, share_memory=0, cache_dir=str(cache)) as first:
        found = extracted(first, known, IDS)
        assert first.sharing.counts.all()["computed"] == 32
    return found


def test_features_of_files_of_others_are_not_kept(folder: Path, known: Known, tmp_path: Path) -> None:
    """They may be edited without another version, and a hit would not read them."""
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service:
        (listed,) = service.document("/v1/datasets")["datasets"][:1]
        dataset = service._datasets.current(listed["name"])
        place = InPlace(format="webdataset", folder=dataset.manifest.key_of("s").removesuffix("/s"))
        object.__setattr__(dataset.manifest, "in_place", place)
        for _ in range(2):
            extracted(service, known, IDS)
            settled(service)
        assert service.sharing.counts.all()["computed"] == 64 and not segments(tmp_path)


def test_features_of_code_that_cannot_be_read_are_not_kept(
    folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change from server to server, and the digest of the layers would not tell."""
    monkeypatch.setattr(
        sizing, "unidentified_layer", lambda model, split: (model.layers[0], "runs mynet.Gate")
    )
    with sharing_service(folder, cache_dir=str(tmp_path / "cache")) as service:
        extracted(service, known, IDS)
        settled(service)
        assert extracted(service, known, IDS).report.kept == 32, "by this server, which has one version of it"
        assert not segments(tmp_path)


def test_a_later_server_computes_nothing_and_loads_no_layers(
    folder: Path, known: Known, tmp_path: Path
) -> None:
    expected = filled(folder, known, tmp_path / "cache")
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as second:
        found = extracted(second, known, IDS[::-1])
        again = extracted(second, known, IDS)
        assert (again.features, again.labels) == (expected.features, expected.labels)
        assert found.report.kept == 32 and found.report.cos_batch == 0
        assert second.sharing.counts.all() == {"computed": 0, "joined": 0, "recent": 0, "cache": 64}
        worker = second.workers.all[0]
        assert (worker.cache.misses, worker.memory.adaptations, worker.cos_batch) == (0, 0, None)
        assert second.document("/v1/datasets/digits")["keeps_features"] is True


@pytest.mark.slow
def test_encoded_features_are_the_same_for_servers_of_any_setting(
    folder: Path, known: Known, tmp_path: Path
) -> None:
    found, sizes = {}, {}
    for codec in ("none", "zeros+planes"):
        cache = str(tmp_path / codec)
        with sharing_service(folder, share_memory=0, cache_dir=cache, cache_codec=codec) as first:
            found[codec] = extracted(first, known, IDS)
        sizes[codec] = sum(path.stat().st_size for path in segments(tmp_path / codec))
        with sharing_service(folder, share_memory=0, cache_dir=cache) as second:
            again = extracted(second, known, IDS[::-1])
            assert again.report.kept == 32
            found[f"again {codec}"] = extracted(second, known, IDS)
    assert len({answer.features for answer in found.values()}) == 1
    assert sizes["zeros+planes"] < 0.9 * sizes["none"]


def test_without_a_folder_nothing_is_kept(folder: Path, known: Known) -> None:
    with sharing_service(folder) as service:
        extracted(service, known, IDS)
        assert service.sharing.caches is None
        assert "keeps_features" not in service.document("/v1/datasets/digits")


@pytest.mark.slow
def test_damaged_records_are_computed_anew(folder: Path, known: Known, tmp_path: Path) -> None:
    expected = filled(folder, known, tmp_path / "cache")
    (segment,) = segments(tmp_path / "cache")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as second:
        found = extracted(second, known, IDS)
        assert (found.features, found.labels) == (expected.features, expected.labels)
        assert second.sharing.counts.all()["computed"] >= 16


@pytest.mark.slow
def test_a_full_disk_fails_no_request(
    folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = filled(folder, known, tmp_path / "other")

    def full(self: FeatureCache, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hapi.cache.segments.SegmentWriter.append", full)
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service:
        for _ in range(2):
            found = extracted(service, known, IDS)
            assert (found.features, found.report.kept) == (expected.features, 0)
            settled(service)


def test_a_folder_that_goes_away_fails_no_request(
    folder: Path,
    known: Known,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def gone(*arguments: object, **named: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hapi.server.sharing.caches.FeatureCache", gone)
    with (
        caplog.at_level(logging.WARNING),
        sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service,
    ):
        assert extracted(service, known, IDS).report.shared == 0
    assert "feature cache not used" in caplog.text


def test_what_is_drawn_anew_is_not_kept(folder: Path, known: Known, tmp_path: Path) -> None:
    transform = {**known.extract()["transform"], "augment": Augmentation(flip=0.5).to_json()}
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service:
        for _ in range(2):
            drawn = {**transform, "seed": 1, "epoch": 0}
            assert extracted(service, known, IDS, transform=drawn).report.shared == 0
        settled(service)
    assert not segments(tmp_path / "cache")


def test_keys_are_closed_the_longest_unused_first(
    folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service:
        caches = service.sharing.caches
        assert isinstance(caches, FeatureCaches)
        monkeypatch.setattr("hapi.server.sharing.caches.OPEN_KEYS", 1)
        layers = [known.extract()["split_name"]]
        for split in (3, 4, 3):
            extracted(service, known, IDS[:16], split=split)
            settled(service)
        assert layers and len(caches._open) == 1
        assert next(iter(caches._open.values())).cache.key.cut == 3
        counts = service.sharing.counts.all()
        assert (counts["computed"], counts["cache"]) == (32, 16)


def test_memory_is_of_all_open_keys_together(tmp_path: Path) -> None:
    each = COUNT * (SAMPLE_BYTES + SINGLE.nbytes)
    keys = [replace(KEY, prefix=letter * 32) for letter in "bcde"]
    caches = FeatureCaches(CacheFolder.open(tmp_path / "cache", 1 << 20), 2 * each)

    def taken(key: FeatureKey) -> int:
        with caches.of(key, COUNT, SINGLE) as cache:
            assert cache is not None
            assert sum(entry.cache.memory_bytes for entry in caches._open.values()) <= 2 * each
            return cache.memory_bytes

    with closing(caches):
        with caches.of(keys[0], COUNT, SINGLE):
            assert [taken(key) for key in keys[1:]] == [each] * 3, "those that nobody uses make room"
            with caches.of(keys[3], COUNT, SINGLE):
                assert taken(keys[1]) == 0, "those in use do not"
        assert taken(keys[2]) == each


def test_the_room_is_told_while_a_key_is_opened(tmp_path: Path) -> None:
    """On the event loop: the disk may hang meanwhile."""
    caches = FeatureCaches(CacheFolder.open(tmp_path / "cache", 1 << 20))
    with closing(caches), ThreadPoolExecutor(1) as threads:
        with caches.of(KEY, COUNT, SINGLE):
            pass
        with caches._lock:
            assert threads.submit(lambda: caches.room).result(10).bytes == 1 << 20


@pytest.mark.slow
def test_a_server_keeps_features_again_once_a_full_disk_has_room(
    folder: Path,
    known: Known,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = os.pwritev

    def full(descriptor: int, data: object, start: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with sharing_service(folder, share_memory=0, cache_dir=str(tmp_path / "cache")) as service:
        for pwritev, wait, kept in ((full, 0.0, 0), (full, 60.0, 0), (write, 60.0, 0), (write, 0.0, 32)):
            monkeypatch.setattr(records, "_FULL_DISK_SECONDS", wait)
            monkeypatch.setattr(os, "pwritev", pwritev)
            extracted(service, known, IDS)
            settled(service)
            caches = service.sharing.caches
            assert caches is not None
            (entry,) = caches._open.values()
            assert entry.cache.held(np.array(IDS)).sum() == kept
            if pwritev is write:
                entry.cache._records._full_until = 0.0  # after the wait
    told = [line for line in caplog.messages if "No space left on device" in line]
    assert len(told) == 1 and "until there is room" in told[0]


def test_settings_that_would_keep_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="--cos-batch"),
        sharing_service(folder, cache_dir=str(tmp_path), cos_batch=8),
    ):
        pass
    (tmp_path / "something").write_text("else")
    with pytest.raises(UsageError, match="--cache-dir"), sharing_service(folder, cache_dir=str(tmp_path)):
        pass


@pytest.mark.slow
def test_a_killed_server_leaves_what_it_wrote(
    folder: Path, known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers of one machine share the folder; one is killed while both use it."""
    arguments = ("--share-memory", "0", "--cos-batch", "16", "--device", "cpu")
    arguments = (*arguments, "--cache-dir", str(tmp_path / "cache"))
    bodies = []
    with server(folder, *arguments) as one, server(folder, *arguments) as two:
        bodies.append(exchange(one.port, "POST", EXTRACT, known.extract(IDS)).body)
        bodies.append(exchange(two.port, "POST", EXTRACT, known.extract(IDS)).body)
        assert two.stop() == 0
        one.kill()
        with server(folder, *arguments) as three:
            bodies.append(exchange(three.port, "POST", EXTRACT, known.extract(IDS)).body)
            assert exchange(three.port, "POST", TENSORS, known.tensors()).status == 200
    answers = [parsed(body, IDS) for body in bodies]
    assert len({answer.features for answer in answers}) == 1
    assert answers[2].report.kept == 32
