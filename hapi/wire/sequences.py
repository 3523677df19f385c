"""Parts of a request that describe the order in which it asks.

It may name a range of an epoch's sequence instead of sample ids, since both tiers compute the same order. Or
it names ids, and the chunk windows that they come from: the server then reads together the chunks that open
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hapi.errors import BadRequestError, TooLargeError
from hapi.wire.documents import check_int, strict_fields

_MOST_NUMBER = (1 << 63) - 1
MOST_GROUP = (1 << 31) - 1
MOST_PLACE = 1 << 48
FULL = "full"


@dataclass(frozen=True, kw_only=True)
class SequenceRange:
    """Places ``start`` to ``stop - 1`` of the order of a whole dataset in one epoch
    (:mod:`hapi.data.epoch_order`).
    """

    seed: int
    epoch: int
    group: int
    """Samples of a chunk; 0 for the full permutation."""
    window: int
    """Chunks open at a time; 0 for the full permutation."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def windows(self) -> ChunkWindows | None:
        """Chunk windows of the order; None for the full permutation."""
        if not self.group:
            return None
        return ChunkWindows(seed=self.seed, epoch=self.epoch, group=self.group, window=self.window)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], max_samples: int) -> Self:
        """Parse the fields ``sequence``, ``start`` and ``stop`` of a request for up to ``max_samples``
        samples.

        Raises:
            BadRequestError: a field is missing, unknown or wrong; the message names it.
        """
        d = strict_fields(fields["sequence"], dict.fromkeys(("seed", "epoch", "shuffle"), True), "sequence")
        group, window = _shuffle(d["shuffle"])
        start = check_int(fields["start"], 0, MOST_PLACE, "start")
        stop = check_int(fields["stop"], start + 1, MOST_PLACE + 1, "stop")
        if stop - start > max_samples:
            raise TooLargeError(
                f"stop: {stop - start} samples in one request, at most {max_samples}; send several requests"
            )
        return cls(
            seed=check_int(d["seed"], 0, _MOST_NUMBER, "sequence.seed"),
            epoch=check_int(d["epoch"], 0, _MOST_NUMBER, "sequence.epoch"),
            group=group,
            window=window,
            start=start,
            stop=stop,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a request."""
        shuffle = {"group": self.group, "window": self.window} if self.group else FULL
        sequence = {"seed": self.seed, "epoch": self.epoch, "shuffle": shuffle}
        return {"sequence": sequence, "start": self.start, "stop": self.stop}


def _shuffle(value: Any) -> tuple[int, int]:
    if value == FULL:
        return 0, 0
    if not isinstance(value, dict):
        raise BadRequestError(f'sequence.shuffle: expected "{FULL}" or an object of group and window')
    d = strict_fields(value, {"group": True, "window": True}, "sequence.shuffle")
    return (
        check_int(d["group"], 1, MOST_GROUP, "sequence.shuffle.group"),
        check_int(d["window"], 1, MOST_GROUP, "sequence.shuffle.window"),
    )


@dataclass(frozen=True, kw_only=True)
class ChunkWindows:
    """The order that a request's ids come from: ``group`` consecutive ids per chunk, ``window`` chunks open
    at a time.
    """

    seed: int
    """Seed of an epoch's order, shared by the requests of all its trainers, and by no other job."""
    epoch: int
    group: int
    window: int

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` for anything else."""
        if not isinstance(value, dict):
            raise BadRequestError("windows: expected an object of seed, epoch, group and window")
        d = strict_fields(value, dict.fromkeys(("seed", "epoch", "group", "window"), True), "windows")
        return cls(
            seed=check_int(d["seed"], 0, _MOST_NUMBER, "windows.seed"),
            epoch=check_int(d["epoch"], 0, _MOST_NUMBER, "windows.epoch"),
            group=check_int(d["group"], 1, MOST_GROUP, "windows.group"),
            window=check_int(d["window"], 1, MOST_GROUP, "windows.window"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the field of a request."""
        return {"seed": self.seed, "epoch": self.epoch, "group": self.group, "window": self.window}
