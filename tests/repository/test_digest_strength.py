"""Digests that decide which weights tenants share cannot be forged, as a checksum can: here one is."""

from __future__ import annotations

import torch
import xxhash

from hapi.models.graph.digest import content_digest, content_key
from hapi.models.tensors import tensor_bytes

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""What XXH3 mixes with its input; it is the same for all who do not give one of their own."""
LANES, WORD, STRIPE = 8, 8, 64
MASK = (1 << 64) - 1


def word(data: bytes | bytearray, stripe: int, lane: int) -> int:
    place = stripe * STRIPE + lane * WORD
    return int.from_bytes(data[place : place + WORD], "little")


def secret_word(stripe: int, lane: int) -> int:
    place = (stripe + lane) * WORD
    return int.from_bytes(SECRET[place : place + WORD], "little")


def accumulated(data: bytes | bytearray, stripes: range) -> list[int]:
    """What these stripes of one block add to the eight accumulators of XXH3."""
    sums = [0] * LANES
    for stripe in stripes:
        for lane in range(LANES):
            value = word(data, stripe, lane)
            keyed = value ^ secret_word(stripe, lane)
            sums[lane ^ 1] += value
            sums[lane] += (keyed & 0xFFFFFFFF) * (keyed >> 32)
    return [total & MASK for total in sums]


def forged(known: bytes, wanted: bytes) -> bytes:
    """``wanted`` with 128 bytes changed such that its checksum is that of ``known``: no search, only sums.

    In the first two stripes each word is chosen such that its product is nothing: half of its bits are then free, the
    lower half in one stripe and the upper half in the other, and their sum can be any number.
    """
    found = bytearray(wanted)
    target, rest = accumulated(known, range(16)), accumulated(wanted, range(2, 16))
    for lane in range(LANES):
        missing = (target[lane ^ 1] - rest[lane ^ 1]) & MASK
        upper_key, lower_key = secret_word(0, lane) & 0xFFFFFFFF, secret_word(1, lane) >> 32
        missing = (missing - upper_key - (lower_key << 32)) & MASK
        first = upper_key | (missing >> 32) << 32
        second = lower_key << 32 | missing & 0xFFFFFFFF
        found[lane * WORD : (lane + 1) * WORD] = first.to_bytes(WORD, "little")
        found[STRIPE + lane * WORD : STRIPE + (lane + 1) * WORD] = second.to_bytes(WORD, "little")
    return bytes(found)


def test_other_weights_of_a_known_checksum_have_another_digest() -> None:
    """Weights that everybody knows, and such as somebody else would like to have used in their place."""
    known = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    poisoned = -known
    data = bytes(tensor_bytes(known))
    # All that differs must be in the first block here; the next blocks could be forged in the same way.
    wanted = bytes(tensor_bytes(poisoned))[:1024] + data[1024:]
    other = forged(data, wanted)
    assert other != data and xxhash.xxh3_128_digest(other) == xxhash.xxh3_128_digest(data)
    assert other[128:1024] == wanted[128:1024], "the rest is as the forger likes it"
    assert content_digest(other) != content_digest(data)
    assert content_key(content_digest(other), known) != content_key(content_digest(data), known)
