"""``--wire-codec``: the same losses in fewer bytes, rounded only where that was asked for, raw from older servers."""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.certificates import self_signed
from support.http_tools import served
from support.local_job import ALLOWED, Silent, open_session, pack_blobs, service_of, settings_of, trainer_of

from hapi.client.loading import wire_codecs
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.session import Session
from hapi.codecs.choose import CodecFigures
from hapi.codecs.names import EXACT, LOSSY
from hapi.errors import BadRequestError, UsageError, WireError
from hapi.profiler.reuse.facts import MOST_RATE, RAW, ReuseFacts
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.checkpoints.resuming import identity_of

SPLIT = 3
"""After a ReLU: half of the features are zeros."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("codec") / "store"
    pack_blobs(store)
    return store


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as running:
        yield running


def epoch_of(session: Session) -> list[torch.Tensor]:
    return [features.clone() for features, _ in session.epoch(0)]


def losses(session: Session, **changes: Any) -> list[float]:
    return [epoch["loss"] for epoch in trainer_of(session, Silent(), **changes).run()["epochs"]]


@pytest.mark.slow
def test_losses_are_those_of_raw_features_in_fewer_bytes(store: Path) -> None:
    found: dict[str, tuple[list[float], int]] = {}
    with served(store, cos_batch=4, threads=1, allow_model=ALLOWED) as server:
        for codec in ("none", *EXACT):
            changes = {"split": SPLIT, "wire_codec": codec, "server": (f"http://127.0.0.1:{server.port}",)}
            with Session.open(settings_of(**changes)) as session:
                found[codec] = losses(session, **changes), session.last.traffic.bytes_received
    for codec in EXACT:
        assert found[codec][0] == found["none"][0]
        assert found[codec][1] < 0.9 * found["none"][1]


@pytest.mark.slow
def test_encoded_features_come_over_tls(store: Path, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with served(store, tls=tls, cos_batch=4, threads=1, allow_model=ALLOWED) as server:
        network = {"server": (f"https://127.0.0.1:{server.port}",), "ca_file": str(cert), "split": SPLIT}
        found = {}
        for codec in ("none", *EXACT, "int8"):
            with Session.open(settings_of(**network, wire_codec=codec)) as session:
                found[codec] = epoch_of(session), session.last.traffic.bytes_received
    for codec in EXACT:
        assert all(torch.equal(a, b) for a, b in zip(found[codec][0], found["none"][0], strict=True))
        assert found[codec][1] < 0.9 * found["none"][1]
    assert found["int8"][1] < 0.3 * found["none"][1]


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("codec", LOSSY)
def test_rounded_features_come_close_and_are_told(service: Service, codec: str) -> None:
    with open_session(service, split=SPLIT) as session:
        exact = epoch_of(session)
    with open_session(service, split=SPLIT, wire_codec=codec, recheck=3) as session:
        found = epoch_of(session)
        assert session.recheck is not None and session.recheck.compared >= 3
        assert session.codecs.to_json()["exact"] is False
        assert session.job_context.wire_rounding == codec
        identity = identity_of(session.settings, settings_of(), session.job_context)
        assert identity["rounding on the wire"] == codec
    for a, b in zip(found, exact, strict=True):
        assert not torch.equal(a, b)
        assert (a - b).abs().max() < 0.02 * b.abs().max()


def test_stored_samples_are_never_encoded(service: Service) -> None:
    with open_session(service, split=0, wire_codec="zeros+planes") as session:
        encoded = epoch_of(session)
        crossed = session.last.traffic.bytes_received
    with open_session(service, split=0, wire_codec="none") as session:
        assert all(torch.equal(a, b) for a, b in zip(encoded, epoch_of(session), strict=True))
        assert session.last.traffic.bytes_received == crossed


def test_an_older_server_sends_raw_features(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    answer = loopback_handler(service)
    refused = []

    def older(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        if method == "POST" and "codec" in json.loads(body):
            refused.append(path)
            error = BadRequestError("request: unknown field 'codec'; known are dataset, ids, job, model")
            return (
                400,
                {"Content-Type": "application/problem+json"},
                [json.dumps(error.to_problem()).encode()],
            )
        return answer(method, path, body)

    with caplog.at_level(logging.WARNING), open_session(older, split=SPLIT, wire_codec="zeros") as session:
        found = epoch_of(session)
        again = epoch_of(session)
        assert len(session.codecs.to_json()["without"]) == 1
    lines = [r.getMessage() for r in caplog.records if "older hapi" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert 1 <= len(refused) <= 4, "asked once for each request under way"
    with open_session(service, split=SPLIT) as session:
        expected = epoch_of(session)
    for a, b, c in zip(found, again, expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


def test_an_encoding_that_was_not_asked_for_is_refused(service: Service) -> None:
    answer = loopback_handler(service)

    def rounding(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        document = json.loads(body) if method == "POST" else None
        if document is not None and "split" in document:
            body = json.dumps({**document, "codec": "int8"}).encode()
        return answer(method, path, body)

    with (
        open_session(rounding, split=SPLIT, wire_codec="zeros", patience=0.0) as session,
        pytest.raises(WireError, match="encoded int8 where zeros"),
    ):
        epoch_of(session)


def test_rounding_twice_is_refused_early(service: Service) -> None:
    with pytest.raises(UsageError, match=r"--wire-codec int8 .* --frozen-precision bf16"):
        Session.open(settings_of(wire_codec="int8", frozen_precision="bf16", store="/nowhere"))


def traffic_of(rate: float, server: float = 0.0) -> Traffic:
    """The traffic of ten samples over a link of ``rate`` bytes per second."""
    traffic = Traffic()
    traffic.received(SPLIT, wire_codecs.ENOUGH_BYTES, 0.0)
    traffic.link._rates.append((1e12, int(rate), 1.0))
    traffic._busy["server"] = (0.0, server)
    return traffic


@pytest.fixture
def job(service: Service) -> Any:
    with open_session(service, split=SPLIT) as session:
        return session.job_context.job(SPLIT)


def chosen(codecs: WireCodecs, job: Any, traffic: Traffic, epoch: int = 1) -> str:
    features = torch.relu(torch.randn(10, *job.shape, generator=torch.Generator().manual_seed(0)))
    codecs.begin(epoch)
    codecs.consider(job, features, traffic, 10, 0.0)
    return str(codecs.encoded(job).codec)


def test_auto_follows_the_measured_link(job: Any) -> None:
    codecs = WireCodecs("auto")
    assert chosen(codecs, job, traffic_of(1e6), epoch=0) == "none", "the first epoch shows the link"
    assert chosen(codecs, job, traffic_of(1e6)) == "zeros+planes"
    assert chosen(codecs, job, traffic_of(wire_codecs.FASTEST_LINK)) == "none"
    assert chosen(codecs, job, traffic_of(1e6, server=1e3)) == "none", "the server has no time for it"
    assert [f["ratio"] > 1 for f in codecs.to_json()["measured"][str(SPLIT)]]


def test_auto_goes_on_encoding_where_that_is_all_of_the_server_s_work(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers' seconds of a pass have the encoding in them that is on."""
    both = CodecFigures(name="zeros+planes", ratio=2.0, encode_rate=400e6, decode_rate=1e9)
    monkeypatch.setattr(wire_codecs, "measure", lambda *_: (both,))
    codecs = WireCodecs("auto")
    encoding = 10 * job.sample_bytes() / both.encode_rate
    for epoch, server in ((1, 0.0), (2, encoding), (3, encoding)):
        assert chosen(codecs, job, traffic_of(300e6, server), epoch) == "zeros+planes"
    assert chosen(codecs, job, traffic_of(300e6, 2 * encoding), epoch=4) == "none"


