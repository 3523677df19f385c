"""Small requests to one store, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from hapi import waiting
from hapi.process.threads import Threads
from hapi.store.base import ObjectStore

PARALLEL = 16
"""Requests at a time: each waits for the store, not for bytes."""
T = TypeVar("T")
U = TypeVar("U")


def side_by_side(store: ObjectStore, call: Callable[[T], U], values: Iterable[T]) -> list[U]:
    """Return ``call`` of each value, in their order. Those of a local store are made one after another.

    Args:
        store: that the calls ask.
        call: from several threads.
        values: each for one call. The first error in their order is raised once the others have ended.
    """
    wanted = list(values)
    if len(wanted) < 2 or store.local_path("packs") is not None:
        return [call(value) for value in wanted]
    threads = Threads(min(PARALLEL, len(wanted)), "hapi-known")
    try:
        work = [threads.submit(call, value) for value in wanted]
        return [waiting.result(each) for each in work]
    finally:
        threads.close()
