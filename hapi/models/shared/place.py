"""The place of shared weights: by the environment, or the user's own in the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

from hapi.errors import UsageError
from hapi.models.shared.folder import WeightsFolder
from hapi.units import parse_bytes

VARIABLE, FOLDER_VARIABLE = "HAPI_SHARED_WEIGHTS", "HAPI_SHARED_WEIGHTS_DIR"
MEMORY = Path("/dev/shm")
"""Folder whose files are in memory (Linux)."""


def weights_folder() -> WeightsFolder | None:
    """Return the folder through which this user's processes share weights; None where they share none.

    ``HAPI_SHARED_WEIGHTS`` says ``off``, or the most bytes in memory (default: half of what is free in ``/dev/shm``);
    ``HAPI_SHARED_WEIGHTS_DIR`` names another folder.

    Raises:
        UsageError: a variable cannot be understood.
    """
    text = os.environ.get(VARIABLE, "").strip()
    budget = None if text in ("", "on", "off") else parse_bytes(text, VARIABLE)
    named = os.environ.get(FOLDER_VARIABLE, "")
    if named and not Path(named).is_absolute():
        raise UsageError(f"{FOLDER_VARIABLE}={named}: give the full path of a folder in memory")
    if text == "off" or budget == 0 or not hasattr(os, "posix_fallocate") or not (named or MEMORY.is_dir()):
        return None
    return WeightsFolder(Path(named) if named else MEMORY / f"hapi-weights-{os.geteuid()}", budget)
