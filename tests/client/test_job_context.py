"""From settings to something that can run: wrong ones are refused in a line that says what, where and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_job import COUNT, open_session, over_slow_store, pack_blobs, service_of

from hapi.client.dataset_choice import choose_dataset, transform_of
from hapi.client.session import Session
from hapi.client.settings import DataSettings, SessionSettings, default_store
from hapi.client.transport.server_pool import ServerPool
from hapi.data.epoch_order import FULL, Shuffle
from hapi.errors import BadRequestError, HapiError, ModelError, NotFoundError, UsageError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.messages import DatasetDescription
from hapi.wire.references import DatasetReference, TransformSpec
from hapi.wire.transport.http import LoopbackTransport


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "store"
    pack_blobs(folder)
    pack_blobs(folder, "small", count=3, classes=3, side=8)
    return folder


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as running:
        yield running


def pool_of(*answers: Any) -> ServerPool:
    """Servers that answer every request with these documents, one each."""

    def handler(document: Any) -> Any:
        return lambda method, path, body: (200, {}, iter([json.dumps(document).encode()]))

    return ServerPool([LoopbackTransport(handler(a)) for a in answers])


@pytest.mark.slow_cases("{'model': 'inception_v3'}--")
@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"dataset": None}, UsageError, "several datasets, choose one with --dataset: blobs, small"),
        ({"dataset": "blob"}, NotFoundError, "no dataset 'blob'.*blobs"),
        ({"dataset": "../blobs"}, UsageError, "--dataset: '../blobs' is not a name"),
        ({"dataset": ""}, UsageError, "--dataset"),
        (
            {"shuffle": "windows"},
            UsageError,
            r"--shuffle: expected 'auto', 'full' or 'chunks\[.*got 'windows'",
        ),
        ({"shuffle": "chunks:4:0"}, UsageError, "--shuffle chunks:4:0: group and window are integers from 1"),
        ({"trainer": 1}, UsageError, "--trainer 1: trainers are numbered from 0, below --trainers 1"),
        ({"model": "resnet19"}, ModelError, "unknown architecture 'resnet19'; did you mean resnet18"),
        ({"model": "store:x"}, NotFoundError, "no model 'x'"),
        ({"model": "store:../x"}, UsageError, "--model: '../x' is not a name"),
        ({"model": "os:system"}, ModelError, "os:system"),
        ({"model": "math:pi"}, ModelError, "math:pi"),
        ({"model": "inception_v3"}, ModelError, "cannot run on samples of shape 3x32x32"),
        ({"model": "resnet18", "weights": "IMAGENET1K_V9"}, ModelError, "no weights 'IMAGENET1K_V9'; it has"),
        ({"weights": "/nowhere.pth"}, ModelError, "/nowhere.pth does not exist"),
        ({"blocks": ("nope",)}, ModelError, "'nope'"),
        ({"freeze": 15}, UsageError, "--freeze: layer 15 is out of range: ThinResNet has layers 1 to 14"),
        ({"freeze": "layer4.9"}, UsageError, "--freeze: .*no layer 'layer4.9'; did you mean 'layer4.1'"),
        ({"freeze": 14}, UsageError, "--freeze 14: no layer after it has parameters"),
        ({"freeze": "fc"}, UsageError, "--freeze 14: no layer after it has parameters"),
        ({"split": -1}, UsageError, "--split: layer -1 is out of range"),
        ({"split": 14}, UsageError, r"--split 14: layer 14 comes after the freeze \(12\).*choose 0 to 13"),
        ({"split": "best"}, UsageError, "--split: ThinResNet has no layer 'best'"),
        ({"validation": 0.0}, UsageError, "--validation 0.0: expected a share"),
        ({"validation": 1}, UsageError, "--validation 1.0: expected a share"),
        ({"validation": 0.001}, UsageError, "leaves samples on both sides"),
        ({"validation": "none"}, NotFoundError, "no dataset 'none'"),
        ({"validation": "small"}, HapiError, "'small' gives inputs of"),
        ({"device": "gpu"}, UsageError, "--device 'gpu'"),
        ({"bs": 0}, UsageError, "bs"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_settings(service: Service, changes: dict[str, Any], kind: type[HapiError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        open_session(service, **changes)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("changes", "freeze", "split"),
    [
        ({}, 12, 12), ({"model": "resnet18", "freeze": None}, 11, 11), ({"freeze": "layer2.1", "split": "min"}, 8, 7),
        ({"split": "none"}, 12, 0),
        ({"freeze": 0}, 0, 0), ({"split": "5"}, 12, 5), ({"split": "conv1"}, 12, 1), ({"split": 13}, 12, 13),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_chosen(service: Service, changes: dict[str, Any], freeze: int, split: int) -> None:
    with open_session(service, **changes) as session:
        assert session.job_context.freeze == freeze
        if changes.get("split") == "min":
            sizes = session.job_context.model.output_bytes()
            assert sizes[session.split] == min(sizes[1 : freeze + 1])
        else:
            assert session.split == split
        assert sum(len(ids) for ids in session.batch_ids(0)) == COUNT


def test_windows_that_suit_the_servers_store_are_told_to_it(service: Service) -> None:
    with open_session(service, shuffle="chunks", seed=7, validation=0.25, split=5) as session:
        job_context = session.job_context
        description = job_context.description
        assert job_context.order.shuffle == Shuffle(description.group, description.window)
        asked = {"seed": 7, "epoch": 3, "group": description.group, "window": description.window}
        ids = job_context.training_ids
        assert job_context.job(5).at(7, 3).request(ids)["windows"] == asked
        assert "windows" not in job_context.job(5, validation=True).at(7, 3).request(ids)
    with open_session(service, shuffle="full", split=0) as session:
        assert "windows" not in session.job_context.job(0).request(session.job_context.training_ids)


def test_the_default_order_suits_the_servers_store(service: Service) -> None:
    with open_session(service, split=0) as session:
        assert session.job_context.order.shuffle == FULL
    with open_session(over_slow_store(loopback_handler(service)), split=0) as session:
        job_context = session.job_context
        windows = Shuffle(job_context.description.group, job_context.description.window)
        assert job_context.order.shuffle == windows
        assert "windows" in job_context.job(0).request(job_context.training_ids)
        job_context.keep_shuffle(FULL)
        assert "windows" not in job_context.job(0).request(job_context.training_ids)
    with open_session(over_slow_store(loopback_handler(service)), split=0, shuffle="full") as session:
        assert session.job_context.order.shuffle == FULL


def test_an_image_size_keeps_the_data_sets_normalisation() -> None:
    own = TransformSpec(resize=40, crop=32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1))
    reference = DatasetReference(name="x", version="0" * 16)
    description = DatasetDescription(
        reference=reference,
        count=1,
        classes=("a",),
        total_bytes=1,
        layout={},
        transform=own,
        group=1,
        window=1,
        prefers_chunks=False,
    )
    assert transform_of(DataSettings(), description.transform) == own
    expected = TransformSpec(resize=64, crop=56, mean=own.mean, std=own.std)
    assert transform_of(DataSettings(image_size=56), description.transform) == expected


@pytest.mark.parametrize(
    "document",
    [[], {}, None, 3, {"datasets": 5}, {"datasets": [5]}, {"datasets": [{}]}, {"datasets": {"a": 1}}],
)
def test_lists_of_another_form(document: Any) -> None:
    with pytest.raises(BadRequestError, match="another form than agreed; is this a hapi-server"):
        choose_dataset(pool_of(document), None)


@pytest.mark.parametrize("document", [[], {}, None, {"reference": {}}, "x"])
def test_descriptions_of_another_form(document: Any) -> None:
    with pytest.raises(BadRequestError):
        choose_dataset(pool_of(document), "x")


def test_names_from_the_server_are_checked() -> None:
    with pytest.raises(HapiError, match="is not a name") as caught:
        choose_dataset(pool_of({"datasets": [{"name": "\x1b[2Jx"}, {"name": "b"}]}), None)
    assert str(caught.value).isprintable()


def test_a_store_without_data_sets() -> None:
    with pytest.raises(UsageError, match="no dataset; make one with 'hapi pack"):
        choose_dataset(pool_of({"datasets": []}), None)


def test_a_failure_closes_what_was_opened(service: Service) -> None:
    transport = LoopbackTransport(loopback_handler(service))
    with pytest.raises(UsageError):
        Session.open(SessionSettings(dataset="blobs", weights="random", split=99), transports=[transport])
    with pytest.raises(HapiError, match="closed"):
        transport.call("GET", "/v1")


def test_the_default_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_store() == f"{tmp_path}/hapi/store"
    with pytest.raises(UsageError, match=rf"no dataset in the store '{tmp_path}/hapi/store'; make one with"):
        Session.open(SessionSettings())


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"model": "resnet18"}, []),
        ({"model": "timm:resnet18"}, []),
        ({"model": "mynet:make"}, ["mynet:make"]),
        ({"model": "store:x", "allow_model": ("mynet:make", "other")}, ["mynet:make", "other"]),
    ],
    ids=str,
)
def test_what_the_embedded_server_may_import(
    store: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], allowed: list[str]
) -> None:
    def started(store: str, *, allow_models: list[str], threads: int, meanwhile: object) -> None:
        raise HapiError(f"allowed: {allow_models}")

    monkeypatch.setattr("hapi.client.connect.EmbeddedServer", started)
    monkeypatch.setattr("hapi.client.session.check_names", lambda settings: None)
    with pytest.raises(HapiError, match=re.escape(f"allowed: {allowed}")):
        Session.open(SessionSettings(store=str(store), threads=1, **changes))
