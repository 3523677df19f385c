"""The table of features under way and recent: against a simple model, and what happens when a claim fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.arrays import Bytes, IntArray
from hapi.errors import BadRequestError
from hapi.server.sharing import claims as claims_module
from hapi.server.sharing import table as table_module
from hapi.server.sharing.claims import PendingBatch
from hapi.server.sharing.table import SAMPLE_BYTES, SharingTable
from hapi.waiting import Interest

ROW = 8


def features_of(ids: IntArray) -> Bytes:
    """Features that only these samples have."""
    return np.ascontiguousarray(ids, dtype="<i8").view(np.uint8).reshape(len(ids), ROW)


class Pass:
    """A forward pass that is over when it is told."""

    def __init__(self, ids: IntArray) -> None:
        self.ids = ids
        self.over = threading.Event()
        self.error: Exception | None = None
        self.left = False

    def features(self) -> Bytes:
        assert self.over.wait(240)
        if self.error is not None:
            raise self.error
        return features_of(self.ids)

    def fitted(self) -> int:
        return len(self.ids)

    def stage(self) -> str:
        return "" if self.over.is_set() else "forward"

    def leave(self) -> None:
        self.left = True


def ids_of(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int64)


def taken_by(table: SharingTable, *ids: int, key: str = "k") -> PendingBatch:
    """The one claim of a request that computes all of ``ids``."""
    (found,) = table.take(key, ids_of(*ids), Interest(), 100).claims
    assert found[0].ids.tolist() == list(ids)
    return found[0]


def test_what_one_computes_others_join_and_later_ones_read() -> None:
    table = SharingTable(1 << 20)
    pending = taken_by(table, 3, 1)
    other = table.take("k", ids_of(1, 2, 3), Interest(), 100)
    assert other.joined == {pending: [(0, 1), (2, 0)]} and other.claims[0][0].ids.tolist() == [2]
    assert table.unclaimed("k", ids_of(1, 2, 9)).tolist() == [False, False, True]
    table.publish("k", pending, features_of(pending.ids))
    out = np.zeros((3, ROW), dtype=np.uint8)
    assert table.read("k", ids_of(1, 2, 3), out).tolist() == [True, False, True]
    assert (out[[0, 2]] == features_of(ids_of(1, 3))).all() and not out[1].any()
    assert table.take("other", ids_of(1), Interest(), 100).claims, "another key shares nothing"


def test_a_failed_claim_leaves_its_samples_to_others() -> None:
    table = SharingTable(1 << 20)
    pending = taken_by(table, 1, 2)
    (joined,) = table.take("k", ids_of(2), Interest(), 100).joined
    pending.fail()
    table.publish("k", pending, None)
    assert joined.wait(Interest()) is None
    assert taken_by(table, 2) is not pending
    assert table.nbytes == 0


def test_samples_that_nobody_has_are_found_once_around_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "LOOKED_AT", 4)
    table = SharingTable(1 << 20)
    assert not list(table.others("k", 20)) and table.take_others("k", ids_of(1), Interest()) is None
    taken_by(table, *range(3, 18))
    assert [found.tolist() for found in table.others("k", 20)] == [[0, 1, 2], [18, 19]]
    claimed = table.take_others("k", ids_of(17, 18), Interest())
    assert claimed is not None and claimed.ids.tolist() == [18], "17 is under way"
    assert [found.tolist() for found in table.others("k", 20)] == [[19], [0, 1, 2]], "on from where it was"
    table.publish("k", claimed, None)
    assert [found.tolist() for found in table.others("k", 20)] == [[19], [0, 1, 2], [18]]
    taken_by(table, 0, 1, 2, 18, 19)
    assert not list(table.others("k", 20))


def test_claims_are_cut_to_the_batch() -> None:
    found = SharingTable(1 << 20).take("k", ids_of(*range(10)), Interest(), 4)
    assert [pending.ids.tolist() for pending, _ in found.claims] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [rows.tolist() for _, rows in found.claims] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_table_without_memory_shares_nothing() -> None:
    table = SharingTable(0)
    pending = taken_by(table, 1)
    assert taken_by(table, 1) is not pending
    table.publish("k", pending, features_of(pending.ids))
    assert not table.recent("k", ids_of(1)).any() and table.nbytes == 0


def test_old_and_many_features_go_oldest_first() -> None:
    now = [0.0]
    table = SharingTable(3 * (ROW + SAMPLE_BYTES), 10.0, lambda: now[0])
    for sample in range(5):
        table.publish("k", taken_by(table, sample), features_of(ids_of(sample)))
    assert table.recent("k", ids_of(*range(5))).tolist() == [False, False, True, True, True]
    now[0] = 11.0
    table.publish("k", taken_by(table, 9), features_of(ids_of(9)))
    assert table.recent("k", ids_of(2, 3, 4, 9)).tolist() == [False, False, False, True]
    now[0] = 22.0
    assert table.nbytes == 0
    large = taken_by(table, *range(4))
    table.publish("k", large, features_of(large.ids))
    assert table.nbytes == 0, "more than all that there is room for"
    assert taken_by(table, 0)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), None])
def test_whoever_needs_a_loaded_pass_first_begins_it(error: Exception | None) -> None:
    """Its owner may be busy with a slow reader; when the pass fails, whoever waits computes for itself."""
    pending, begun = PendingBatch(ids_of(1, 2), Interest()), list[Pass]()
    assert pending.begin() is None, "nothing is loaded yet"

    def start() -> Pass:
        begun.append(Pass(pending.ids))
        begun[0].error = error
        begun[0].over.set()
        return begun[0]

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(pending.wait, Interest()) for _ in range(3)]
        pending.loaded(start)
        results = [each.result(240) for each in waiting]
    assert len(begun) == 1 and pending.begin() is begun[0]
    for found in results:
        assert found is None if error else (found is not None and (found == features_of(pending.ids)).all())


def test_an_owner_that_leaves_wakes_those_that_wait() -> None:
    pending = PendingBatch(ids_of(1), Interest())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.wait, Interest())
        assert pending.fail() is None
        assert waiting.result(240) is None
    pending.loaded(lambda: Pass(pending.ids))
    assert pending.begin() is None, "what is loaded too late is not computed"


def test_a_waiter_whose_client_left_does_not_wait() -> None:
    gone = Interest()
    gone.set()
    with pytest.raises(BadRequestError, match="went away"):
        PendingBatch(ids_of(1), Interest()).wait(gone)


def test_an_owner_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "PATIENCE_SECONDS", 0.0)
    assert PendingBatch(ids_of(1), Interest()).wait(Interest()) is None


STEP = st.tuples(
    st.sampled_from(["take", "publish", "fail", "time"]), st.lists(st.integers(0, 7), max_size=5)
)


@given(st.lists(STEP, max_size=40), st.integers(0, 4), st.booleans())
def test_random_schedules_agree_with_a_simple_model(
    steps: list[tuple[str, list[int]]], room: int, join: bool
) -> None:
    """The model: a sample is recent (with the time), under way (with its claim), or neither."""
    now = [0.0]
    table = SharingTable(room * (ROW + SAMPLE_BYTES), 5.0, lambda: now[0])
    recent: list[tuple[list[int], float]] = []
    claims: list[PendingBatch] = []
    way: dict[int, PendingBatch] = {}

    def known() -> set[int]:
        while recent and (sum(len(ids) for ids, _ in recent) > room or recent[0][1] < now[0] - 5.0):
            recent.pop(0)
        return {sample for ids, _ in recent for sample in ids}

    for action, ids in steps:
        if action == "take":
            ids = sorted(set(ids))
            table.nbytes  # noqa: B018 - what is too old goes
            found = table.take("k", ids_of(*ids), Interest(), 100, join=join)
            kept = [row for row, i in enumerate(ids) if i in known()] if join and room else []
            assert found.kept == kept
            joined = {(pending, ids[row]) for pending, pairs in found.joined.items() for row, _ in pairs}
            assert joined == ({(way[i], i) for i in ids if i in way} if join else set())
            new = [i for row, i in enumerate(ids) if row not in kept and not (join and i in way)]
            assert [i for pending, _ in found.claims for i in pending.ids.tolist()] == new
            for pending, _ in found.claims:
                claims.append(pending)
                if room:
                    for i in pending.ids.tolist():
                        if i not in known():
                            way.setdefault(i, pending)
        elif action in ("publish", "fail") and claims:
            pending = claims.pop(ids[0] % len(claims) if ids else 0)
            own = pending.ids.tolist()
            table.publish("k", pending, features_of(pending.ids) if action == "publish" else None)
            if action == "publish" and len(own) <= room:
                recent.append((own, now[0]))
            for i in own:
                if way.get(i) is pending:
                    del way[i]
        else:
            now[0] += 2.0
        everything = ids_of(*range(8))
        out = np.zeros((8, ROW), dtype=np.uint8)
        read = table.read("k", everything, out)
        assert (out[read] == features_of(everything[read])).all()
        assert table.nbytes <= room * (ROW + SAMPLE_BYTES)
        if join:  # each sample is computed once: then the model knows exactly
            assert set(everything[read].tolist()) == known()
            assert set(everything[~table.unclaimed("k", everything)].tolist()) == known() | set(way)
            others = [sample for found in table.others("k", 8) for sample in found.tolist()]
            there = known() | set(way)
            assert sorted(others) == ([] if not there else [i for i in range(8) if i not in there])
