"""Checkpoints: the trained layers, the optimiser and the place in the sequence, written whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.errors import ConflictError, UsageError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands: the next batch to train, and what the running epoch has summed up."""

    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0


def save(
    path: str,
    *,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
    epochs: list[dict[str, Any]],
) -> None:
    """Write a checkpoint atomically: a crash leaves the previous one. :class:`UsageError` when it cannot be written."""
    document = {
        "format": FORMAT,
        "trained": trained.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
        "identity": identity,
        "epochs": epochs,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--checkpoint {path}: cannot be written: {reason}") from None


def load(
    path: str, *, trained: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> tuple[Progress, list[dict[str, Any]]] | None:
    """Restore ``trained`` and ``optimizer``; the progress and the finished epochs' reports, None without a file.

    :class:`ConflictError` when it belongs to another job (model, data, seed, batch size, ...), since going on
    would not be the same training; :class:`UsageError` when it cannot be read.
    """
    if not Path(path).exists():
        return None
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        found, progress = document["identity"], Progress(**document["progress"])
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, expected {FORMAT}")
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise UsageError(f"--resume: {path} is not a checkpoint of hapi-train ({error})") from None
    different = sorted(k for k in identity if found.get(k) != identity[k])
    if different:
        key = different[0]
        raise ConflictError(
            f"--resume: {path} is of another job: its {key} is {found.get(key)!r}, this one's {identity[key]!r}; "
            "give the same settings, or another --checkpoint"
        )
    trained.load_state_dict(document["trained"])
    optimizer.load_state_dict(document["optimizer"])
    return progress, list(document["epochs"])
