"""Pools of threads that are there from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose ``threads`` have begun.

    A pool begins a thread when work comes for it. On a machine that has run out of memory that fails after the work was
    put into the line, where another thread finds it when nobody waits for it any more.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    begun = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(begun.wait)  # each occupies a thread until all are there
    begun.wait()
    return pool
