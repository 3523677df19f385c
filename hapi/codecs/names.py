"""Names of the codecs."""

from __future__ import annotations

from typing import Literal, get_args

Codec = Literal["none", "zeros", "planes", "zeros+planes", "fp16", "bf16", "int8"]
NONE: Codec = "none"
"""The raw bytes."""
EXACT: tuple[Codec, ...] = ("zeros", "planes", "zeros+planes")
"""Codecs that give every bit back: a bitmap of the zero elements, byte planes (those that shrink are compressed), and
both.
"""
LOSSY: tuple[Codec, ...] = ("fp16", "bf16", "int8")
"""Codecs of float32 elements that round to the nearest (even): two shorter floats, and 8 bit with a scale a sample."""
CODECS: tuple[Codec, ...] = get_args(Codec)
"""All of them, as frames name them."""
CacheCodec = Literal["auto", "none", "zeros", "planes", "zeros+planes"]
"""Encoding of what is kept: one that is exact, or the one that pays."""
AT_REST: tuple[Codec, ...] = (NONE, *EXACT, *LOSSY)
"""Codecs of records in a cache, by their number there. Those that round are taken where every bit comes back."""
ITEM_BYTES = (1, 2, 4, 8)
"""Lengths of an element that are known, in bytes."""
