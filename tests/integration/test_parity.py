"""The result never changes: split training equals a plain PyTorch loop that uses none of Hapi's code.

``plain.py`` beside this file has the loop. Stated tolerances, fp32 on a CPU: losses of three epochs within 1e-4
relative, the first step's gradients within 1e-5 relative (as vectors, per parameter).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.plain import (
    FAMILIES,
    Family,
    Result,
    check_equal,
    check_features,
    family,
    open_session,
    order_of,
    packed_digits,
    plain_training,
    split_training,
)
from torch import nn

from hapi.client.session import Session
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo import build as zoo
from hapi.models.zoo.architectures import Architecture, build_module
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store

OTHERS = [
    family("mobilenet_v2", "classifier.1", ("features.18", "classifier.1"), 0),
    family("squeezenet1_1", "classifier.1", ("classifier.1",), 0, size=64),
    family("efficientnet_b0", "classifier.1", ("classifier.1",), 0),
    family("regnet_y_400mf", "fc", ("fc",), 0),
    family("swin_t", "head", ("norm", "head"), 0),
    family("convnext_tiny", "classifier.2", ("classifier.0", "classifier.2"), 0),
]
OTHER_FREEZE = {
    "mobilenet_v2": "features.17.conv.3", "squeezenet1_1": "features.12.cat", "efficientnet_b0": "flatten",
    "regnet_y_400mf": "flatten", "swin_t": "features.7.1.add_1", "convnext_tiny": "avgpool",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family's model is traced and initialised once on each side for all its splits, then copied."""
    build = lru_cache(maxsize=1)(zoo.build)

    def copied(spec: zoo.ModelSpec, *, allow_import: bool) -> LayeredModel:
        kept = build(spec, allow_import=allow_import)
        return kept.over(copy.deepcopy(kept.module))

    modules: dict[tuple[str, int], nn.Module] = {}

    def copied_module(architecture: Architecture, seed: int) -> nn.Module:
        key = (architecture.name, seed)
        if key not in modules:
            modules.clear()
            modules[key] = build_module(architecture, seed)
        return copy.deepcopy(modules[key])

    monkeypatch.setattr("hapi.client.models.build_network", copied)
    monkeypatch.setattr("hapi.repository.built.build_module", copied_module)


@pytest.fixture
def service(store: Path) -> Iterator[Service]:
    settings = ServerSettings(store=str(store), cos_batch=3, threads=1, device="cpu")
    running = Service(settings, open_store(str(store)))
    yield running
    running.close()


def marked(small: tuple[str, ...]) -> list[Any]:
    """The paper's families as parameters; all but ``small`` ones are long."""
    return [pytest.param(f, marks=() if f.name in small else pytest.mark.long, id=f.name) for f in FAMILIES]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("f", marked(("resnet18",)))
def test_every_split_of_the_papers_families(service: Service, store: Path, f: Family) -> None:
    plain: Result | None = None
    for split in range(f.freeze + 1):
        with open_session(service, f, split, f.freeze) as session:
            assert session.job_context.freeze == f.freeze
            if plain is None:
                plain = plain_training(f, order_of(session, store))
            check_features(session, plain, f"{f.name} split {split}")
            check_equal(split_training(session), plain, f"{f.name} split {split}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.long_except("alexnet")
@pytest.mark.parametrize(
    "f", [f for f in FAMILIES if f.name not in ("resnet18", "vgg11", "vgg19")], ids=lambda f: f.name
)
def test_features_of_every_split_and_training_at_some(service: Service, store: Path, f: Family) -> None:
    """One session, which copies the weights once, has every split's features."""
    plain: Result | None = None
    for split in (0, f.freeze // 2, f.freeze):
        with open_session(service, f, split, f.freeze) as session:
            if plain is None:
                plain = plain_training(f, order_of(session, store))
            check_equal(split_training(session), plain, f"{f.name} split {split}")
    assert plain is not None
    with open_session(service, f, "auto", f.freeze) as session:
        for split in range(f.freeze + 1):
            check_features(session, plain, f"{f.name} split {split}", split)


@pytest.mark.slow
@pytest.mark.long_except("squeezenet1_1", "efficientnet_b0")
@pytest.mark.parametrize("f", OTHERS, ids=lambda f: f.name)
def test_other_models_at_some_splits(service: Service, store: Path, f: Family) -> None:
    plain: Result | None = None
    splits: list[int] | None = None
    while splits is None or splits:
        split = 0 if splits is None else splits.pop()
        with open_session(service, f, split, OTHER_FREEZE[f.name]) as session:
            if plain is None:
                freeze = session.job_context.freeze
                splits = [freeze, freeze // 2, freeze // 3, 1]
                plain = plain_training(f, order_of(session, store))
            check_equal(split_training(session), plain, f"{f.name} split {split}")


def with_changes(session: Session, freeze: int) -> Session:
    """Each batch at another split, by turns early and late, in the middle of epochs too."""
    splits = [[freeze, 0], [freeze // 2, freeze], [1, freeze // 3]]
    epoch = session.epoch
    session.epoch = lambda e: epoch(e, split_of=lambda n: min(splits[e][n], freeze))  # type: ignore[method-assign]
    return session


@pytest.mark.slow
@pytest.mark.parametrize("f", marked(("resnet18", "densenet121")))
def test_splits_that_change_in_the_middle_of_epochs(service: Service, store: Path, f: Family) -> None:
    with open_session(service, f, "auto", f.freeze) as session:
        plain = plain_training(f, order_of(session, store))
        check_equal(split_training(with_changes(session, f.freeze)), plain, f"{f.name} with changes")


@pytest.mark.slow
def test_one_model_with_changes_fast(service: Service, store: Path) -> None:
    f = FAMILIES[1]
    with open_session(service, f, "auto", f.freeze) as session:
        plain = plain_training(f, order_of(session, store))
        check_equal(split_training(with_changes(session, f.freeze)), plain, "resnet18 with changes")


def test_one_model_fast(service: Service, store: Path) -> None:
    f = FAMILIES[1]
    with open_session(service, f, 4, f.freeze) as session:
        plain = plain_training(f, order_of(session, store))
        check_equal(split_training(session), plain, "resnet18 split 4")


@pytest.mark.slow
def test_a_cut_past_the_freeze_is_exact(service: Service, store: Path) -> None:
    """SqueezeNet frozen before its last pooling: that may run on the server too, and shrinks what is sent."""
    f = family(
        "squeezenet1_1",
        "classifier.1",
        ("features.9", "features.10", "features.11", "features.12", "classifier.1"),
        0,
        "features.7",
        size=64,
    )
    with open_session(service, f, "features.8", "features.7.cat") as session:
        model = session.job_context.model
        assert session.last_split == model.resolve("features.8") == session.job_context.freeze + 1
        plain = plain_training(f, order_of(session, store))
        check_features(session, plain, "squeezenet1_1 split features.8")
        check_equal(split_training(session), plain, "squeezenet1_1 split features.8")
