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

from hapi import __version__
from hapi.cli.entry import EXIT_INTERRUPTED, Leaving
from hapi.cli.shared.common import exit_code, tell
from hapi.config.fields import flag_of, flat
from hapi.errors import HapiError, OtherRankError, UsageError
from hapi.process.telemetry import open_tracer
from hapi.train.distributed.agreement import check_same
from hapi.train.distributed.launch import NEEDS_RANKS, Launch
from hapi.train.distributed.launcher_watch import stop_with_launcher

if TYPE_CHECKING:
    from hapi.client.joint.ranks import Ranks
    from hapi.train.settings import TrainSettings


STALL_SECONDS = 60.0
"""Time of a step beside what it waits for servers, with room for checkpoints and validation."""
OWN = frozenset((
    "device", "threads", "micro_batch", "memory", "store", "token_file", "ca_file", "request_size", "in_flight",
    "prefetch_bytes", "cache_dir", "cache_size", "cache_codec", "cache_memory", "timeout", "patience",
    "answer_timeout", "slow_server_rate", "slow_server_seconds", "recheck", "check_features", "offload_dir",
    "output", "checkpoint", "keep", "profile", "save_profile", "report", "html", "trace", "log", "log_every",
    "progress", "push",
))  # fmt: skip
"""Settings in which ranks may differ: places and resources of their machines, and what the first one alone writes."""
LINGER_SECONDS = 20.0
"""Longest time in which the first rank says what is wrong, before another one does."""


def check_launch(settings: TrainSettings, launch: Launch | None) -> None:
    """Check the settings of a rank; None: of a process alone.

    Raises:
        UsageError: a batch does not suffice for all ranks, all are to take one GPU, or there is only one.
    """
    if settings.sync_batchnorm and (launch is None or launch.size == 1):
        raise UsageError(NEEDS_RANKS)
    if launch is None:
        return
    if settings.bs < launch.size:
        raise UsageError(f"--bs {settings.bs}: has fewer samples than the {launch.size} ranks that share it")
    if launch.size > 1 and settings.device.startswith("cuda:"):
        raise UsageError(f"--device {settings.device}: every rank takes a GPU of its own; give cuda or auto")


def watch_torchrun(launch: Launch) -> None:
    """Let a rank of torchrun stop when that is gone; the first one says so."""
    if launch.by_torchrun:
        line = "torchrun is gone, maybe killed: its ranks stop as after SIGTERM"
        stop_with_launcher(lambda: None if launch.rank else tell("hapi-train", line))


def longest_stall(settings: TrainSettings) -> float:
    """Return the seconds that a rank may take for a step while its servers are silent, and then out of reach twice."""
    return settings.timeout + 2 * settings.patience + STALL_SECONDS


def going_on(settings: TrainSettings, ranks: Ranks) -> TrainSettings:
    """Return the settings of ranks that were checked against each other; those that were started anew go on.

    Raises:
        UsageError: a rank was given others than the first one, or runs other versions.
    """
    import torch

    versions = {"hapi": __version__, "torch": torch.__version__.partition("+")[0]}
    check_same(ranks, versions, "install the same versions for all ranks")
    given = {flag_of(name): value for name, value in flat(settings).items() if name not in OWN}
    # Without one it is embedded, by all ranks of a machine.
    given[flag_of("server")] = "given" if settings.server else "not given"
    check_same(ranks, given, "give all ranks the same settings")
    goes_on = not ranks.is_first_start and settings.checkpoint_path is not None
    return replace(settings, resume=settings.resume or goes_on)


def ranks_of(launch: Launch | None, settings: TrainSettings) -> AbstractContextManager[Ranks]:
    """Return the ranks of a training; one alone without a ``launch``, or as its only one.

    Raises:
        OtherRankError: the others do not come.
    """
    with Leaving("hapi-train"):
        from hapi.client.joint.ranks import ALONE, Ranks
        from hapi.models.devices import resolve_device
        from hapi.train.distributed.group import ProcessGroup
        from hapi.train.distributed.meeting import meet

    if launch is None:
        return nullcontext(ALONE)
    if launch.size == 1:
        alone = Ranks()
        alone.is_first_start = meet(launch, longest_stall(settings)).is_first_start
        return nullcontext(alone)
    device = resolve_device(settings.device, "--device")
    if device.type == "cuda":
        device = resolve_device(f"cuda:{launch.local_rank}", "--device")
    return ProcessGroup(launch, device, longest_stall(settings))


def train_along(settings: TrainSettings, ranks: Ranks) -> None:
    """Train as a rank that writes no file.

    Raises:
        HapiError: as :meth:`hapi.Trainer.run`.
    """
    from hapi.client.session import Session
    from hapi.train.steps.offloading import offload_terms
    from hapi.train.trainer import Trainer

    with (
        open_tracer("hapi-train", os.environ, enabled=False) as tracer,
        Session.open(
            settings,
            tracer=tracer,
            optimizer_bytes=settings.optimizer_bytes,
            offload=offload_terms(settings),
            ranks=ranks,
        ) as session,
    ):
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

    Wrong arguments, settings and requests are wrong on all ranks, and a lost rank is missed by all: the first one
    says so. The launcher ends all when one fails, so this one waits for that, and speaks only if it does not come.
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
        is_refused = error.status < 500 and not error.retryable
        if is_refused or isinstance(error, OtherRankError):
            time.sleep(LINGER_SECONDS)
        tell(program, f"rank {launch.rank}: error: {error}")
        return exit_code(error)
