"""Chunk windows, sharding over trainers, and the text that names a shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.data.epoch_order import (
    FULL,
    MAX_GROUP,
    EpochOrder,
    Shuffle,
    chunk_sequence,
    epoch_sequence,
    sorted_positions,
    trainer_batches,
)
from hapi.errors import UsageError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _splitmix(state: int) -> int:
    """The published finaliser in plain integers."""
    z = state & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _plain_chunks(seed: int, epoch: int, count: int, group: int, window: int) -> list[int]:
    """The definition, one sample at a time."""
    key = _splitmix(_splitmix(seed + _GAMMA) + epoch + _GAMMA)
    chunks = max(1, -(-count // group))
    step = (1 << 64) // chunks
    other = _splitmix(~key)
    by_rank = sorted(range(chunks), key=lambda c: (_splitmix(other + (c + 1) * _GAMMA), c))
    opens = {chunk: rank * step for rank, chunk in enumerate(by_rank)}

    def moment(sample: int) -> int:
        late = _splitmix(key + (sample + 1) * _GAMMA)
        if window < chunks:
            late = (late >> 32) * (step * window >> 32)
        return (opens[sample // group] + late) & _MASK

    return sorted(range(count), key=lambda s: (moment(s), s))


def test_golden() -> None:
    assert chunk_sequence(42, 3, 12, 3, 2).tolist() == _plain_chunks(42, 3, 12, 3, 2)
    assert chunk_sequence(0, 0, 12, 3, 1).tolist() == [5, 4, 3, 0, 2, 1, 7, 8, 6, 11, 9, 10]
    assert chunk_sequence(7, 1, 12, 2, 3).tolist() == [7, 2, 6, 1, 4, 0, 8, 5, 9, 11, 10, 3]


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.integers(0, 200),
    st.integers(1, 300) | st.just(MAX_GROUP),
    st.integers(1, 80) | st.just(MAX_GROUP),
)
def test_equal_to_the_plain_definition(seed: int, epoch: int, count: int, group: int, window: int) -> None:
    sequence = chunk_sequence(seed, epoch, count, group, window)
    assert sequence.dtype == np.int64
    assert sequence.tolist() == _plain_chunks(seed, epoch, count, group, window)
    assert sorted(sequence.tolist()) == list(range(count))


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=80))
def test_places_are_those_of_a_stable_sort(keys: list[int]) -> None:
    array = np.array(keys, dtype=np.uint64)
    assert sorted_positions(array).tolist() == np.argsort(array, kind="stable").tolist()


@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_no_more_chunks_are_open_than_the_window(window: int) -> None:
    """A reader that keeps ``window`` chunks, the least recently used given up, reads hardly any of them again."""
    count, group = 50_000, 500
    chunks = chunk_sequence(5, 2, count, group, window) // group
    kept: dict[int, None] = {}
    reads = 0
    for chunk in chunks.tolist():
        reads += chunk not in kept
        kept.pop(chunk, None)
        kept[chunk] = None
        if (
            len(kept) > window + 2
        ):  # a chunk that has just closed is not yet the one that was unused for longest
            del kept[next(iter(kept))]
    assert reads <= count // group + (window - 1) + 2


def test_one_chunk_at_a_time() -> None:
    chunks = chunk_sequence(1, 1, 1000, 50, 1) // 50
    assert np.count_nonzero(np.diff(chunks)) == 19


def test_every_part_of_the_epoch_mixes_as_many_chunks() -> None:
    """At its start and end too: 200 samples in a row come from nearly all of the 10 open chunks, and no others."""
    chunks = chunk_sequence(3, 0, 40_000, 400, 10) // 400
    seen = [len(set(part.tolist())) for part in chunks.reshape(200, 200)]
    assert min(seen) >= 9 and max(seen) <= 12


def test_no_place_is_favoured() -> None:
    """Over many epochs each sample's mean place is near the middle (5 standard errors)."""
    count, epochs = 48, 1500
    places = np.array([np.argsort(chunk_sequence(7, e, count, 6, 3)) for e in range(epochs)])
    error = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(places.mean(axis=0) - (count - 1) / 2).max() < 5 * error


@pytest.mark.parametrize(
    "arguments",
    [(-1, 0, 5, 1, 1), (0, 1 << 63, 5, 1, 1), (0, 0, -1, 1, 1), (0, 0, 5, 0, 1), (0, 0, 5, 1, 0),
     (0, 0, 5, MAX_GROUP + 1, 1), (0, 0, 5, 1, MAX_GROUP + 1), (0, 0, 5, True, 1), (0, 0, 5, 1, True)],
)  # fmt: skip
def test_wrong_numbers(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="expected an integer"):
        chunk_sequence(*arguments)


def test_more_chunks_than_there_can_be() -> None:
    """Refused before anything is allocated."""
    with pytest.raises(UsageError, match=r"group 1: .* chunks, at most"):
        chunk_sequence(0, 0, 1 << 40, 1, 4)


