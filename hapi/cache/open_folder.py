"""The cache folder of a process: the one that a person named, or the user's own."""

from __future__ import annotations

import logging
from pathlib import Path

from hapi.cache.folder import CacheFolder
from hapi.errors import UsageError
from hapi.paths import user_cache_folder

log = logging.getLogger("hapi.cache")


def default_path() -> Path | None:
    """``$XDG_CACHE_HOME/hapi/cache`` or ``~/.cache/hapi/cache``; None for a user without a home."""
    home = user_cache_folder()
    return None if home is None else home / "cache"


def open_cache_folder(path: str | None, budget: int | None, what: str = "--cache-dir") -> CacheFolder | None:
    """Return the cache at ``path``; nothing is made before something is kept.

    Args:
        path: its folder; None for the user's own. When that cannot be used, one warning says so.
        budget: most bytes of all files in it; None for half of what the disk has for it, at most 100 GB.
        what: name of the setting, for messages.

    Returns:
        The folder; None when the user's own cannot be used.

    Raises:
        UsageError: the folder at ``path`` belongs to something else, or cannot be written.
    """
    if path is not None:
        return CacheFolder.open(path, budget, what)
    home = default_path()
    if home is None:
        log.warning("nothing is kept in a cache: there is no home folder; %s DIR names a folder for it", what)
        return None
    try:
        return CacheFolder.open(home, budget, "cache")
    except UsageError as error:
        log.warning("nothing is kept: %s with %s DIR", error, what)
        return None
