"""The folder that a run leaves by default: its name, and its making."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from hapi.errors import UsageError

RUNS = "runs"
"""Folder of run folders, in the working directory."""
MODEL_FILE, BEST_FILE = "model.safetensors", "best.safetensors"
"""Names in a run folder: the network after the last epoch, and after the best one."""
LOG_FILE, REPORT_FILE = "log.txt", "report.json"
"""Names of the run's other files, beside that of the checkpoint."""

_PART = 60
"""Most characters of a dataset's or a model's name in the folder's."""
_TRIES = 1000


def run_name(dataset: str, model: str, now: datetime) -> str:
    """Return a run's name: dataset, model, date and time, such as ``flowers-resnet50-20261124-150102``."""
    return f"{_plain(dataset)}-{_plain(model)}-{now:%Y%m%d-%H%M%S}"


def new_run_folder(dataset: str, model: str, parent: str = RUNS) -> Path:
    """Make the folder of a run that begins now; no other run gets the same one.

    Args:
        dataset: the dataset's name.
        model: the model as the user named it.
        parent: folder to make it in; made too.

    Raises:
        UsageError: it cannot be made.
    """
    name = run_name(dataset, model, datetime.now())
    folder = Path(parent, name)
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        for number in range(2, _TRIES):
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # of another run that began in the same second
                folder = Path(parent, f"{name}-{number}")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}; {ANOTHER}") from None
    raise UsageError(f"{folder}: exists, and so do all before it; {ANOTHER}")


ANOTHER = "name a folder with --output DIR, or none with --no-output"
"""Advice where the default folder is not to be had."""


def _plain(text: str) -> str:
    """``text`` as a part of a file name: ``timm:vit`` and ``pkg.net:make`` have characters that shells take."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[-_PART:].lstrip("-.") or "run"
