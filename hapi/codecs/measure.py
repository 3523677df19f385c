"""Measurement of codecs on samples of features."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from hapi.codecs.choose import CodecFigures
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.exact import Buffer
from hapi.codecs.names import EXACT

ROUNDS = 2
"""Times that a sample is encoded and decoded; the fastest counts, as the first one warms the memory."""


def measure(
    samples: Sequence[Buffer],
    itemsize: int,
    names: Sequence[str] = EXACT,
    rows: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[CodecFigures, ...]:
    """Encode and decode ``samples``, and return what each codec achieved.

    Args:
        samples: raw bytes, a few MB in all.
        itemsize: bytes of an element.
        names: the codecs.
        rows: samples of the dataset in each of ``samples``.
        clock: seconds.
    """
    return tuple(_measured(name, samples, itemsize, rows, clock) for name in names)


def _measured(
    name: str, samples: Sequence[Buffer], itemsize: int, rows: int, clock: Callable[[], float]
) -> CodecFigures:
    raw_bytes = sum(len(memoryview(s).cast("B")) for s in samples)
    sent, encoding, decoding = 0, 0.0, 0.0
    for sample in samples:
        out = memoryview(bytearray(len(memoryview(sample).cast("B"))))
        encoded: bytes | None = None
        times: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            began = clock()
            buffers = encode(name, sample, itemsize, rows)
            between = clock()
            encoded = None if buffers is None else b"".join(buffers)
            decoding_began = clock()
            if encoded is not None:
                decode_into(name, encoded, out, itemsize, rows)
            times.append((between - began, clock() - decoding_began))
        sent += len(out) if encoded is None else len(encoded)
        encoding += min(t for t, _ in times)
        decoding += min(t for _, t in times)
    return CodecFigures(
        name=name,
        ratio=raw_bytes / sent if sent else 1.0,
        encode_rate=raw_bytes / encoding if encoding > 0 else math.inf,
        decode_rate=raw_bytes / decoding if decoding > 0 else math.inf,
    )
