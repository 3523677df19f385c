"""``POST /v1/samples`` for a range of a sequence: the server's order is the client's, computed once and bounded."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.http_tools import (
    COUNT,
    SAMPLES,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    received,
)

from hapi.data.epoch_order import MAX_GROUP, Shuffle, chunk_sequence, epoch_sequence
from hapi.data.reading.reader import AccessHint
from hapi.errors import BadRequestError, NotFoundError
from hapi.server.epoch_orders import JOBS_FOR_OTHERS, JOBS_KEPT, READ_SECONDS, EpochOrderCache
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.sequences import SequenceRange


def asked(known: Known, start: int, stop: int, shuffle: Any = "full") -> dict[str, Any]:
    sequence = {"seed": 4, "epoch": 2, "shuffle": shuffle}
    return {
        "dataset": known.dataset.reference.to_json(), "sequence": sequence, "start": start, "stop": stop,
    }  # fmt: skip


@pytest.mark.parametrize("shuffle", ["full", {"group": 5, "window": 3}])
def test_ranges_are_what_the_client_computes(server: ServedApplication, known: Known, shuffle: Any) -> None:
    order = epoch_sequence(4, 2, COUNT) if shuffle == "full" else chunk_sequence(4, 2, COUNT, 5, 3)
    got: list[int] = []
    for start in range(0, COUNT, 16):
        stop = min(start + 16, COUNT)
        answer = exchange(server.port, "POST", SAMPLES, asked(known, start, stop, shuffle))
        assert answer.status == 200
        ids, (stored, _, labels) = received(answer.body, 3)
        expected = known.dataset.read(order[start:stop])
        assert stored.tobytes() == expected.data.tobytes()
        assert labels.view(np.int64).tolist() == expected.labels.tolist()
        got += ids
    assert got == order.tolist()


def test_past_the_end(server: ServedApplication, known: Known) -> None:
    answer = exchange(server.port, "POST", SAMPLES, asked(known, 0, COUNT + 1))
    check_problem(answer, 404, "stop", f"has {COUNT} samples")


def test_wrong_fields(server: ServedApplication, known: Known) -> None:
    both = {**asked(known, 0, 2), "ids": [1]}
    check_problem(exchange(server.port, "POST", SAMPLES, both), 400, "unknown field 'ids'")
    wrong = asked(known, 0, 2, {"group": 0, "window": 1})
    check_problem(exchange(server.port, "POST", SAMPLES, wrong), 400, "sequence.shuffle.group")


# -- what is kept --------------------------------------------------------------------------------------------------


def wanted(seed: int = 0, start: int = 0, stop: int = 10, shuffle: Shuffle = Shuffle()) -> SequenceRange:  # noqa: B008
    return SequenceRange(
        seed=seed, epoch=0, group=shuffle.group, window=shuffle.window, start=start, stop=stop
    )


def dataset(count: int, access_hint: Any = None) -> Any:
    return SimpleNamespace(
        name="d", count=count, version="1", reader=SimpleNamespace(access_hint=access_hint)
    )


def test_an_order_is_computed_once_for_many_requests() -> None:
    orders = EpochOrderCache()
    threads = [
        threading.Thread(target=orders.find, args=(dataset(200_000), wanted(start=k, stop=k + 5)))
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert orders.computed == 1
    orders.find(dataset(200_000), wanted(shuffle=Shuffle(10, 2)))
    assert orders.computed == 2
    assert orders.find(dataset(50), wanted()).tolist() == epoch_sequence(0, 0, 50)[:10].tolist()


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    orders = EpochOrderCache(kept_bytes=3 * 4 * 1000)
    for seed in (0, 1, 2, 0, 3):  # 3 takes the place of 1
        orders.find(dataset(1000), wanted(seed))
    assert orders.computed == 4
    orders.find(dataset(1000), wanted(0))
    assert orders.computed == 4
    orders.find(dataset(1000), wanted(1))
    assert orders.computed == 5
    orders.find(dataset(50_000), wanted(7))
    orders.find(
        dataset(50_000), wanted(7)
    )  # larger than what may be kept, and yet not computed for each request
    assert orders.computed == 6


def test_a_tenant_with_many_sequences_pushes_out_its_own() -> None:
    orders = EpochOrderCache(kept_bytes=3 * 4 * 1000)
    quiet, loud = Tenant(name="quiet"), Tenant(name="loud")
    orders.find(dataset(1000), wanted(0), quiet)
    for seed in range(1, 8):
        orders.find(dataset(1000), wanted(seed), loud)
    assert orders.computed == 8
    orders.find(dataset(1000), wanted(0), quiet)
    assert orders.computed == 8


def test_a_tenant_with_many_windows_does_not_close_the_cache_for_others() -> None:
    now, asked_with = [0.0], []

    def access_hint(shuffle: Shuffle, seed: int, epoch: int, sharers: int) -> None:
        asked_with.append(sharers)

    orders, one, windows = EpochOrderCache(clock=lambda: now[0]), dataset(100, access_hint), Shuffle(10, 2)
    loud, quiet = Tenant(name="loud"), Tenant(name="quiet")
    for seed in range(1000):
        orders.access_hint(one, wanted(seed, shuffle=windows).windows, loud)
    assert asked_with[-1] == JOBS_KEPT, "and no more is remembered of it"
    orders.access_hint(one, wanted(0, shuffle=windows).windows, quiet)
    assert asked_with[-1] == JOBS_FOR_OTHERS + 1
    now[0] += READ_SECONDS
    orders.access_hint(one, wanted(0, shuffle=windows).windows, quiet)
    assert asked_with[-1] == 1


def test_a_place_that_is_not_there() -> None:
    with pytest.raises(NotFoundError, match="no place 10"):
        EpochOrderCache().find(dataset(10), wanted(stop=11))


def test_the_largest_chunks_that_a_request_may_name_can_be_computed() -> None:
    shuffle = {"group": MAX_GROUP, "window": MAX_GROUP}
    document = {"sequence": {"seed": 0, "epoch": 0, "shuffle": shuffle}, "start": 0, "stop": 5}
    found = EpochOrderCache().find(dataset(5), SequenceRange.from_json(document, 5))
    assert sorted(found.tolist()) == list(range(5))
    with pytest.raises(BadRequestError, match=r"sequence\.shuffle\.group"):
        shuffle["group"] += 1
        SequenceRange.from_json(document, 5)


def test_jobs_with_windows_share_the_chunk_cache() -> None:
    now, asked_with = [0.0], []

    def access_hint(shuffle: Shuffle, seed: int, epoch: int, sharers: int) -> AccessHint | None:
        asked_with.append(sharers)
        return AccessHint(shuffle.group, sharers=sharers) if sharers < 3 else None

    orders, one, windows = EpochOrderCache(clock=lambda: now[0]), dataset(100, access_hint), Shuffle(10, 2)
    for seed, expected in (
        (0, AccessHint(10)),
        (0, AccessHint(10)),
        (1, AccessHint(10, sharers=2)),
        (2, None),
        (0, None),
    ):
        assert orders.access_hint(one, wanted(seed, shuffle=windows).windows) == expected
    assert asked_with == [1, 1, 2, 3, 3]
    assert orders.access_hint(one, wanted(9).windows) is None, "a full permutation"
    now[0] += READ_SECONDS
    assert orders.access_hint(one, wanted(2, shuffle=windows).windows) == AccessHint(10), (
        "the others do not read any more"
    )
    following = replace(wanted(2, shuffle=windows), epoch=1).windows
    assert orders.access_hint(one, following) == AccessHint(10) and asked_with[-1] == 1, (
        "a job's next epoch is the same job"
    )
