"""Training with kept features: the same to the bit, whatever the cache has or loses, and nothing asked twice."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.harness import of_epochs
from support.kept_tools import JOB, LAST, SAMPLES, Counting, check_same, kept_service, train
from support.local_job import Interrupting, Silent, open_session

from hapi.cache import catalog as cache_catalogue
from hapi.cache import folder as cache_folder
from hapi.cache.disk_rates import DiskRates
from hapi.cache.features import FeatureCache
from hapi.cache.writing import line, record_codec
from hapi.client.caching import filling
from hapi.client.planning.cache_facts import READ_RATE, WRITE_RATE
from hapi.client.session import Session
from hapi.codecs.names import EXACT
from hapi.errors import UsageError
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.server.service import Service
from hapi.store.open import open_store

WIDE = 8
"""A cut with so many values in a sample that a codec pays."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("kept") / "store"
    for number in range(32):
        path = store.parent / "pictures" / f"c{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    pack(open_source(str(store.parent / "pictures")), open_store(str(store)), "pictures")
    with kept_service(store) as running:
        yield running


@pytest.fixture(scope="module")
def reference(service: Service) -> Any:
    """The run at split 5 without a cache."""
    return train(service, None, split=5)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)


@pytest.mark.slow_except("stored samples")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"split": 0}, id="stored samples"),
        pytest.param({"split": 5, "validation": 1 / 3}, id="the middle", marks=pytest.mark.slow),
        pytest.param({"split": LAST, "validation": "held"}, id="the last split", marks=pytest.mark.slow),
        pytest.param({"split": "auto"}, id="auto"),
        pytest.param({"split": 5, "frozen_precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"split": LAST, "frozen_precision": "fp16"}, id="fp16", marks=pytest.mark.long),
        pytest.param({"split": 3, "drop_last": True, "trainers": 2}, id="trainers", marks=pytest.mark.slow),
    ],
)
def test_the_same_losses_and_nothing_is_asked_twice(
    service: Service, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "trainers" in changes:
        changes = {**changes, "bs": 16, "request_size": 16}
    reference = train(service, None, **changes)
    counting = Counting(service)
    found = train(counting, tmp_path / "cache", **changes)
    check_same(reference, found)
    report = found[0]
    own = of_epochs(report, "samples")[0]
    validated = 32 if "validation" in changes else 0
    assert of_epochs(reference[0], "feature_hits") == [0, 0, 0]
    if "trainers" not in changes:  # with them, each epoch has another half of the samples
        assert of_epochs(report, "feature_hits") == [0, own, own]
        assert of_epochs(report, "feature_misses") == [own, 0, 0] == of_epochs(report, "features_kept")
        assert of_epochs(report, "requests")[1:] == [0, 0] == of_epochs(report, "bytes_received")[1:]
        assert counting.asked == own + validated
        again = Counting(service)
        check_same(reference, train(again, tmp_path / "cache", **changes))
        assert again.asked == 0
    assert report["cache"]["why"] == "" and report["cache"]["cut"] == LAST


@pytest.mark.slow_except("5")
@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.slow), 5, 10])
def test_a_cut_before_the_last_split(service: Service, tmp_path: Path, split: int) -> None:
    """Misses and hits meet at the cut, or, of a split beyond it, at the last split; both are run on from there."""
    settings = {**JOB, "split": "auto", "cache_dir": str(tmp_path)}
    with open_session(service, **{**settings, "cache": "off"}) as plain:
        reference = dict(_by_id(plain, 0, split_of=lambda number: split))
    for partial in (True, False, False):
        with open_session(service, **settings) as session:
            session.keeping.cut = 8
            at = 0 if partial else split
            stream = _by_id(session, 1, split_of=lambda number, at=at: at)
            for number, (sample, features) in enumerate(stream):
                assert torch.equal(features, reference[sample])
                if partial and number == 40:
                    stream.close()  # type: ignore[attr-defined]
                    break
            kept = session.last.kept
            if not partial:
                assert kept.hits in ((64,) if split > 8 else (64, SAMPLES))
                assert kept.kept == (0 if split > 8 else kept.misses)


@pytest.mark.slow
def test_a_partial_cache_is_used_and_no_pass_is_small(service: Service, tmp_path: Path) -> None:
    reference = train(service, None, split=5, epochs=2)
    with open_session(service, **{**JOB, "split": 5, "cache_dir": str(tmp_path), "seed": 4}) as session:
        stream = session.epoch(0)
        for _ in range(2):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    counting = Counting(service)
    found = train(counting, tmp_path, split=5, epochs=2)
    check_same(reference, found)
    hits, misses = of_epochs(found[0], "feature_hits"), of_epochs(found[0], "feature_misses")
    assert (hits[0], misses[0]) in ((32, 64), (64, 32)) and (hits[1], misses[1]) == (SAMPLES, 0)
    assert min(counting.requests) >= 16 and sum(counting.requests) < SAMPLES