def test_the_plan_knows_the_codec_that_is_on(job: Any) -> None:
    codecs = WireCodecs("auto")
    assert codecs.costs() == ()
    chosen(codecs, job, traffic_of(1e6))
    facts = ReuseFacts(wire_codecs=codecs.costs())
    (cost,) = facts.wire_at(SPLIT)
    assert cost.name == "zeros+planes" and cost.ratio > 1.5 and cost.encode > 0 < cost.decode
    assert facts.wire_at(SPLIT + 1) == (RAW,) == facts.wire_at(0)
    chosen(codecs, job, traffic_of(wire_codecs.FASTEST_LINK), epoch=2)
    assert ReuseFacts(wire_codecs=codecs.costs()).wire_at(SPLIT) == (RAW,)
    named = WireCodecs("fp16")
    chosen(named, job, traffic_of(1e6), epoch=0)
    (rounded,) = ReuseFacts(wire_codecs=named.costs()).wire_at(SPLIT)
    assert (rounded.name, rounded.ratio, rounded.encode) == ("fp16", 2.0, MOST_RATE)


def test_auto_waits_for_bytes_that_tell(job: Any) -> None:
    traffic = traffic_of(1e6)
    traffic.splits[SPLIT].bytes_received = wire_codecs.ENOUGH_BYTES - 1
    assert chosen(WireCodecs("auto"), job, traffic) == "none"
    assert chosen(WireCodecs("none"), job, traffic_of(1e6)) == "none"


def test_one_machine_has_no_link(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in this process stands for the one that a session starts."""
    with served(store, token="own", cos_batch=4, threads=1, allow_model=ALLOWED) as server:
        url = f"http://127.0.0.1:{server.port}"
        started = SimpleNamespace(
            url=url, token="own", pid=os.getpid(), on_local_disk=True, check=bool, close=bool
        )
        monkeypatch.setattr("hapi.client.connect._embed", lambda *_: started)
        with Session.open(settings_of(store=str(store), split=SPLIT, wire_codec="auto")) as session:
            assert session.codecs.to_json()["wanted"] == "none"
        with Session.open(settings_of(server=(url,), split=SPLIT, wire_codec="auto"), token="own") as session:
            assert session.codecs.to_json()["wanted"] == "auto"
