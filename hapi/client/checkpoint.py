"""Checkpoints: the trained layers, the optimiser and the place in the sequence, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from hapi.errors import ConflictError, HapiError, UsageError
from hapi.storage.objects import open_store

FORMAT = 4


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands: the next batch to train, and what the running epoch has summed up."""

    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """The epoch's :func:`hapi.client.report.counters` so far."""

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Strict: ValueError on anything that :func:`save` would not have written."""
        progress = cls(**document)
        counts = (progress.epoch, progress.batch, progress.correct, progress.samples)
        numbers = (progress.loss_sum, *progress.counters.values())
        if not all(type(v) is int and v >= 0 for v in counts) or not all(
            type(v) in (int, float) for v in numbers
        ):
            raise ValueError("its progress is not made of counts")
        return progress


@contextmanager
def claimed(path: str) -> Iterator[None]:
    """No other job writes ``path`` while the block runs; :class:`ConflictError` when one does already."""
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock stays in the folder only while the job runs, and a killed job's counts for nothing.
        lock = open_store(str(target.parent)).lock(f"{target.name}.lock")
        lock.__enter__()
    except ConflictError:
        raise ConflictError(
            f"--checkpoint {path}: another hapi-train is writing it; wait for it, or give another file"
        ) from None
    except (OSError, HapiError) as error:
        raise UsageError(f"--checkpoint {path}: cannot be written there: {error}") from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def save(
    path: str,
    *,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
    epochs: list[dict[str, Any]],
    plan: dict[str, Any] | None,
) -> None:
    """Write a checkpoint atomically: a crash leaves the previous one. :class:`HapiError` when it cannot be written."""
    document = {
        "format": FORMAT,
        "trained": trained.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
        "identity": identity,
        "epochs": epochs,
        "plan": plan,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        # torch's own writer may hide the system's error under one about its archive.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise HapiError(f"--checkpoint {path}: cannot be written: {reason}") from None
    finally:
        with suppress(OSError):  # a file system that has become read-only, which the error above has told
            temporary.unlink(missing_ok=True)


def load(
    path: str,
    *,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
    restore_plan: Callable[[Any, Progress], None],
) -> tuple[Progress, list[dict[str, Any]]] | None:
    """Restore ``trained`` and ``optimizer``; the progress and the finished epochs' reports, None without a file.

    ``restore_plan`` gets what :func:`save` got as ``plan``, and may refuse it with a ValueError.

    :class:`ConflictError` when it belongs to another job (model, data, seed, batch size, ...), since going on
    would not be the same training; :class:`UsageError` when it cannot be read.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}, expected {FORMAT}")
        found, epochs = dict(document["identity"]), [dict(e) for e in document["epochs"]]
        progress = Progress.from_document(document["progress"])
    except FileNotFoundError:
        return None
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise UsageError(f"--resume: {path} is not a checkpoint of hapi-train ({_short(error)})") from None
    different = [k for k in identity if found.get(k) != identity[k]]
    if different:
        key = different[0]
        raise ConflictError(
            f"--resume: {path} is of another job: its {key} is {found.get(key)!r}, this one's {identity[key]!r}; "
            "give the same settings, or another --checkpoint"
        )
    try:
        trained.load_state_dict(document["trained"])
        optimizer.load_state_dict(document["optimizer"])
    except (
        Exception
    ) as error:  # the right identity and the wrong content: a damaged file, or another torchvision
        raise UsageError(f"--resume: {path} does not fit the trained layers ({_short(error)})") from None
    try:
        restore_plan(document["plan"], progress)
    except (ValueError, KeyError, TypeError, HapiError) as error:
        raise UsageError(
            f"--resume: {path} has a plan that does not fit this job ({_short(error)})"
        ) from None
    return progress, epochs


def _short(error: Exception) -> str:
    """The first sentence of what torch says at length: the next is its advice to run what is pickled there."""
    text = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
    return text if len(text) <= 200 else text[:197] + "..."
