"""Tests of the keys of a run's features: what is refused, and with which words."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.local_job import open_session, pack_blobs, pack_pictures, service_of
from support.thin_resnet import THIN_FEATURES
from torch import nn

from hapi.cache.code_version import code_version
from hapi.cache.feature_key import FeatureKey
from hapi.client.caching.code_watch import CodeWatch
from hapi.client.caching.keys import (
    Refusal,
    ServerCode,
    codes_of,
    feature_key,
    joined_code,
    server_codes,
    view_of,
)
from hapi.client.session import Session
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import TransportError, UsageError
from hapi.ingest.in_place.discover import find_folder
from hapi.ingest.in_place.indexer import IndexOptions, index_folder
from hapi.models.devices import changed_arithmetic
from hapi.models.graph.layers import layered
from hapi.server.service import Service
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec
from hapi.wire.transport.http import LoopbackTransport

TYPED_IN = """
from torch import nn

class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""
PICTURES: dict[str, Any] = {"dataset": "pictures", "image_size": 32, "split": "freeze"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("keys") / "store"
    pack_blobs(store)
    pack_blobs(store, "held", count=8)
    pack_pictures(store, count=24)
    with service_of(store) as running:
        yield running


def key_of(session: Session, cut: int | None = None, **options: Any) -> FeatureKey | Refusal:
    job_context = session.job_context
    at = job_context.last_split if cut is None else cut
    return feature_key(job_context, at, codes=codes_of(job_context), **options)


def test_a_key_of_a_run(service: Service) -> None:
    with open_session(service) as session:
        job_context, key = session.job_context, key_of(session)
        assert isinstance(key, FeatureKey)
        assert key.dataset == job_context.description.reference
        assert (key.cut, key.shape, key.dtype, key.precision) == (13, (THIN_FEATURES,), "float32", "fp32")
        assert key.prefix == job_context.prefix_digests[13] and key.code == code_version()
        assert key_of(session) == key
        digests = {getattr(key_of(session, cut), "digest") for cut in range(14)}  # noqa: B009
        assert len(digests) == 14


def test_arithmetic_that_a_loop_of_ones_own_has_changed_is_in_the_key(service: Service) -> None:
    changes: list[tuple[Callable[[Any], object], list[Any], Any]] = [
        (torch.set_float32_matmul_precision, ["high", "medium"], "highest"),
        (torch.set_flush_denormal, [True], False),
        (partial(setattr, torch.backends.mkldnn, "enabled"), [False], True),
        (torch.set_default_dtype, [torch.float64, torch.bfloat16], torch.float32),
        (torch.backends.cuda.enable_flash_sdp, [False], True),
        (torch.backends.cuda.enable_mem_efficient_sdp, [False], True),
        (torch.backends.cuda.enable_math_sdp, [False], True),
        (torch.backends.mha.set_fastpath_enabled, [False], True),
    ]
    with open_session(service) as session:
        usual = key_of(session)
        for change, values, before in changes:
            try:
                for value in values:
                    change(value)
                    assert changed_arithmetic(torch.device("cpu")) and key_of(session) != usual, value
            finally:
                change(before)
            assert key_of(session) == usual and not changed_arithmetic(torch.device("cpu"))


@pytest.mark.slow_except("on")
@pytest.mark.parametrize("cache", ["on", "off"])
def test_features_are_the_same_inside_of_a_callers_autocast(
    service: Service, tmp_path: Path, cache: str
) -> None:
    """Layers 3 to 13 run here."""
    found = []
    for number, dtype in enumerate((None, torch.bfloat16)):
        folder = str(tmp_path / str(number))
        with open_session(service, split=2, epochs=2, cache=cache, cache_dir=folder) as session:
            for epoch in (0, 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                    found.append([features.clone() for features, _ in session.epoch(epoch)])
    plain, inside = found[:2], found[2:]
    for expected, got in zip(plain, inside, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_what_is_trained_is_refused_by_name(service: Service) -> None:
    with open_session(service) as session:
        assert str(key_of(session, 14)) == (
            "layer 14 (fc) is trained, so what comes after it differs from epoch to epoch"
        )


def test_what_is_drawn_anew_is_refused_by_name(service: Service) -> None:
    with open_session(service, **PICTURES, augment=("imagenet",), validation=0.2) as session:
        refusal = key_of(session)
        assert str(refusal).startswith("--augment resized-crop,flip draws anew in each epoch")
        assert isinstance(key_of(session, validation=True), FeatureKey), "held-out samples are not augmented"


def test_views_have_keys_of_their_own(service: Service) -> None:
    with open_session(service, **PICTURES, augment=("flip",), augment_views=2, seed=5) as session:
        keys = [key_of(session, view=view_of(session.job_context, epoch)) for epoch in range(4)]
        first, second = (key for key in keys[:2] if isinstance(key, FeatureKey))
        assert keys == [first, second, first, second] and first.digest != second.digest
        assert first.transform is not None and first.transform.draw is not None
        assert (first.transform.draw.seed, first.transform.draw.epoch) == (5, 0)
        jobs = [session.job_context.job(12).at(5, epoch).transform for epoch in range(4)]
        assert jobs == [key.transform for key in keys if isinstance(key, FeatureKey)]


def test_views_without_random_transforms_are_refused(service: Service) -> None:
    with pytest.raises(UsageError, match=r"--augment-views 3: nothing is drawn without --augment; "):
        open_session(service, augment_views=3)


def test_one_view_is_the_same_in_every_epoch(service: Service) -> None:
    for views, reusable in ((1, True), (2, False), (None, False)):
        with open_session(service, **PICTURES, augment=("flip",), augment_views=views) as session:
            assert session.reusable is reusable


def answering(*documents: Any) -> ServerPool:
    def handler(document: Any) -> Any:
        return lambda method, path, body: (200, {}, iter([json.dumps(document).encode()]))

    return ServerPool([LoopbackTransport(handler(d), f"server{n}") for n, d in enumerate(documents)])


def test_every_server_tells_its_code() -> None:
    mine, other = code_version(), "0" * 16
    found = server_codes(answering({"code": mine}, {"code": other}, {"hapi": "1.0"}, {"code": "?"}, []))
    assert [server.code for server in found] == [mine, other, None, None, None]
    assert joined_code([other, mine]) == joined_code([mine, other, mine]) == "+".join(sorted({mine, other}))


def test_one_server_of_several_is_not_waited_for(service: Service) -> None:
    def gone(method: str, path: str, body: bytes) -> Any:
        raise TransportError("no route")

    there = LoopbackTransport(
        lambda *asked: (200, {}, iter([b'{"code": "' + b"a" * 16 + b'"}'])), "http://there"
    )
    pool = ServerPool([there, LoopbackTransport(gone, "http://gone")])
    codes = server_codes(pool)
    pool.close()
    assert codes == (ServerCode("http://there", "a" * 16), ServerCode("http://gone", None, silent=True))
    with open_session(service) as session:
        key = feature_key(session.job_context, 13, codes=codes)
        assert key == feature_key(session.job_context, 13, codes=codes[:1]), "it computes nothing now"
        refusal = feature_key(session.job_context, 13, codes=codes[1:])
        assert str(refusal).startswith("http://gone does not answer")
        older = ServerCode("http://old", None)
        assert str(feature_key(session.job_context, 13, codes=[*codes, older])).startswith("http://old is of")


def test_features_of_a_server_that_comes_back_are_kept_if_its_code_is_known(service: Service) -> None:
    known = ServerCode("http://there", "a" * 16), ServerCode("http://gone", None, silent=True)
    for code, changed in (("a" * 16, False), ("b" * 16, True), (None, True)):
        watch = CodeWatch()
        watch.expect(server.code for server in known if not server.silent)
        watch.answered("http://gone", code)
        assert watch.changed is changed


def test_servers_that_tell_no_code_are_refused(service: Service) -> None:
    with open_session(service) as session:
        codes = [ServerCode("http://new", code_version()), ServerCode("http://old", None)]
        refusal = feature_key(session.job_context, 13, codes=codes)
        assert "http://old is of an older hapi" in str(refusal)


def test_what_crosses_behind_the_cut_is_rounded_at_the_cut(service: Service) -> None:
    with open_session(service, split=10, wire_codec="int8") as session:
        keys = [key_of(session, cut) for cut in (4, 10, 13)]
        assert [isinstance(key, FeatureKey) and key.rounding for key in keys] == [
            ("int8", 4), ("int8", 10), ("int8", 10),
        ]  # fmt: skip


@pytest.mark.parametrize(("edited", "validation"), [("blobs", False), ("held", True)])
def test_edited_files_count_for_the_keys_of_their_own_dataset(
    service: Service, edited: str, validation: bool
) -> None:
    with open_session(service, validation="held") as session:
        job_context = session.job_context
        codes = [replace(one, changed=(edited,)) for one in codes_of(job_context)]
        for of_held_out in (False, True):
            found = feature_key(job_context, 13, codes=codes, validation=of_held_out)
            assert isinstance(found, Refusal if of_held_out is validation else FeatureKey)


def test_code_whose_source_cannot_be_read_is_refused_by_name(service: Service) -> None:
    space: dict[str, Any] = {"__name__": "typed_in"}
    exec(TYPED_IN, space)
    with open_session(service) as session:
        job_context = copy.copy(session.job_context)
        job_context.model = layered(nn.Sequential(nn.Linear(6, 6), space["Gate"](), nn.Linear(6, 2)), (6,))
        codes = codes_of(job_context)
        assert isinstance(feature_key(job_context, 1, codes=codes), FeatureKey)
        assert str(feature_key(job_context, 2, codes=codes)).startswith(
            "layer 2 (1) runs typed_in.Gate, whose source"
        )


def test_files_edited_under_their_names_are_not_served(tmp_path: Path) -> None:
    """Without another indexing, though size and times are as they were."""
    store = tmp_path / "store"
    for number in range(12):
        path = store / f"photos/c{number % 4}/{number}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (36, 36), (number, 0, 0)).save(path)
    options = IndexOptions(transform=TransformSpec.for_image_size(32))
    opened = open_store(str(store))
    index_folder(opened, "photos", find_folder(opened, "photos"), options)
    with service_of(store) as running:
        with open_session(running, dataset="photos") as session:
            assert isinstance(key_of(session), FeatureKey)
        before, edited = path.stat(), bytearray(path.read_bytes())
        edited[-1] ^= 1
        path.write_bytes(edited)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with open_session(running, dataset="photos") as session:
            assert str(key_of(session)) == (
                "files of dataset 'photos' at loopback: changed or moved since they were indexed; "
                "index it again with --replace"
            )
