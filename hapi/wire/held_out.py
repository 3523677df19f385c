"""The classes of the samples that a share of the dataset holds out, counted beside the store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from hapi.errors import BadRequestError
from hapi.wire.documents import check_int, strict_fields
from hapi.wire.messages import DATASETS_PATH
from hapi.wire.references import MAX_SEED, check_digest, check_name
from hapi.wire.sequences import MOST_PLACE

PART = "held_out"
"""Part of the path between the dataset's name and seed and number of samples."""
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The ``count`` samples of a dataset that ``seed`` holds out; a request for their classes."""

    name: str
    seed: int
    count: int

    @property
    def path(self) -> str:
        """Path of the request, a GET."""
        return f"{DATASETS_PATH}/{self.name}/{PART}/{self.seed}/{self.count}"

    @classmethod
    def from_path(cls, name: str, seed: str, count: str) -> Self:
        """Parse the path's parts strictly; :class:`BadRequestError` names the one that is wrong."""
        return cls(
            name=check_name(name, "dataset"),
            seed=check_int(_number(seed, "seed"), 0, MAX_SEED, "seed"),
            count=check_int(_number(count, "count"), 1, MOST_PLACE, "count"),
        )


def _number(part: str, what: str) -> int:
    if _NUMBER.fullmatch(part) is None:
        raise BadRequestError(f"{what}: expected digits in the path, got {part[:80]!r}")
    return int(part)


@dataclass(frozen=True, kw_only=True)
class HeldOutCounts:
    """Answer to :class:`HeldOut`."""

    version: str
    """Version of the dataset that they were counted in."""
    label_counts: tuple[int, ...]
    """Held-out samples of each class, as in a dataset's description; none for numbers as labels."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse; fields of later versions are left out, anything else is a :class:`BadRequestError`."""
        known = {"version": True, "label_counts": True}
        d = strict_fields(document, known, "held-out samples", answer=True)
        counts = d["label_counts"]
        if not isinstance(counts, list):
            raise BadRequestError("held-out samples: label_counts is not a list")
        return cls(
            version=check_digest(d["version"], "version"),
            label_counts=tuple(check_int(n, 0, MOST_PLACE, "label_counts") for n in counts),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {"version": self.version, "label_counts": list(self.label_counts)}
