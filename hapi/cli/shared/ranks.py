"""``hapi-train`` under torchrun: its ranks, of which the first one alone prints and writes files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hapi.cli.entry import EXIT_INTERRUPTED, Leaving
from hapi.cli.shared.common import exit_code, tell
from hapi.errors import HapiError, OtherRankError, UsageError
from hapi.train.distributed.launch import Launch

if TYPE_CHECKING:
    from hapi.client.joint.ranks import Ranks
    from hapi.train.settings import TrainSettings


LINGER_SECONDS = 20.0
"""Longest time in which the first rank says what is wrong, before another one does."""


def as_launched(settings: TrainSettings, launch: Launch) -> TrainSettings:
    """Return the settings of a rank: its own GPU, and going on from the checkpoint when torchrun started it again.

    Raises:
        UsageError: a batch does not suffice for all ranks, or all are to take one GPU.
    """
    if settings.bs < launch.size:
        raise UsageError(f"--bs {settings.bs}: has fewer samples than the {launch.size} ranks that share it")
    if settings.device.startswith("cuda:"):
        raise UsageError(f"--device {settings.device}: every rank takes a GPU of its own; give cuda or auto")
    goes_on = launch.restarts > 0 and settings.checkpoint_path is not None
    return replace(settings, resume=settings.resume or goes_on)


def ranks_of(launch: Launch | None, settings: TrainSettings) -> AbstractContextManager[Ranks]:
    """Return the ranks of a training; one alone without a ``launch``.

    Raises:
        OtherRankError: the others do not come.
    """
    with Leaving("hapi-train"):
        from hapi.client.joint.ranks import ALONE
        from hapi.models.devices import resolve_device
        from hapi.train.distributed.group import ProcessGroup

    if launch is None:
        return nullcontext(ALONE)
    device = resolve_device(settings.device, "--device")
    if device.type == "cuda":
        device = resolve_device(f"cuda:{launch.local_rank}", "--device")
    return ProcessGroup(launch, device)


def train_along(settings: TrainSettings, ranks: Ranks) -> None:
    """Train as a rank that writes no file.

    Raises:
        HapiError: as :meth:`hapi.Trainer.run`.
    """
    from hapi.client.session import Session
    from hapi.train.trainer import Trainer

    with Session.open(
        settings,
        optimizer_bytes=settings.optimizer_bytes,
        offload=settings.offload_terms,
        ranks=ranks,
    ) as session:
        output = ranks.gathered(settings.output)[0]
        Trainer(session, replace(settings, output=output, save_profile=None)).run()


@contextmanager
def silent() -> Iterator[None]:
    """Print nothing but tracebacks, and what :func:`along` says."""
    logging.getLogger("hapi").setLevel(logging.CRITICAL)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def along(body: Callable[[], int], program: str, launch: Launch) -> int:
    """Return the exit code of ``body``; its own errors are one line with the rank.

    Wrong arguments and settings are wrong on all ranks, and a lost rank is missed by all: the first one says so. The
    launcher ends all when one fails, so this one waits for that, and speaks only if it does not come.
    """
    try:
        return body()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as ended:
        if ended.code:
            time.sleep(LINGER_SECONDS)
        raise
    except HapiError as error:
        if isinstance(error, UsageError | OtherRankError):
            time.sleep(LINGER_SECONDS)
        tell(program, f"rank {launch.rank}: error: {error}")
        return exit_code(error)
