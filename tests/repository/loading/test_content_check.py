"""The check of a content whose parts arrive in any order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hapi.models.graph.digest import content_digest
from hapi.repository import checksums
from hapi.repository.checksums import TensorChecksum
from hapi.repository.loading import checks
from hapi.repository.loading.checks import ContentCheck, VerifiedContents


def parts_of(data: bytes, cuts: list[int]) -> list[tuple[int, memoryview]]:
    ends = sorted({0, *(cut % len(data) for cut in cuts), len(data)})
    return [(a, memoryview(data)[a:b]) for a, b in itertools.pairwise(ends)]


def checksum_of(data: bytes | bytearray) -> str:
    """The definition, written down a second time."""
    size = checksums.CHECKED_BYTES
    pieces = [xxhash.xxh3_64_digest(data[at : at + size]) for at in range(0, len(data), size)]
    return xxhash.xxh3_64_hexdigest(data if len(pieces) < 2 else b"".join(pieces))


@pytest.fixture(autouse=True, scope="module", params=[64, checksums.CHECKED_BYTES])
def piece_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "CHECKED_BYTES", request.param)
        patch.setattr(checks, "CHECKED_BYTES", request.param)
        yield request.param


@given(st.binary(max_size=300), st.lists(st.integers(0, 299), max_size=8))
def test_any_split_into_reads_has_the_same_checksum(data: bytes, cuts: list[int]) -> None:
    found = TensorChecksum()
    for _, part in parts_of(data, cuts) if data else []:
        found.update(part)
    assert found.hexdigest() == TensorChecksum(data).hexdigest() == checksum_of(data)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2399))
def test_a_flipped_bit_anywhere_is_found(data: bytes, bit: int) -> None:
    damaged = bytearray(data)
    damaged[bit // 8 % len(data)] ^= 1 << bit % 8
    assert TensorChecksum(bytes(damaged)).hexdigest() != checksum_of(data)
    check = ContentCheck(len(data), checksum_of(data), None)
    assert check.add(0, memoryview(damaged)) and not check.is_sound


@given(st.binary(min_size=129, max_size=300))
def test_swapped_pieces_are_found(data: bytes) -> None:
    swapped = data[64:128] + data[:64] + data[128:]
    assert swapped == data or TensorChecksum(swapped).hexdigest() != checksum_of(data)


def test_a_later_piece_does_not_wait_for_an_earlier_one(piece_bytes: int) -> None:
    data = bytes(range(256)) * (piece_bytes // 256 + 1) * 2
    check = ContentCheck(len(data), checksum_of(data), None)
    assert not check.add(piece_bytes, memoryview(data)[piece_bytes:])
    assert check.is_hashed(piece_bytes, len(data)) and not check.is_hashed(0, piece_bytes)
    assert check.add(0, memoryview(data)[:piece_bytes]) and check.is_sound


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 299), max_size=8), st.randoms())
def test_parts_in_any_order_have_the_checksum_of_the_whole(
    data: bytes, cuts: list[int], random: object
) -> None:
    checksum, digest = checksum_of(data), content_digest(data)
    parts = parts_of(data, cuts)
    random.shuffle(parts)  # type: ignore[attr-defined]
    for expected in (None, digest):
        check = ContentCheck(len(data), checksum, expected)
        done = [check.add(start, part) for start, part in parts]
        assert done == [False] * (len(parts) - 1) + [True] and check.is_sound
        assert check.is_hashed(0, len(data))


@pytest.mark.parametrize("position", [0, 5000, 9999])
def test_a_flipped_bit_is_found(position: int) -> None:
    data = bytearray(range(256)) * 40
    data = data[:10_000]
    checksum, digest = checksum_of(data), content_digest(bytes(data))
    data[position] ^= 16
    check = ContentCheck(len(data), checksum, None)
    assert check.add(0, memoryview(data)) and not check.is_sound
    forged = ContentCheck(len(data), checksum_of(data), digest)
    assert forged.add(0, memoryview(data)) and not forged.is_sound


def test_parts_from_several_threads() -> None:
    data = bytes(range(256)) * 4096
    check = ContentCheck(len(data), checksum_of(data), content_digest(data))
    parts = parts_of(data, [n * 997 * 3 for n in range(300)])
    done: list[bool] = []

    def run(number: int) -> None:
        for start, part in parts[number::4]:
            done.append(check.add(start, part))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.count(True) == 1 and check.is_sound


def test_a_process_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_REMEMBERED", 3)
    known = VerifiedContents()
    for number in range(4):
        known.add(("store", "pack", number, "digest"))
    assert ("store", "pack", 3, "digest") in known and ("store", "pack", 0, "digest") not in known
