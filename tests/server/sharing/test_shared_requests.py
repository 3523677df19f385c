"""Requests that want the same features share one extraction, and get the bits that they would have got alone."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import EXTRACT, SPEC, SPLIT, Known, exchange, make_store, metric, served
from support.sharing_tools import Extracted, body_of, extracted, opened, parsed, sharing_service

from hapi.arrays import Flags, IntArray
from hapi.errors import ConflictError, DataError, DeviceMemoryError, HapiError
from hapi.models.zoo.build import build
from hapi.repository.prefix import store_reference
from hapi.repository.push import push
from hapi.server.decoding.pool import Decoders
from hapi.server.device.device import Device
from hapi.server.feeding import Feeding
from hapi.server.frame_stream import FrameStream
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.service import Service
from hapi.server.tenants.by_token import Holder, Tenants
from hapi.store.open import open_store
from hapi.wire.references import Augmentation

ALL = list(range(40))
HALF = list(range(20))


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with sharing_service(folder) as running:
        yield running


@pytest.fixture(scope="module")
def alone(folder: Path, known: Known) -> Callable[[list[int]], Extracted]:
    """What a server that shares nothing answers."""
    found: dict[tuple[int, ...], Extracted] = {}

    def answer(ids: list[int]) -> Extracted:
        if tuple(ids) not in found:
            with sharing_service(folder, share_memory=0) as server:
                found[tuple(ids)] = extracted(server, known, ids)
                assert server.sharing.counts.all()["recent"] == 0
        return found[tuple(ids)]

    return answer


def computed(service: Service) -> int:
    return service.sharing.counts.all()["computed"]


def same(found: Extracted, expected: Extracted) -> bool:
    return found.features == expected.features and found.labels == expected.labels


@pytest.mark.slow
def test_what_was_computed_a_moment_ago_is_not_computed_again(
    service: Service, known: Known, alone: Callable[[list[int]], Extracted]
) -> None:
    first, again = extracted(service, known, ALL[:32]), extracted(service, known, ALL[:32][::-1])
    assert same(first, alone(ALL[:32])) and same(again, alone(ALL[:32][::-1]))
    assert service.sharing.counts.all() == {"computed": 32, "joined": 0, "recent": 32, "cache": 0}
    assert (first.report.shared, again.report.kept, again.report.cos_batch) == (0, 32, 0)
    assert again.report.seconds["forward"] == again.report.seconds["decode"] == 0
    assert service.workers.all[0].running == 0 and service.workers.all[0].memory.held_bytes == 0


def test_only_what_is_missing_is_computed_and_never_less_than_sixteen(
    service: Service, folder: Path, known: Known
) -> None:
    with_rest = extracted(service, known, ALL)
    assert computed(service) == 48, "the last 8 samples are topped up"
    with sharing_service(folder) as other:
        extracted(other, known, HALF)
        overlapping = extracted(other, known, ALL)
        assert same(overlapping, with_rest)
        assert overlapping.report.kept == 20 and computed(other) == 32 + 32


@pytest.mark.slow_except("damaged")
@pytest.mark.parametrize("loads", [True, False], ids=["read", "damaged"])
def test_a_small_rest_takes_samples_that_nobody_has_asked_for(
    service: Service,
    known: Known,
    alone: Callable[[list[int]], Extracted],
    monkeypatch: pytest.MonkeyPatch,
    loads: bool,
) -> None:
    if not loads:
        monkeypatch.setattr(Feeding, "load_others", lambda *_: False)
    extracted(service, known, ALL[:16])
    assert same(extracted(service, known, ALL[8:28]), alone(ALL[8:28]))
    assert service.sharing.table.under_way == 0
    before = computed(service)
    assert same(extracted(service, known, ALL[16:32]), alone(ALL[16:32]))
    assert service.sharing.table.under_way == 0
    if loads:
        assert before == computed(service) == 32, "every pass was of samples that somebody wants"
    else:
        assert computed(service) > 32


def test_a_sample_that_is_asked_for_twice_is_computed_once(service: Service, known: Known) -> None:
    ids = [5, 7] * 16
    found = extracted(service, known, ids)
    assert computed(service) == 16
    half = len(found.features) // 16
    assert found.features == found.features[:half] * 16
    assert same(extracted(service, known, ids), found)


def test_the_last_samples_are_one_pass_although_one_of_them_is_long(
    service: Service, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests lack a sample each: the first takes all that is left, but for what does not fit its memory."""
    monkeypatch.setattr(Feeding, "fits_memory", lambda self, ids: ids != 35)
    extracted(service, known, ALL[:32])
    stopped = opened(service, known, [*ALL[1:16], 32])
    next(stopped.frames)  # the pass is made; its rest is not sent
    assert computed(service) == 32 + 16
    extracted(service, known, [*ALL[1:16], 33])
    assert computed(service) == 32 + 16, "the first pass had it"
    body_of(stopped)
    extracted(service, known, [*ALL[1:16], 35])
    assert computed(service) == 32 + 16 + 16, "with repeats, as nothing is left"


