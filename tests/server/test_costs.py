"""What requests cost, and what is expected of the next ones."""

from __future__ import annotations

import numpy as np
import pytest

from hapi.server.scheduling.costs import KINDS_KEPT, Costs, Server, Used
from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest
from hapi.wire.references import DatasetReference, ModelReference
from hapi.wire.report import STAGES

SERVER = Server(slots=4, processors=2)


def used(held: float = 0.0, **wall: float) -> Used:
    seconds = {**dict.fromkeys(STAGES, 0.0), **wall}
    return Used(seconds, {**seconds, "send": 0.0, "device_wait": 0.0, "queue": 0.0}, held)


def extract(split: int = 4, count: int = 10, digest: str = "ab" * 16) -> ExtractRequest:
    return ExtractRequest(
        dataset=DatasetReference(name="d", version="0" * 16),
        model=ModelReference(
            source="zoo", name="m", weights="random:0", digest=digest, input_shape=(3, 8, 8)
        ),
        split=split,
        split_name="x",
        ids=np.arange(count),
        transform=None,
    )


def samples(count: int = 10) -> SamplesRequest:
    return SamplesRequest(dataset=DatasetReference(name="d", version="0" * 16), ids=np.arange(count))


def test_the_scarcest_resource_counts() -> None:
    assert used(1.0, forward=0.8, decode=0.6).cost(SERVER) == 0.8
    assert used(1.0, forward=0.1, decode=0.6, read=0.4).cost(SERVER) == 0.5, "of two processors"
    assert used(8.0, forward=0.1, send=7.0).cost(SERVER) == 2.0, "a slow reader holds one slot of four"
    assert used(8.0, forward=0.1, device_wait=7.9).cost(SERVER) == pytest.approx(0.1), "that was others' time"


def test_loading_layers_happens_once() -> None:
    first = used(5.0, model=4.0, forward=0.5, decode=0.2)
    assert first.cost(SERVER) == pytest.approx(2.1) and first.without_loading().cost(SERVER) == 0.5


def test_a_kind_of_request_is_remembered_by_the_sample() -> None:
    costs = Costs()
    costs.seen(extract(count=20), 1.0)
    assert costs.expected(extract(count=60)) == pytest.approx(3.0)
    for _ in range(40):
        costs.seen(extract(count=20), 2.0)
    assert costs.expected(extract(count=20)) == pytest.approx(2.0, rel=0.01)


def test_one_sample_is_no_measure_of_thousands() -> None:
    """The first of a chunk has all of it read, and small requests come with large ones."""
    costs = Costs()
    before = costs.expected(samples(10_000))
    costs.seen(samples(1), 0.06)
    assert costs.expected(samples(10_000)) < 600 * 0.1 + before
    for _ in range(5):
        costs.seen(samples(10_000), 1.0)
        costs.seen(samples(1), 0.06)
    assert costs.expected(samples(10_000)) == pytest.approx(1.0, rel=0.2)


def test_an_unknown_kind_is_taken_by_samples_and_layers() -> None:
    costs = Costs()
    assert costs.expected(extract(split=8)) == pytest.approx(2 * costs.expected(extract(split=4)))
    assert costs.expected(extract(count=20)) == pytest.approx(2 * costs.expected(extract(count=10)))
    for _ in range(40):
        costs.seen(extract(split=4, count=10), 4.0)
    assert costs.expected(extract(split=8, count=10, digest="cd" * 16)) == pytest.approx(8.0, rel=0.01)
    before = costs.expected(samples())
    costs.seen(samples(20), 7.0)
    assert costs.expected(samples(20)) == pytest.approx(7.0) and before < 0.1
    tensors = TensorsRequest(name="m", digest="0" * 16, names=tuple("abcdefghijklmnopqrst"))
    costs.seen(tensors, 0.5)
    assert costs.expected(tensors) == pytest.approx(0.5)


def test_the_kind_not_seen_for_longest_is_forgotten() -> None:
    costs = Costs()
    for n in range(KINDS_KEPT + 1):
        costs.seen(extract(digest=f"{n:032x}"), 100.0)
        costs.seen(extract(digest="f" * 32), 0.001)
    assert len(costs._known) == KINDS_KEPT
    assert costs.expected(extract(digest="f" * 32)) == pytest.approx(0.001)
