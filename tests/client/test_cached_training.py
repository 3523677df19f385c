"""Training with a sample cache: the same to the bit, with less over the wire, whatever the cache has or loses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.harness import of_epochs
from support.local_job import COUNT, Silent, open_session, pack_blobs, service_of

from hapi.cache import catalog as cache_catalogue
from hapi.cache.folder import CacheFolder
from hapi.errors import UsageError
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.server.service import Service
from hapi.store.open import open_store
from hapi.train.trainer import Trainer

CASES: dict[str, dict[str, Any]] = {
    "tensors": {"dataset": "blobs", "validation": 0.2},
    "pictures": {"dataset": "pictures", "image_size": 32, "augment": ("crop-flip",), "validation": "held"},
    "auto": {"dataset": "pictures", "image_size": 32, "split": "auto", "epochs": 3},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("cached") / "store"
    pack_blobs(store)
    random = np.random.default_rng(1)
    for name, count in (("pictures", COUNT), ("held", 9)):
        folder = store.parent / name
        for number in range(count):
            path = folder / f"c{number % 4}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 255, (36 + number % 5, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        pack(open_source(str(folder)), open_store(str(store)), name)
    with service_of(store) as running:
        yield running


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)


def train(service: Service, case: str, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    settings = {"split": 0, "epochs": 2, **CASES[case], **changes}
    with open_session(service, **settings) as session:
        session.keeping.fills = False  # with features, nobody would ask for the samples again
        report = Trainer(session, callbacks=[Silent()]).run()
        return report, {k: v.clone() for k, v in session.trained.state_dict().items()}


@pytest.fixture(scope="module", params=["tensors", "pictures"])
def plain(request: pytest.FixtureRequest, service: Service) -> tuple[str, Any, Any]:
    return request.param, *train(service, request.param)


def check_same(plain: tuple[str, Any, Any], report: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    _, reference, kept = plain
    for name in ("loss", "accuracy", "samples", "validation_loss", "validation_accuracy"):
        assert [e.get(name) for e in report["epochs"]] == [e.get(name) for e in reference["epochs"]], name
    assert weights.keys() == kept.keys()
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


@pytest.mark.slow_except("tensors")
def test_what_was_there_once_does_not_cross_again(
    plain: tuple[str, Any, Any], service: Service, tmp_path: Path
) -> None:
    case, reference, _ = plain
    samples, bytes_before = of_epochs(reference, "samples")[0], of_epochs(reference, "bytes_received")[0]
    assert of_epochs(reference, "cached_samples") == [0, 0]
    report, weights = train(service, case, cache="auto", cache_dir=str(tmp_path / "cache"))
    check_same(plain, report, weights)
    assert of_epochs(report, "bytes_received") == [bytes_before, 0]
    assert of_epochs(report, "cached_samples") == [0, samples] and of_epochs(report, "requests")[1] == 0
    stored = of_epochs(report, "cached_bytes")[1]
    assert 0.8 * bytes_before < stored < bytes_before
    again, weights = train(service, case, cache="auto", cache_dir=str(tmp_path / "cache"))
    check_same(plain, again, weights)
    assert of_epochs(again, "bytes_received") == [0, 0]


@pytest.mark.slow_except("tensors")
def test_a_cache_for_a_part_of_the_samples(
    plain: tuple[str, Any, Any], service: Service, tmp_path: Path
) -> None:
    case, folder = plain[0], tmp_path / "cache"
    CacheFolder.open(folder, 1)
    with open_session(service, **{**CASES[case], "split": 0}) as session:
        description = session.job_context.description
    budget = description.total_bytes // 2
    # Less than a person may give, so not by the setting.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hapi.cache.open_folder.CacheFolder.open", lambda *_: CacheFolder(folder, budget))
        report, weights = train(service, case, cache="auto", cache_dir=str(folder))
    check_same(plain, report, weights)
    before, after = of_epochs(report, "bytes_received")
    cached = of_epochs(report, "cached_samples")
    held = [path.stat().st_size for path in folder.glob("*@*/segment-*")]
    assert cached[0] == 0 and 0.25 * COUNT < cached[1] < 0.55 * COUNT
    assert 0.35 * before < after < 0.75 * before
    assert sum(held) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_cache_that_is_damaged_meanwhile(
    plain: tuple[str, Any, Any], service: Service, tmp_path: Path, damage: str
) -> None:
    case, folder = plain[0], tmp_path / "cache"

    class Vandal(Silent):
        def on_step(self, steps: int) -> None:
            for path in folder.glob("*@*/*-*") if steps % 3 == 2 else ():
                with contextlib.suppress(FileNotFoundError):  # the cache may just have removed or renamed it
                    self.harm(path)

        def harm(self, path: Path) -> None:
            if damage == "gone":
                path.unlink()
                return
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 64
            path.write_bytes(data[: -len(data) // 2] if damage == "cut" else data)

    settings = {"split": 0, "epochs": 2, **CASES[case], "cache": "auto", "cache_dir": str(folder)}
    with open_session(service, **settings) as session:
        session.keeping.fills = False
        report = Trainer(session, callbacks=[Vandal()]).run()
        weights = {k: v.clone() for k, v in session.trained.state_dict().items()}
    check_same(plain, report, weights)


@pytest.mark.slow
def test_two_sessions_at_a_time(service: Service, tmp_path: Path) -> None:
    """Batch by batch in turns, each in an order of its own."""
    settings = {**CASES["pictures"], "split": 0, "cache": "auto", "cache_dir": str(tmp_path / "cache")}

    def epoch_of(seed: int, **changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with open_session(service, **{**settings, "seed": seed, **changes}) as session:
            return [(f.clone(), t.clone()) for f, t in session.epoch(0)]

    alone = [epoch_of(seed, cache="off") for seed in (1, 2)]
    with open_session(service, **settings, seed=1) as one, open_session(service, **settings, seed=2) as two:
        for first, second in zip(one.epoch(0), two.epoch(0), strict=True):
            for (features, labels), (wanted, wanted_labels) in zip(
                (first, second), (alone[0].pop(0), alone[1].pop(0)), strict=True
            ):
                assert torch.equal(features, wanted) and torch.equal(labels, wanted_labels)
        for _ in one.epoch(1):
            pass
        assert one.last.traffic.bytes_received == 0 and one.last.traffic.cached_samples == COUNT
    assert not list((tmp_path / "cache").glob("*@*/open-*"))


def test_a_wrong_folder_is_told_before_anything_else(service: Service, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"^--cache-dir .*: has other files in it"):
        open_session(service, split=0, cache="auto", cache_dir=str(tmp_path))


# -- what a plan knows of it -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_planned_run_is_the_same_and_counts_on_the_cache(service: Service, tmp_path: Path) -> None:
    reference, weights = train(service, "auto")
    report, cached = train(service, "auto", cache="auto", cache_dir=str(tmp_path / "cache"))
    assert of_epochs(report, "samples") == of_epochs(reference, "samples") == [COUNT] * 3
    assert of_epochs(report, "loss") == pytest.approx(of_epochs(reference, "loss"), rel=1e-3)
    assert weights.keys() == cached.keys()
    at_zero = dict(report["epochs"][0]["splits"]).get(0, 0)
    assert at_zero > 0
    kept = {one["cut"]: one["share"] for one in report["plan"]["reuse"]["facts"]["client_kept"]}
    assert kept[0] > 0 and "reuse" not in reference["plan"]
