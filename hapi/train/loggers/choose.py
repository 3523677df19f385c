"""Loggers by their names: whether they can be used, and their making."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hapi.errors import UsageError

if TYPE_CHECKING:
    from hapi.train.loggers.base import MetricLogger

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]

_CLASSES = {
    "csv": ("csv_files", "CsvLogger"),
    "tensorboard": ("tensorboard_events", "TensorBoardLogger"),
    "wandb": ("wandb_run", "WandbLogger"),
    "mlflow": ("mlflow_run", "MlflowLogger"),
}
_PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
_OF_DATABASES = ("sqlalchemy", "alembic")
"""Packages that MLflow needs for a database of its own."""


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check that the packages of these loggers are installed; imports none of them.

    Raises:
        UsageError: one is not; the message names the extra.
    """
    for name in names:
        packages = _PACKAGES.get(name, ())
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            packages += _OF_DATABASES
        for package in packages:
            if not _installed(package):
                raise UsageError(
                    f"--log {name}: needs {package}, which is not installed: pip install 'hapi-split[{name}]'"
                )


def _installed(package: str) -> bool:
    """Whether it is there; a folder of this name (``wandb/``) is no package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def make_loggers(names: Sequence[LoggerName], folder: str | Path, every: int = 10) -> list[MetricLogger]:
    """Return a logger for each name, for ``callbacks`` of a :class:`hapi.Trainer`.

    Args:
        names: the kinds; a name that comes twice counts once.
        folder: the run folder, which they write into.
        every: steps between two entries of steps.

    Raises:
        UsageError: a package is not installed.
    """
    check_loggers(names)
    made = []
    for name in dict.fromkeys(names):
        module, cls = _CLASSES[name]
        make: Callable[..., MetricLogger] = getattr(
            importlib.import_module(f"hapi.train.loggers.{module}"), cls
        )
        made.append(make(folder, every))
    return made
