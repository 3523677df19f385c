"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(0)`` to ``work(count - 1)``, each in its own thread; raises the first error when all have ended."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]
