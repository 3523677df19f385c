"""Room of servers' caches on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from hapi.errors import BadRequestError
from hapi.wire.cache_room import CacheRoom


@pytest.mark.parametrize(
    "room", [CacheRoom(bytes=0), CacheRoom(bytes=9, read=1), CacheRoom(bytes=1 << 60, read=10**12, write=5)]
)
def test_it_comes_back_as_it_was(room: CacheRoom) -> None:
    assert CacheRoom.from_json(room.to_json()) == room


@pytest.mark.parametrize(
    "document",
    [
        None, 3, {}, {"bytes": -1}, {"bytes": 1.5}, {"bytes": 1, "read": 0}, {"bytes": 1, "write": 10**13},
        {"byte": 1},
    ],
)  # fmt: skip
def test_anything_else_is_refused(document: Any) -> None:
    with pytest.raises(BadRequestError):
        CacheRoom.from_json(document)


def test_several_have_the_room_of_all_and_the_speed_of_the_slowest() -> None:
    rooms = [CacheRoom(bytes=5, read=9, write=4), CacheRoom(bytes=7, read=3), CacheRoom(bytes=1)]
    assert CacheRoom.together(rooms) == CacheRoom(bytes=13, read=3, write=4)
    assert CacheRoom.together(rooms[2:]) == CacheRoom(bytes=1)
