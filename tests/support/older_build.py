"""A real build of the wire version before this one, from the repository's own history."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hapi.wire.frames import WIRE_VERSION
from support.forked import ROOT

_DEFINED = "hapi/wire/frames.py"


def older_build(folder: Path) -> Path | None:
    """Put the package of the last commit before this wire version into ``folder``; None without that history."""
    changed = _git("log", "-1", "--format=%H", f"-SWIRE_VERSION = {WIRE_VERSION}", "--", _DEFINED)
    archive = changed and _git("archive", f"{changed.decode().strip()}^", "hapi")
    if not archive:
        return None
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    text = (folder / _DEFINED).read_text()
    return folder if f"\nWIRE_VERSION = {WIRE_VERSION - 1}\n" in text else None


def _git(*arguments: str) -> bytes:
    """What git says; nothing where it is not there, or fails as in a copy without history."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=240, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return b""
