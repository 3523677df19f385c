"""Room and speed of a server's cache of features, as the answer to ``GET /v1/version`` tells them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hapi.wire.documents import check_int, strict_fields

MOST_BYTES = 1 << 62
MOST_RATE = 10**12
"""Bytes per second that no disk reaches."""


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """Room for features beside the store."""

    bytes: int
    """Most bytes of everything that is kept there."""
    read: int | None = None
    """Bytes per second that its disk reads; None where the server could not measure it."""
    write: int | None = None
    """Bytes per second that its disk writes."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse; fields of later versions are left out, anything else is a :class:`hapi.errors.BadRequestError`."""
        names = {"bytes": True, "read": False, "write": False}
        d = strict_fields(document, names, "cache", answer=True)
        rates = {
            name: None if d.get(name) is None else check_int(d[name], 1, MOST_RATE, name)
            for name in ("read", "write")
        }
        return cls(bytes=check_int(d["bytes"], 0, MOST_BYTES, "bytes"), **rates)

    def to_json(self) -> dict[str, int]:
        """Return the document, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def together(cls, rooms: Sequence[Self]) -> Self:
        """Return the room of several servers, each of which keeps what it was asked for; the slowest disks count."""
        reads = [room.read for room in rooms if room.read is not None]
        writes = [room.write for room in rooms if room.write is not None]
        return cls(
            bytes=sum(room.bytes for room in rooms),
            read=min(reads, default=None),
            write=min(writes, default=None),
        )
