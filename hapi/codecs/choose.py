"""Choice of a codec by measurement: encoding, crossing and decoding overlap, so the slowest of them decides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hapi.codecs.names import NONE

LEAST_GAIN = 0.01
"""Part of the time that a codec must save to be chosen."""


@dataclass(frozen=True, kw_only=True)
class CodecFigures:
    """Ratio and speeds of a codec on features of one cut."""

    name: str
    ratio: float
    """Raw bytes for each encoded one; 1 for a codec that does not shrink them."""
    encode_rate: float
    """Raw bytes per second of one thread."""
    decode_rate: float
    """Raw bytes per second of one thread."""


RAW = CodecFigures(name=NONE, ratio=1.0, encode_rate=math.inf, decode_rate=math.inf)
"""The raw bytes, which cost nothing but their way."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Way of the bytes between two machines, or to a disk and back. Rates are bytes per second."""

    link_rate: float = math.inf
    disk_rate: float = math.inf
    encoder_speed: float = 1.0
    """Speed of the machine that encodes, relative to the one that measured."""
    encoder_busy: float = 0.0
    """Seconds of other work that the encoding machine has for each raw byte."""
    decoder_busy: float = 0.0
    """Seconds of other work that the decoding machine has for each raw byte."""

    def seconds(self, codec: CodecFigures) -> float:
        """Return the seconds of a raw byte: those of the slowest of encoder, link, disk and decoder."""
        return max(
            self.encoder_busy + 1 / (codec.encode_rate * self.encoder_speed),
            1 / (codec.ratio * self.link_rate),
            1 / (codec.ratio * self.disk_rate),
            self.decoder_busy + 1 / codec.decode_rate,
        )


def choose(figures: Iterable[CodecFigures], route: Route) -> CodecFigures:
    """Return the codec with the least seconds; :data:`RAW` unless one gains more than :data:`LEAST_GAIN`.

    Args:
        figures: of the codecs that may be chosen.
        route: of the bytes.
    """
    best = min(figures, key=route.seconds, default=RAW)
    return best if route.seconds(best) < (1 - LEAST_GAIN) * route.seconds(RAW) else RAW


def pays_below(codec: CodecFigures) -> float:
    """Return the link rate, in bytes per second, below which a codec gains where nothing else is at work."""
    return (1 - LEAST_GAIN) * min(codec.encode_rate, codec.decode_rate) if codec.ratio > 1 else 0.0
