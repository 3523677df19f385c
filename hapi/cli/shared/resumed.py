"""``--resume`` alone: the run folder as an argument, and the settings that its checkpoint has kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi.cli.entry import Leaving
from hapi.config.settings import Loaded
from hapi.errors import UsageError
from hapi.train.checkpoints.checkpoint_files import existing, goes_on
from hapi.train.settings import TrainSettings

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
"""Endings of files of settings."""


def run_folder(experiment: str | None, overrides: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the file of settings and the flags, where the argument may be a run folder: ``--resume DIR``.

    Raises:
        UsageError: it is a folder, and there is no run to go on with in it, or nobody asks for that.
    """
    if experiment is None:
        return experiment, overrides
    place = Path(experiment)
    if overrides.get("resume") and not place.exists() and place.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--resume {experiment}: no run to go on with: there is no such folder")
    if not place.is_dir():
        return experiment, overrides
    if not overrides.get("resume"):
        raise UsageError(
            f"{experiment}: is a folder, no file of settings; to go on with the run in it, give --resume {experiment}"
        )
    if "output" in overrides:
        raise UsageError(f"--output {overrides['output']}: the run folder is given already, {experiment}")
    given = {**overrides, "output": experiment}
    path = str(overrides.get("checkpoint") or TrainSettings(output=experiment).checkpoint_path)
    if not existing(path):
        raise UsageError(f"--resume {experiment}: no run to go on with: there is no {path}")
    return None, given


def as_kept(loaded: Loaded[TrainSettings]) -> Loaded[TrainSettings]:
    """Return the settings with those of the checkpoint to go on from where none are given.

    Raises:
        ConflictError: a setting is given that the training to go on with has otherwise.
    """
    path = loaded.value.checkpoint_path
    if path is None or not goes_on(path, loaded.value.resume):
        return loaded
    with Leaving("hapi-train"):  # torch reads the checkpoint
        from hapi.train.checkpoints.kept_settings import read_kept, with_kept

        kept = read_kept(path)
    return loaded if kept is None else with_kept(loaded, kept)
