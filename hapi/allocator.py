"""Settings of the C library's allocator that keep freed memory for the next tensor.

A forward pass on a CPU makes and frees a tensor for each operation. glibc gives large blocks back to the
system as soon as they are free, and threads' heaps at 64 MiB. The next tensor is then new memory, and the
kernel clears each of its pages when it is first touched. ``docs/decisions/0004-keep-freed-memory.md`` has the
costs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
"""Options of ``mallopt`` (malloc.h)."""
_NEVER = -1
_GROWTH = 16 << 20
"""Bytes that the heap grows by beyond what is asked for."""
_LARGE = 256 << 10
"""Bytes from which a block is one of its own, where those are given back at once."""
_GLIBC_LARGEST = 32 << 20
"""Bytes up to which glibc raises that bound when such blocks are freed."""
_MAPPED_BLOCKS = 65536
"""Most blocks of their own: glibc's default."""
OWN = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
_keeps_all = False
"""Whether this process asked to keep all freed memory."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Keep this process's freed memory for its next tensors; return whether that works here.

    Tensors on a CPU become cheaper. ``hapi-train`` calls it. Your own loop calls it before the first tensor::

        hapi.keep_freed_memory()
        session = hapi.Session.open(hapi.SessionSettings(store="store", model="resnet18"))

    All blocks then come from one heap, also those of threads that begin later. Nothing is done without glibc (only it
    has ``mallopt``), or if the ``environment`` (``MALLOC_...``, ``GLIBC_TUNABLES``) already configures the allocator.
    """
    if _is_configured(environment):
        return False
    global _keeps_all
    _keeps_all = _set(((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH)))
    return _keeps_all


def give_back_large_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Give each large block back to the system as soon as it is freed; return whether that works here.

    glibc keeps more the larger the blocks were that a process freed. Where memory is short that room is needed. Blocks
    that were freed before are used first, so call it early. It stands in the place of :func:`keep_freed_memory` until
    :func:`keep_large_blocks`, and respects the same ``environment``.
    """
    return _set_blocks(_LARGE, _LARGE, environment)


def keep_large_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Undo :func:`give_back_large_blocks`: what :func:`keep_freed_memory` set, if it was called.

    Otherwise it is glibc's own rule, as far as it goes by itself after large blocks.
    """
    if _keeps_all:
        return keep_freed_memory(environment)
    return _set_blocks(_GLIBC_LARGEST, 2 * _GLIBC_LARGEST, environment)


def keep_all_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Keep all freed memory, until :func:`keep_large_blocks`; return whether that works here.

    It respects the same ``environment``, and leaves threads' heaps as they are. What is kept has no bound but those of
    who calls :func:`give_back_freed_memory`.
    """
    if _is_configured(environment):
        return False
    return _set(((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)))


def _set_blocks(large: int, trimmed: int, environment: Mapping[str, str]) -> bool:
    if _is_configured(environment):
        return False
    return _set(((_MMAP_MAX, _MAPPED_BLOCKS), (_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, trimmed)))


def _is_configured(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in OWN) or "glibc.malloc." in environment.get(
        "GLIBC_TUNABLES", ""
    )


def _set(options: Sequence[tuple[int, int]]) -> bool:
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    done = [mallopt(option, value) for option, value in options]  # every one, whatever becomes of the others
    return all(done)


class _Use(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("blocks", ctypes.c_size_t * 3),
        ("hblkhd", ctypes.c_size_t),
        ("fast", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("freed", ctypes.c_size_t * 2),
    )


def bytes_in_use() -> int | None:
    """Return the bytes that are allocated and not freed in this process; None without glibc 2.33."""
    query = _function("mallinfo2")
    if query is None:
        return None
    query.restype = _Use
    use = query()
    return int(use.uordblks + use.hblkhd)


def give_back_freed_memory() -> None:
    """Give freed memory back to the system now; do nothing where the C library cannot do that."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # a system without such a library
        return None
