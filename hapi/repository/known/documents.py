"""Descriptions of versions in a remote store that this machine has read, by their keys and the store's marks of them.

A version's description is written once but where ``hapi gc`` packs its tensors anew, and its number may be given anew
after it was removed. The store's mark of the object differs after each write.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hapi.errors import NotFoundError
from hapi.repository.known.record_log import KnownRecords, RecordLog
from hapi.repository.versions import document_checksum, document_of
from hapi.store.base import ObjectStore

_REMEDY = "push the model again"
IN_PROCESS = "memory://"
"""Stores of one process, whose marks mean nothing in another one."""


class KnownDocuments(KnownRecords):
    """Reads descriptions of versions, each state of one once; a context manager, which keeps them; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        super().__init__(None if store.url.startswith(IN_PROCESS) else RecordLog.of(store, "versions"))
        self._lock = threading.Lock()

    def read(self, key: str) -> Mapping[str, Any]:
        """Return the document at ``key``, as :func:`hapi.repository.versions.read_document` does."""
        if self._log is None:
            return document_of(self._store, key, self._store.get(key), _REMEDY)
        mark = self._store.mark(key)
        if mark is None:
            raise NotFoundError(f"{self._store.url}/{key} does not exist")
        name = f"{key}\n{mark}"
        known = self._known.get(name)
        if known is not None:
            return document_of(self._store, key, known, _REMEDY)
        data = self._store.get(key)
        document = document_of(self._store, key, data, _REMEDY)
        if document.get("checksum") == document_checksum(document):
            with self._lock:
                self._new[name] = data
        return document
