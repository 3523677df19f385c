"""An event loop that outlives a machine without memory.

asyncio ends when an error cannot even be logged, and leaves a connection open whose error it could not tell. A server
must do neither: memory comes back, and a client that hears nothing waits for its own time limit.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from hapi.allocator import give_back_freed_memory
from hapi.process.memory_errors import is_out_of_memory

T = TypeVar("T")

_WITHOUT_MEMORY = (MemoryError, SystemError)
"""The second is what Python raises that has no memory even for the first."""
ROOM_BYTES = 8 << 20
_SMALL, _ARENA_BYTES = 448, 1 << 20
"""An object that the allocator for small ones still takes, and what that asks of the system at a time."""
PAUSE_SECONDS = 0.01
"""Time for other threads to give back memory before the loop goes on."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end as :func:`asyncio.run` does, however often the loop is out of memory meanwhile."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(_handle)
        task, _room = loop.create_task(main), reserve_small_objects()
        while True:
            try:
                return loop.run_until_complete(task)
            except _WITHOUT_MEMORY:
                if task.done():
                    raise
                _recover()


def _recover() -> None:
    """Free what nobody uses, and give other threads time to do so too."""
    with suppress(*_WITHOUT_MEMORY):
        gc.collect()  # errors and the frames that they hold are in circles
        give_back_freed_memory()
    time.sleep(PAUSE_SECONDS)


def reserve_small_objects(nbytes: int = ROOM_BYTES) -> list[bytes]:
    """Have Python's allocator hold about ``nbytes`` for objects of up to 512 bytes, as long as the result is kept.

    Large arrays, which is what memory runs out for, cannot take that room; errors, tasks and answers need little else.
    """
    filling = [bytes(_SMALL) for _ in range(nbytes // _SMALL)]
    return filling[
        :: _ARENA_BYTES // (2 * _SMALL)
    ]  # at least one in each arena, which is thus never given back


async def pause(seconds: float) -> None:
    """Sleep, or only let others have their turn where there is no memory for a timer."""
    with suppress(MemoryError):
        await asyncio.sleep(seconds)
        return
    with suppress(MemoryError):
        await asyncio.sleep(0)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Close the connection that an error is about, if memory was short, and log it as far as that can be done."""
    error, transport = context.get("exception"), context.get("transport")
    if isinstance(error, Exception) and is_out_of_memory(error) and transport is not None:
        with suppress(Exception):
            transport.abort()
    with suppress(Exception):
        loop.default_exception_handler(context)
