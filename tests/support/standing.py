"""A store whose user stands still in the middle of its work, while something else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

OPERATIONS = (
    "put", "put_new", "put_over", "put_pieces", "get", "delete", "list", "list_keys", "list_names", "exists", "size",
    "read_into", "read_many",
)  # fmt: skip


class Standing:
    """A store whose user stands still before its n-th operation, while something else happens."""

    def __init__(self, store: Any, before: int, happens: Callable[[], object]) -> None:
        self._store, self._left, self._happens = store, before, happens
        self.stood = False
        self._counting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in OPERATIONS:
            return found

        def operation(*arguments: Any, **named: Any) -> Any:
            with self._counting:
                self._left -= 1
                now = self._left == -1
            if now:
                self.stood = True
                self._happens()
            return found(*arguments, **named)

        return operation
