"""The server's own memory: what requests read, decode and send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hapi.allocator import give_back_freed_memory
from hapi.errors import HostMemoryError
from hapi.memory_errors import is_out_of_memory

SHORT_SECONDS = 1.0
"""When whoever met a machine without memory is to ask again."""


def out_of_memory() -> HostMemoryError:
    """The error for a request that found no memory on the server's machine."""
    return HostMemoryError(
        "the server's machine is out of memory; ask again or another server, and have its operator lower "
        "--host-memory, --device-memory or --max-running",
        retry_after=SHORT_SECONDS,
    )


@contextmanager
def halving(halve: Callable[[], object]) -> Iterator[None]:
    """Have ``halve()`` called for a block that runs out of memory, and its client asked to come back.

    Raises :class:`HostMemoryError` then; the next request of its kind is to take half as much.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        halve()
        give_back_freed_memory()
        raise out_of_memory() from error
