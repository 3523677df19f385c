"""The file of ``--save-profile``."""

from __future__ import annotations

import logging

from hapi.client.session import Session
from hapi.errors import UsageError
from hapi.profiler.profile import Profile

log = logging.getLogger("hapi.client")


class ProfileFile:
    """Writes the session's profile when it is made and when it changes."""

    def __init__(self, path: str | None, session: Session) -> None:
        """``path``: None for no file."""
        self._path, self._session = path, session
        self._kept: Profile | None = None
        """Contents of the file."""

    def keep(self) -> None:
        """Write the profile if it is not the one that was written last."""
        path, planning = self._path, self._session.planning
        measured = None if planning is None else planning.profile
        if path is None or measured is None or measured is self._kept:
            return
        try:
            measured.save(path, None if planning is None else planning.job)
        except UsageError as error:  # that it can be written was tried before training began
            log.warning("--save-profile %s; training goes on", error)
        self._kept = measured