@pytest.mark.slow
def test_after_an_interruption_what_is_there_counts(service: Service, tmp_path: Path) -> None:
    cache, checkpoint = tmp_path / "cache", tmp_path / "run.pt"
    changes = {"split": 5, "checkpoint": str(checkpoint), "validation": 1 / 3, "bs": 16, "request_size": 16}
    reference = train(service, None, **{**changes, "checkpoint": None})
    with pytest.raises(KeyboardInterrupt):
        train(service, cache, Interrupting(2), **changes)
    counting = Counting(service)
    found = train(counting, cache, resume=True, **changes)
    check_same(reference, found)
    assert counting.asked == 64 and of_epochs(found[0], "requests")[1:] == [0, 0]


@pytest.mark.slow
def test_a_server_that_is_dead_after_the_first_epoch(service: Service, tmp_path: Path) -> None:
    reference = train(service, None, split=5, validation=1 / 3)
    counting = Counting(service)

    class Dying(Silent):
        def epoch_done(self, entry: Mapping[str, Any]) -> None:
            counting.dead = True

    check_same(reference, train(counting, tmp_path, Dying(), split=5, validation=1 / 3, patience=0))


@pytest.mark.slow_cases("flip")
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_cache_that_is_damaged_meanwhile(
    service: Service, reference: Any, tmp_path: Path, damage: str
) -> None:

    class Vandal(Silent):
        def on_step(self, steps: int) -> None:
            for path in tmp_path.glob("*@*/*-*") if steps % 3 == 2 else ():
                with contextlib.suppress(FileNotFoundError):
                    if damage == "gone":
                        shutil.rmtree(path.parent)
                        continue
                    data = bytearray(path.read_bytes())
                    data[len(data) // 3] ^= 64
                    path.write_bytes(data[: -len(data) // 2] if damage == "cut" else data)

    check_same(reference, train(service, tmp_path, Vandal(), split=5))


def test_a_full_disk_stops_the_keeping_only(
    service: Service, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureCache, "put", lambda *_: None)
    monkeypatch.setattr(FeatureCache, "admits", False)
    found = train(service, tmp_path, split=5)
    check_same(reference, found)
    assert of_epochs(found[0], "features_skipped") == [SAMPLES] * 3
    assert "no room" in found[0]["cache"]["why"]


def test_a_disk_that_is_slower_than_the_training_leaves_some_out(
    service: Service, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "LINE_BYTES", 1)
    put, release = FeatureCache.put, threading.Event()

    class Releasing(Silent):
        def on_step(self, steps: int) -> None:
            if steps == 3:
                release.set()

    def slow(*given: Any) -> None:
        assert release.wait(240)
        put(*given)

    monkeypatch.setattr(FeatureCache, "put", slow)
    found = train(service, tmp_path, Releasing(), split=5)
    check_same(reference, found)
    kept = of_epochs(found[0], "features_kept")
    assert kept[0] < SAMPLES and of_epochs(found[0], "features_skipped")[0] > 0
    assert "slower" in found[0]["cache"]["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [name if name == "zeros+planes" else pytest.param(name, marks=pytest.mark.slow) for name in EXACT],
)
def test_encoded_features_give_the_same_losses(service: Service, tmp_path: Path, codec: str) -> None:
    """Each epoch decodes them. A flipped bit costs one sample, and a job with another setting reads the others."""
    wide = {"split": 5, "freeze": WIDE}
    reference = train(service, None, **wide)
    found = train(service, tmp_path, **wide, cache_codec=codec, cache_memory=0)
    check_same(reference, found)
    assert of_epochs(found[0], "feature_hits") == [0, SAMPLES, SAMPLES]
    (told,) = found[0]["cache"]["codecs"]
    assert (told["cut"], told["codec"]) == (WIDE, codec)
    (segment,) = tmp_path.glob("*@*/segment-*")
    content = bytearray(segment.read_bytes())
    raw = of_epochs(found[0], "feature_bytes_written")[0]
    assert len(content) < raw
    content[len(content) // 2] ^= 8
    segment.write_bytes(content)
    again = train(service, tmp_path, **wide, cache_codec="none", cache_memory=0)
    check_same(reference, again)
    assert of_epochs(again[0], "feature_hits") == [SAMPLES - 1, SAMPLES, SAMPLES]


@pytest.mark.slow_except("5")
@pytest.mark.parametrize("split", [5, "auto"])
def test_auto_encodes_for_a_disk_that_is_slower_than_the_training(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: int | str
) -> None:
    monkeypatch.setattr(record_codec, "ENOUGH_BYTES", 1)
    monkeypatch.setattr(cache_folder, "measure_disk", lambda folder: DiskRates(100.0, 100.0))
    reference = train(service, None, split=split)
    found = train(service, tmp_path, split=split, cache="on", cache_memory=0)
    check_same(reference, found)
    (chosen,) = found[0]["cache"]["codecs"]
    assert chosen["codec"] in EXACT and len(chosen["measured"]) == len(EXACT)
    if split == "auto":
        facts = found[0]["plan"]["reuse"]["facts"]
        known = {at["cut"]: at["codecs"] for at in facts["codecs"]}
        assert sorted(known) == list(range(1, LAST + 1)) and all(map(len, known.values()))
        assert (facts["client"]["read"], facts["client"]["write"]) != (READ_RATE, WRITE_RATE)


def test_two_jobs_fill_one_key_in_turns(service: Service, tmp_path: Path) -> None:
    """Batch by batch, each in an order of its own and with its own codec."""

    settings = {**JOB, "split": 5, "cache_dir": str(tmp_path)}
    with open_session(
        service,
        **{
            **JOB,
            "cache": "off",
            "split": 5,
        },
    ) as plain:
        alone = dict(_by_id(plain, 0))
    with (
        open_session(service, **settings, seed=1, cache_codec="planes", cache_memory=0) as one,
        open_session(service, **settings, seed=2, cache_codec="zeros", cache_memory=0) as two,
    ):
        for epoch in (0, 1):
            for first, second in zip(one.epoch(epoch), two.epoch(epoch), strict=True):
                assert len(first[0]) == len(second[0])
        for session in (one, two):
            for sample, features in _by_id(session, 1):
                assert torch.equal(features, alone[sample])
            assert session.last.kept.hits == SAMPLES and session.last.traffic.requests == 0


def _by_id(session: Session, epoch: int, **given: Any) -> Iterator[tuple[int, torch.Tensor]]:
    with contextlib.closing(session.epoch(epoch, **given)) as stream:  # type: ignore[type-var]
        for ids, (features, _) in zip(session.batch_ids(epoch), stream, strict=True):
            yield from zip(ids.tolist(), features.clone(), strict=True)


def test_a_loop_that_changes_its_features_harms_no_other(service: Service, tmp_path: Path) -> None:
    settings = {**JOB, "cache_dir": str(tmp_path)}
    with open_session(service, **{**settings, "cache": "off"}) as plain:
        reference = dict(_by_id(plain, 1))
    with open_session(service, **settings) as session:
        for features, labels in session.epoch(0):
            features.zero_(), labels.zero_()
        assert all(torch.equal(f, reference[n]) for n, f in _by_id(session, 1))
        for features, _ in session.epoch(1):
            features.zero_()
        assert all(torch.equal(f, reference[n]) for n, f in _by_id(session, 1))


def test_features_that_are_no_numbers_are_never_kept() -> None:
    rows = filling.ComputedRows(np.arange(3), torch.tensor([[1.0], [torch.inf], [2.0]]), np.arange(3))
    found = filling.finite_rows(rows)
    assert (found.ids.tolist(), found.features.tolist(), found.labels.tolist()) == (
        [0, 2],
        [[1.0], [2.0]],
        [0, 2],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_left_out_for_one_value_and_for_no_large_sum(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    features = torch.zeros(7, 2, 40, dtype=dtype)
    features[1] = most  # a sum of these is infinite
    features[2, 1, 3], features[3, 0, 39], features[4, 1, 0] = torch.nan, -torch.inf, torch.inf
    features[4, 1, 1] = -torch.inf
    features[5, 0], features[5, 1] = most, -most
    features[6] = -0.0
    found = filling.finite_rows(filling.ComputedRows(np.arange(7), features, np.arange(7)))
    assert found.ids.tolist() == [0, 1, 5, 6]
    wanted = features[[0, 1, 5, 6]]
    assert torch.equal(found.features.view(torch.uint8), wanted.view(torch.uint8))


def test_whole_numbers_are_always_kept() -> None:
    rows = filling.ComputedRows(np.arange(2), torch.full((2, 3), 2**62), np.arange(2))
    assert filling.finite_rows(rows) is rows


@pytest.mark.slow
def test_a_random_transform_is_refused_and_trains_uncached(service: Service, tmp_path: Path) -> None:
    changes = {
        "split": 5,
        "augment": ("flip",),
        "dataset": "pictures",
        "image_size": 32,
        "bs": 16,
        "request_size": 16,
    }
    reference = train(service, None, **changes)
    found = train(service, tmp_path, **changes)
    check_same(reference, found)
    assert of_epochs(found[0], "feature_hits") == [0, 0, 0]
    assert found[0]["cache"]["why"].startswith("--augment flip draws anew")
    with pytest.raises(UsageError, match="--cache on: features cannot be kept: --augment flip"):
        train(service, tmp_path, **changes, cache="on")


@pytest.mark.slow
def test_one_epoch_reads_what_is_there_and_keeps_nothing(service: Service, tmp_path: Path) -> None:
    alone = train(service, tmp_path / "once", split=5, epochs=1)
    assert of_epochs(alone[0], "features_kept") == [0] and "once" in alone[0]["cache"]["why"]
    train(service, tmp_path / "twice", split=5, epochs=2)
    after = train(service, tmp_path / "twice", split=5, epochs=1)
    assert of_epochs(after[0], "feature_hits") == [SAMPLES]
    check_same(alone, after)
    kept = train(service, tmp_path / "on", split=5, epochs=1, cache="on")
    assert of_epochs(kept[0], "features_kept") == [SAMPLES]
