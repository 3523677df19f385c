"""The structures of models that this machine has seen, in the user's cache: related models are opened without them.

DStore caches the layers' metadata on the client (section 3): nothing in it is ever overwritten, so that processes share
it without synchronisation. A structure is named by the digest of its bytes: a damaged file is found, and is a miss.
They come from a server or a remote store.

    $XDG_CACHE_HOME/hapi/structures/DIGEST.json
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from hapi.atomic import write_atomically
from hapi.errors import BadRequestError, DataError
from hapi.paths import user_cache_folder
from hapi.repository.known.documents import IN_PROCESS
from hapi.repository.structure import ModelStructure
from hapi.store.base import ObjectStore
from hapi.wire.references import check_digest

MAX_BYTES = 64 << 20
"""Most bytes of all structures that are kept; a network of 1,000 layers has about 0.2 MB."""
_SUFFIX = ".json"


class StructureCache:
    """Structures in a folder, shared by processes, the longest unused out first. No failure of the disk is an error."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        """Keep at most ``max_bytes`` bytes in ``folder``; None: the user's, or nothing for a user without a home."""
        home = user_cache_folder()
        self._folder = home / "structures" if folder is None and home is not None else folder
        self._max_bytes = max_bytes

    @classmethod
    def of(cls, store: ObjectStore) -> Self | None:
        """Return the user's, for the structures of ``store``; None where that is as fast: a folder, or this process."""
        is_near = store.local_path("packs") is not None or store.url.startswith(IN_PROCESS)
        return None if is_near else cls()

    def find(self, digest: str, describe: Callable[[], ModelStructure]) -> ModelStructure:
        """Return the structure of this digest, from the folder or, if it has none, from ``describe()``.

        Raises:
            BadRequestError: ``describe()`` returned another structure.
        """
        found = self._read(check_digest(digest, "structure"))
        if found is None:
            found = describe()
            if found.digest != digest:
                raise BadRequestError(
                    f"the server sent structure {found.digest} instead of {digest}; ask another one"
                )
            self._keep(found)
        return found

    def _read(self, digest: str) -> ModelStructure | None:
        if self._folder is None:
            return None
        path = self._folder / f"{digest}{_SUFFIX}"
        try:
            if path.stat().st_size > self._max_bytes:
                return None
            found = ModelStructure.from_bytes(path.read_bytes(), digest, str(path))
            os.utime(path)  # the longest unused is removed first
            return found
        except (OSError, DataError):
            return None

    def _keep(self, structure: ModelStructure) -> None:
        data = structure.to_bytes()
        if self._folder is None or len(data) > self._max_bytes:
            return
        with suppress(OSError):  # a full disk: it is asked for again the next time
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{structure.digest}{_SUFFIX}", data)
            self._trim()

    def _trim(self) -> None:
        """Remove the structures that were not used for longest, until the others are within the bound."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process removed it
                    if entry.name.endswith(_SUFFIX):
                        facts = entry.stat()
                        found.append((facts.st_mtime_ns, facts.st_size, entry.path))
        excess = sum(size for _, size, _ in found) - self._max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            with suppress(OSError):
                Path(path).unlink()
            excess -= size