# -- several trainers ----------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9), st.booleans())
def test_trainers_share_an_epoch(count: int, batch: int, trainers: int, drop_last: bool) -> None:
    sequence = np.arange(count, dtype=np.int64)[::-1]
    if 0 < count < trainers and not drop_last:
        with pytest.raises(UsageError, match=f"{trainers} trainers cannot share {count} samples"):
            trainer_batches(sequence, batch, 0, trainers)
        return
    each = [trainer_batches(sequence, batch, k, trainers, drop_last=drop_last) for k in range(trainers)]
    rounds, left = divmod(count, batch * trainers)
    # What is left is a round of its own as soon as each trainer gets a sample of it.
    assert {len(found) for found in each} == {rounds + (left >= trainers and not drop_last)}
    used = [i for found in each for part in found for i in part.tolist()]
    dropped = count % (batch * trainers) if drop_last else 0
    assert sorted(used, reverse=True) == sequence[: count - dropped].tolist()
    sizes = [[len(part) for part in found] for found in each]
    assert all(size == batch for found in sizes for size in found[:-1])
    last = {found[-1] for found in sizes if found}
    assert not last or (max(last) - min(last) <= 1 and min(last) >= 1 and max(last) <= batch + 1)
    if drop_last:
        assert last <= {batch}


def test_a_round_is_a_piece_of_the_sequence() -> None:
    """The batches of all trainers at one step are the batch that one trainer with a larger one would have."""
    sequence = Shuffle(5, 3).sequence(1, 2, 130)
    together = trainer_batches(sequence, 12)
    apart = [trainer_batches(sequence, 4, k, 3) for k in range(3)]
    assert len(together) == len(apart[0])
    for step, whole in enumerate(together):
        assert np.concatenate([found[step] for found in apart]).tolist() == whole.tolist()


def test_going_on_in_the_middle() -> None:
    """A place is an epoch and the number of a batch: what follows does not depend on how one came there."""
    order = EpochOrder(seed=3, shuffle=Shuffle(4, 3), trainers=2, trainer=1)
    ids = np.arange(101)
    whole, again = order.batches(5, ids, 101, 8), order.batches(5, ids, 101, 8)
    assert [b.tolist() for b in whole[4:]] == [b.tolist() for b in again[4:]]
    assert [b.tolist() for b in whole] != [b.tolist() for b in order.batches(6, ids, 101, 8)]


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(1, 30), st.integers(1, 5))
def test_what_is_held_out_leaves_the_others_in_their_chunks(some: set[int], group: int, window: int) -> None:
    """The order of some samples of a dataset is that of all, without the others: chunks stay where they are."""
    ids, everything = np.array(sorted(some)), np.arange(100)
    order = EpochOrder(seed=1, shuffle=Shuffle(group, window))
    assert [i for i in order.sequence(2, everything, 100).tolist() if i in some] == order.sequence(
        2, ids, 100
    ).tolist()
    full = EpochOrder(seed=1).sequence(2, ids, 100)
    assert full.tolist() == ids[epoch_sequence(1, 2, len(ids))].tolist()


def test_orders_that_cannot_be() -> None:
    for trainer, trainers in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(UsageError, match=f"--trainer {trainer}: trainers are numbered from 0"):
            EpochOrder(seed=0, trainer=trainer, trainers=trainers)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shuffle"),
    [
        ("full", Shuffle()),
        ("chunks", Shuffle(512, 64)),
        ("chunks:100", Shuffle(100, 64)),
        ("chunks:100:7", Shuffle(100, 7)),
    ],
)
def test_names_of_shuffles(text: str, shuffle: Shuffle) -> None:
    found = Shuffle.parse(text, Shuffle(512, 64))
    assert found == shuffle
    assert Shuffle.parse(str(found), Shuffle()) == found


def test_the_automatic_shuffle_is_what_the_store_prefers() -> None:
    assert Shuffle.parse("auto", Shuffle(512, 64)) == FULL
    assert Shuffle.parse("auto", Shuffle(512, 64), prefers_chunks=True) == Shuffle(512, 64)
    assert Shuffle.parse("full", Shuffle(512, 64), prefers_chunks=True) == FULL


@given(st.text(max_size=20) | st.from_regex(r"chunks(:[0-9٣]{0,12}){0,4}", fullmatch=True))
def test_any_text_is_a_shuffle_or_one_line(text: str) -> None:
    try:
        found = Shuffle.parse(text, Shuffle(512, 64), what="--shuffle")
    except UsageError as error:
        assert str(error).startswith("--shuffle") and "\n" not in str(error) and len(str(error)) < 400
    else:
        assert Shuffle.parse(str(found), Shuffle()) == found


@pytest.mark.parametrize(("group", "window"), [(0, 1), (1, 0), (-1, 1), (1, MAX_GROUP + 1)])
def test_shuffles_that_cannot_be(group: int, window: int) -> None:
    with pytest.raises(UsageError, match="group and window are integers from 1"):
        Shuffle(group, window)
