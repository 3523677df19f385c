"""Choice of a codec by measurement.

On the way between two machines encoding, crossing and decoding overlap, so the slowest of them decides. What is kept on
a disk is encoded and written once, and read and decoded in each pass, by one thread beside the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

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
    """Way of the bytes between two machines."""

    link_rate: float = math.inf
    """Bytes per second."""
    encoder_speed: float = 1.0
    """Speed of the machine that encodes, relative to the one that measured."""
    encoder_busy: float = 0.0
    """Seconds of other work that the encoding machine has for each raw byte."""
    decoder_busy: float = 0.0
    """Seconds of other work that the decoding machine has for each raw byte."""

    def seconds(self, codec: CodecFigures) -> float:
        """Return the seconds of a raw byte: those of the slowest of encoder, link and decoder."""
        return max(
            self.encoder_busy + 1 / (codec.encode_rate * self.encoder_speed),
            1 / (codec.ratio * self.link_rate),
            self.decoder_busy + 1 / codec.decode_rate,
        )


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Way of the bytes to a disk, and back in each of some passes. Rates are bytes per second."""

    write_rate: float
    read_rate: float
    training: float = 0.0
    """Seconds of training for each raw byte, in which the next ones are read. Decoding takes processors from it."""
    computing: float = 0.0
    """Seconds of a pass for each raw byte that is computed anew, since it is not kept."""
    room: float = 1.0
    """Raw bytes for which there is room, of each one; above 1 for more."""
    reads: int = 1
    """Passes that read what is kept."""

    def seconds(self, codec: CodecFigures) -> float:
        """Return the seconds of a raw byte over all passes."""
        encode, decode = 1 / codec.encode_rate, 1 / codec.decode_rate
        read = max(decode + 1 / (codec.ratio * self.read_rate), decode + self.training)
        kept = min(1.0, self.room * codec.ratio)
        # What the disk does not write in the pass that computes it waits, or is left to the next one.
        behind = max(0.0, kept * (encode + 1 / (codec.ratio * self.write_rate)) - self.computing)
        passes = kept * read + (1 - kept) * max(self.computing, read)
        return kept * encode + behind + self.reads * passes


class Way(Protocol):
    """Way of the bytes that a codec makes shorter."""

    def seconds(self, codec: CodecFigures) -> float:
        """Return the seconds of a raw byte."""


def choose(figures: Iterable[CodecFigures], route: Way) -> CodecFigures:
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
