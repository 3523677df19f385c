"""Codecs tried on small samples of every cut, for plans about splits that no batch was asked for at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import open_session, pack_blobs, service_of

from hapi.cache.disk_rates import DiskRates
from hapi.client.loading import tried_codecs
from hapi.client.loading.tried_codecs import PART_BYTES, PARTS, TriedCodecs
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.codecs.measure import measure
from hapi.codecs.names import EXACT
from hapi.models.tensors import tensor_bytes
from hapi.profiler.reuse.choice import Crossing
from hapi.profiler.reuse.facts import RAW, CodecCost, ReuseFacts


def rectified(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.relu(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))
    return found.to(dtype)


def tried_at(cut: int, features: torch.Tensor, *wanted: str) -> TriedCodecs:
    tried = TriedCodecs(*wanted)
    tried.sample(cut, features)
    tried.measure()
    return tried


@pytest.mark.parametrize("shape", [(32, 64, 28, 28), (64, 500), (3, 64, 56, 56), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_tells_the_ratio_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    features = rectified(*shape, dtype=dtype)
    figures = tried_at(3, features, "auto").at(3, "auto", records=True)
    assert [found.name for found in figures] == list(EXACT)
    whole = measure([tensor_bytes(row) for row in features], features.element_size())
    if len(features) > 1:
        for found, true in zip(figures, whole, strict=True):
            assert found.ratio == pytest.approx(true.ratio, rel=0.05), found.name


def test_a_sample_is_small_and_of_places_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(tried_codecs, "measure", lambda parts, *_: seen.extend(parts) or ())
    channels = torch.arange(64.0).reshape(1, 64, 1, 1).expand(8, 64, 32, 32)
    tried_at(1, channels.contiguous(memory_format=torch.channels_last), "auto")
    assert len(seen) == PARTS and all(part.nbytes == PART_BYTES for part in seen)
    first = [torch.frombuffer(bytearray(part), dtype=torch.float32)[0].item() for part in seen]
    assert first == sorted(first) and first[0] == 0 and first[-1] == 48, "the last part is the sample's end"


def test_each_cut_is_tried_once_and_only_by_codecs_that_may_be_taken() -> None:
    tried = tried_at(2, rectified(4, 400), "planes", "fp16")
    tried.sample(2, torch.zeros(4, 400))
    tried.measure()
    assert tried.cuts == (2,) and [found.name for found in tried.at(2, "planes")] == ["planes"]
    assert tried.at(2, "planes")[0].ratio < 10, "the first sample counts"
    assert [found.name for found in tried.at(2, "fp16")] == ["fp16"] and tried.at(2, "none") == ()
    assert tried.at(9, "auto") == ()
    small = tried_at(1, rectified(64, 100), "auto")
    (of_parts, of_records) = (small.at(1, "planes", records=one_by_one)[0] for one_by_one in (False, True))
    assert of_parts.ratio > of_records.ratio, "a record of 400 bytes has little to compress"
    assert tried_at(2, rectified(4, 400, dtype=torch.bfloat16), "fp16").at(2, "fp16") == ()
    assert tried_at(2, rectified(4, 400), "none", "none").cuts == ()


def test_a_plan_may_choose_at_splits_that_were_not_met_and_requests_follow_it(tmp_path: Path) -> None:
    pack_blobs(tmp_path / "store")
    with (
        service_of(tmp_path / "store") as service,
        open_session(service, split=3) as session,
    ):
        job = replace(session.job_context.job(3), split=3)
    codecs = WireCodecs("auto", tried_at(3, rectified(8, *job.shape), "auto"))
    known = ReuseFacts(wire_codecs=codecs.costs()).wire_at(3)
    assert [one.name for one in known] == ["none", *EXACT], "raw as well"
    assert codecs.encoded(job).codec == "none", "before there is a plan"
    raw = Crossing(split=3)
    assert codecs.encoded(job, raw).codec == "none" == codecs.encoded(job, _by(known[1], 2)).codec
    assert ReuseFacts(wire_codecs=codecs.costs()).wire_at(3)[0] == RAW, "a later plan may still choose"
    assert codecs.encoded(job, _by(known[3], 3)).codec == "zeros+planes"
    (on,) = ReuseFacts(wire_codecs=codecs.costs()).wire_at(3)
    assert on.name == "zeros+planes" and on.ratio == known[3].ratio
    named = WireCodecs("planes", tried_at(3, rectified(8, *job.shape), "planes"))
    (on,) = ReuseFacts(wire_codecs=named.costs()).wire_at(3)
    assert on.name == "planes" and named.encoded(job, _by(known[3], 3)).codec == "planes"
    assert WireCodecs("none", tried_at(3, rectified(8, *job.shape), "auto")).costs() == ()


def _by(codec: CodecCost, split: int) -> Crossing:
    return Crossing(split=split, wire=codec)


@pytest.mark.slow
def test_a_profile_shows_the_codecs_of_every_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.cache.folder.measure_disk", lambda folder: DiskRates(1e9, 5e8))
    pack_blobs(tmp_path / "store", count=120)
    settings = {
        "split": "auto", "epochs": 2, "cache": "auto", "cache_dir": str(tmp_path / "cache"), "replan": "off",
    }  # fmt: skip
    with service_of(tmp_path / "store") as service, open_session(service, **settings) as session:
        for epoch in range(2):
            list(session.epoch(epoch))
        every = list(range(1, session.last_split + 1))
        assert sorted(at.cut for at in session.keeping.codecs()) == every
        assert [at.cut for at in session.codecs.costs()] == every
        rates = session.keeping.rates()
        assert rates.read is not None and rates.write is not None