def test_two_requests_at_once_do_not_share_out_the_last_samples(
    service: Service, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the first one looks for samples that fill its pass."""
    extracted(service, known, ALL[:32])
    coming = list[Future[Extracted]]()

    def fits(feeding: Feeding, ids: IntArray) -> Flags:
        if not coming:
            coming.append(pool.submit(extracted, service, known, [*ALL[1:16], 33]))
            end = time.monotonic() + 0.5
            while service.sharing.table.under_way < 2 and time.monotonic() < end:
                time.sleep(0.01)
        return fitting(feeding, ids)

    fitting = Feeding.fits_memory
    monkeypatch.setattr(Feeding, "fits_memory", fits)
    with ThreadPoolExecutor(1) as pool:
        extracted(service, known, [*ALL[1:16], 32])
        coming[0].result()
    assert computed(service) == 32 + 16, "one pass of the last eight, with repeats"


def test_those_that_time_layers_share_nothing(service: Service, known: Known) -> None:
    for _ in range(2):
        before = computed(service)
        assert extracted(service, known, ALL[:16], time_layers=True).report.shared == 0
        assert computed(service) == before + 16


@pytest.mark.slow
def test_small_requests_share_with_their_equals_alone(
    service: Service, known: Known, alone: Callable[[list[int]], Extracted]
) -> None:
    """A pass of fewer than 16 samples gives other last bits than another pass with these samples."""
    extracted(service, known, ALL[:16])
    for ids in (ALL[:15], ALL[:14], ALL[:15][::-1], [1, 2, 1]):
        before = computed(service)
        first, again = extracted(service, known, ids), extracted(service, known, ids)
        assert computed(service) == before + len(set(ids))
        assert (first.report.shared, again.report.kept) == (0, len(set(ids)))
        assert same(first, alone(ids)) and same(again, alone(ids))
    before = computed(service)
    assert extracted(service, known, ALL[8:24]).report.kept == 8
    assert computed(service) == before + 16, "those of small passes are nobody else's"


def test_small_requests_at_once_are_one_pass(
    service: Service, known: Known, decoding: Gate, alone: Callable[[list[int]], Extracted]
) -> None:
    expected, before = alone(ALL[:5]), decoding.calls
    decoding.hold = before
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(extracted, service, known, ALL[:5])
        assert decoding.reached.wait(240)
        second = pool.submit(extracted, service, known, ALL[:5])
        decoding.opened.set()
        found = [first.result(240), second.result(240)]
    assert all(same(each, expected) for each in found) and computed(service) == 5


@pytest.mark.slow
def test_other_layers_transforms_and_weights_share_nothing(service: Service, known: Known) -> None:
    ids, request = ALL[:16], known.extract(ALL[:16])
    extracted(service, known, ids)
    transform = {**request["transform"], "mean": [0.5, 0.4, 0.4]}
    drawn = {**request["transform"], "augment": Augmentation(flip=0.5).to_json(), "seed": 1, "epoch": 0}
    weights = {**known.extract(ids)["model"], "weights": "random:1"}
    weights["digest"] = build(replace(SPEC, weights="random:1")).prefix_digest(SPLIT)
    for changes in (
        {"split": 3},
        {"transform": transform},
        {"transform": drawn},
        {"transform": {**drawn, "epoch": 1}},
        {"model": weights},
        {"precision": "bf16"},
    ):
        before = computed(service)
        assert extracted(service, known, ids, **changes).report.shared == 0
        assert computed(service) == before + 16, changes
    assert extracted(service, known, ids, transform=drawn).report.kept == 16, "the same draw is the same work"


def test_a_layer_of_another_name_is_refused_although_its_features_are_there(
    service: Service, known: Known
) -> None:
    extracted(service, known, ALL[:16])
    with pytest.raises(HapiError, match="at the client"):
        extracted(service, known, ALL[:16], split_name="elsewhere")


class Gate:
    """Lets decoding calls pass, hold or fail, in the order in which they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.hold: int | None = None
        """Number of the call that waits for ``opened``."""
        self.fail: int | None = None
        self.calls = 0
        real, lock = Decoders.batch, threading.Lock()

        def batch(decoders: Decoders, *args: Any) -> None:
            with lock:
                number, self.calls = self.calls, self.calls + 1
            if number == self.hold:
                self.reached.set()
                assert self.opened.wait(240)
            if number == self.fail:
                raise DataError("sample 17 is damaged")
            real(decoders, *args)

        monkeypatch.setattr(Decoders, "batch", batch)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def leader_at_its_second_batch(service: Service, known: Known, decoding: Gate) -> FrameStream:
    """A request whose reader has taken the first COS batch and nothing since; it has claimed the second one.

    That one is held while it is loaded: were it loaded sooner, its pass would begin before the first batch is sent.
    """
    decoding.hold = decoding.calls + 1
    stream = opened(service, known, ALL[:32])
    for _ in next(stream.frames):
        pass
    assert decoding.reached.wait(240)
    assert service.sharing.table.under_way == 16
    return stream


def test_a_reader_that_takes_nothing_holds_up_nobody(
    service: Service, known: Known, decoding: Gate, alone: Callable[[list[int]], Extracted]
) -> None:
    """Its second COS batch is loaded and not begun: whoever needs it begins it."""
    slow = leader_at_its_second_batch(service, known, decoding)
    decoding.opened.set()
    fast = extracted(service, known, ALL[:32])
    assert same(fast, alone(ALL[:32]))
    rest = body_of(slow)
    assert computed(service) == 32 and len(rest) > 0
    assert fast.report.kept + fast.report.joined == 32


def joined_while(
    service: Service, known: Known, decoding: Gate, end: Callable[[FrameStream], None]
) -> Extracted:
    """The answer of a request that waited for another's second COS batch, which ``end`` ended."""
    leader = leader_at_its_second_batch(service, known, decoding)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(extracted, service, known, ALL[:32])
        end(leader)
        return follower.result(240)


def test_a_leader_that_goes_on_is_joined(
    service: Service, known: Known, decoding: Gate, alone: Callable[[list[int]], Extracted]
) -> None:
    bodies = []

    def go_on(leader: FrameStream) -> None:
        decoding.opened.set()
        bodies.append(body_of(leader))

    found = joined_while(service, known, decoding, go_on)
    assert same(found, alone(ALL[:32])) and computed(service) == 32
    assert found.report.shared == 32


def test_a_leader_whose_client_left(
    service: Service, known: Known, decoding: Gate, alone: Callable[[list[int]], Extracted]
) -> None:
    def leave(leader: FrameStream) -> None:
        leader.context.interest.set()
        leader.close()

    found = joined_while(service, known, decoding, leave)
    assert same(found, alone(ALL[:32]))
    decoding.opened.set()
    assert not service.sharing.table.under_way
    assert computed(service) == 32, "the first batch of the one, the second of the other"


def test_a_leader_that_failed(
    service: Service, known: Known, decoding: Gate, alone: Callable[[list[int]], Extracted]
) -> None:
    decoding.fail = 1

    def fail(leader: FrameStream) -> None:
        decoding.opened.set()
        with pytest.raises(DataError, match="damaged"):
            body_of(leader)

    assert same(joined_while(service, known, decoding, fail), alone(ALL[:32]))


def test_a_leader_out_of_memory(
    service: Service,
    known: Known,
    decoding: Gate,
    monkeypatch: pytest.MonkeyPatch,
    alone: Callable[[list[int]], Extracted],
) -> None:
    """Its pass fails on the device, begun by the one that waits; that one has memory for its own."""
    expected, real, failed = alone(ALL[:32]), Device._forward, list[int]()
    slow = leader_at_its_second_batch(service, known, decoding)

    def forward(device: Device, one: Any) -> Any:
        if not failed:
            failed.append(one.count)
            raise DeviceMemoryError("one sample does not fit")
        return real(device, one)

    monkeypatch.setattr(Device, "_forward", forward)
    decoding.opened.set()
    assert same(extracted(service, known, ALL[:32]), expected)
    with contextlib.suppress(DeviceMemoryError):  # or it computes anew, if its pass failed before it looked
        body_of(slow)
    assert failed == [16]


def test_tenants_share_and_only_who_computes_pays(folder: Path, known: Known) -> None:
    one, two = Tenant(name="one"), Tenant(name="two")
    digests = [hashlib.sha256(letter.encode() * 20).digest() for letter in "ab"]
    tenants = Tenants({d: Holder(tenant=t) for d, t in zip(digests, (one, two), strict=True)})
    with served(folder, tenants=tenants, share_memory=1 << 20, cos_batch=16) as server:
        bodies = []
        for token in ("a" * 20, "b" * 20):
            headers = {"Authorization": f"Bearer {token}"}
            answer = exchange(server.port, "POST", EXTRACT, known.extract(ALL[:32]), headers)
            assert answer.status == 200
            bodies.append(parsed(answer.body, ALL[:32]))
        assert same(bodies[0], bodies[1])
        server.idle()  # an answer is paid for after it was sent
        costs = server.application.board.counts_of
        assert costs(two).cost < costs(one).cost
        text = exchange(server.port, "GET", "/metrics", headers=headers).body.decode()
        assert 'hapi_feature_samples_total{source="computed"} 32.0' in text
        assert 'hapi_feature_samples_total{source="recent"} 32.0' in text
        document = exchange(server.port, "GET", "/v1/status", headers=headers).json()
        assert 0 < document["host_memory"]["reserved"]["shared"] <= 1 << 20


def test_many_at_once_compute_each_sample_once(folder: Path, known: Known) -> None:
    with served(folder, share_memory=1 << 24, cos_batch=16, max_running=8) as server:
        orders = [ALL[shift:] + ALL[:shift] for shift in range(0, 40, 5)]
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(exchange, server.port, "POST", EXTRACT, known.extract(ids)) for ids in orders
            ]
            answers = [each.result(240) for each in asked]
        for ids, answer in zip(orders, answers, strict=True):
            known.check_features(answer.body, ids)
        counts = server.service.sharing.counts.all()
        assert counts["joined"] + counts["recent"] >= 7 * 40
        assert metric(server.port, "hapi_feature_samples_total") >= 8 * 40
        assert not server.service.sharing.table.under_way


def test_a_digest_alone_takes_no_features_of_a_model_that_one_may_not_see(tmp_path: Path) -> None:
    """The digest of a model that the server builds is the client's word until its layers are loaded."""
    store, spec = open_store(str(make_store(tmp_path))), replace(SPEC, weights="random:7")
    hidden = store_reference(push(store, "hidden", build(spec), spec).model, build(spec), SPLIT)
    known = Known(tmp_path)
    forged = {**known.extract()["model"], "digest": hidden.digest}
    with sharing_service(tmp_path) as service:
        extracted(service, known, ALL[:32], model=hidden.to_json())
        with pytest.raises(ConflictError, match="have digest"):
            extracted(service, known, ALL[:32], model=forged)
        assert extracted(service, known, ALL[:32], model=hidden.to_json()).report.kept == 32
