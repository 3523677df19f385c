"""The ranks of one training and what they exchange, by ``torch.distributed``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi.client.joint.ranks import Ranks, Shared, part_size
from hapi.errors import HapiError, OtherRankError, UsageError
from hapi.train.distributed.launch import Launch
from hapi.train.distributed.meeting import leave_reason, meet, numbered, reason_of, silent_ranks

_LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out")
"""Words of torch's errors when another rank has ended."""
_STOP, _PLAN = 0, 1
"""Places in the notes that go with every step's sums."""
SILENCE_SECONDS = 1800.0
"""Default of the time after which a rank counts as lost, as torch has it."""
_ASKED_SECONDS = 3.0
"""Time in which ranks tell each other that they miss another one."""


class ProcessGroup(Ranks):
    """Several ranks, over gloo for host memory and NCCL between GPUs. A context manager.

    Notes about interrupts and plans go with the sums of each step: a step needs one exchange beside the gradients'.
    """

    def __init__(self, launch: Launch, device: torch.device, silence: float = SILENCE_SECONDS) -> None:
        """Join the others; returns when all are there.

        Args:
            launch: this rank.
            device: where its tensors are.
            silence: seconds after which a rank that the others wait for counts as lost.

        Raises:
            UsageError: as :func:`hapi.train.distributed.meeting.meet`.
            OtherRankError: they do not come.
        """
        self.rank, self.size, self.local_size = launch.rank, launch.size, launch.local_size
        self._launch, self.device = launch, device
        self._gpus = [device] if device.type == "cuda" else None
        self._notes: torch.Tensor | None = None
        """Notes of all ranks in the last step, on the device."""
        self._wants_stop = self.stops = False
        self._plan: Any = None
        self._plan_is_new = False
        self._plans = 0
        meeting = meet(launch, silence)
        self._store, self.is_first_start = meeting.store, meeting.is_first_start
        with self.explained():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                store=meeting.store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=silence),
            )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the others; those that stop together wait for the first one, which writes checkpoint and report.

        What refers to the group must be gone first: its threads would otherwise end while Python does, and abort.
        """
        if self.stops:
            with suppress(OtherRankError):
                self.gathered(None)
        elif isinstance(error, Exception) and not isinstance(error, OtherRankError):
            leave_reason(self._store, self.rank, error)
        gc.collect()
        dist.destroy_process_group()

    # -- values ----------------------------------------------------------------------------------------------

    def shared(self, make: Callable[[], Shared]) -> Shared:
        """See :meth:`Ranks.shared`."""
        made: tuple[bool, Any] | None = None
        failed: HapiError | None = None
        if self._launch.local_rank == 0:
            try:
                made = True, make()
            except HapiError as error:
                made, failed = (False, None), error
        found = self.gathered((self._launch.node, made))
        if failed is not None:
            raise failed
        for node, of_node in found:
            if node == self._launch.node and of_node is not None:
                if not of_node[0]:
                    raise OtherRankError("the first rank of this machine failed")
                value: Shared = of_node[1]
                return value
        raise OtherRankError("this machine has no first rank")

    def gathered(self, value: Shared) -> list[Shared]:
        """See :meth:`Ranks.gathered`; anything that can be pickled, between ranks of one job."""
        found: list[Any] = [None] * self.size
        with self.explained():
            dist.all_gather_object(found, value)
        return found

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """See :meth:`Ranks.summed`; the notes of this rank go along."""
        notes = torch.tensor([self._wants_stop, self._plan_is_new], dtype=values.dtype, device=values.device)
        sums = torch.cat([values, notes])
        with self.explained():
            dist.all_reduce(sums)
        self._notes = sums[len(values) :]
        return sums[: len(values)]

    def rows(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """See :meth:`Ranks.rows`."""
        sizes = [part_size(count, rank, self.size) for rank in range(self.size)]
        own = torch.zeros((max(sizes), *part.shape[1:]), dtype=part.dtype, device=part.device)
        own[: sizes[self.rank]] = part[: sizes[self.rank]]
        found = [torch.empty_like(own) for _ in sizes]
        with self.explained():
            dist.all_gather(found, own)
        return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])

    # -- layers ----------------------------------------------------------------------------------------------

    def wrapped(self, module: nn.Module, *, unused: bool = False) -> nn.Module:
        """See :meth:`Ranks.wrapped`."""
        with self.explained():
            return DistributedDataParallel(module, device_ids=self._gpus, find_unused_parameters=unused)

    def equalise(self, module: nn.Module) -> None:
        """See :meth:`Ranks.equalise`."""
        with self.explained(), torch.no_grad():
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    # -- notes -----------------------------------------------------------------------------------------------

    def want_stop(self) -> None:
        """Ask all ranks to stop before the same step."""
        self._wants_stop = True

    def publish(self, plan: Any) -> None:
        """See :meth:`Ranks.publish`; the others have it after the next :meth:`settle`."""
        self._plan, self._plan_is_new = plan, True

    def published(self) -> tuple[int, Any]:
        """See :meth:`Ranks.published`."""
        return self._plans, self._plan

    def settle(self, *, now: bool = False) -> None:
        """Do together what a rank noted in the step before; called by all ranks between the same two steps.

        Args:
            now: exchange the notes first, where no step has carried them.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
        """
        if now:
            self.summed(torch.zeros(0, device=self.device))
        if self._notes is None:
            return
        notes, self._notes = self._notes.tolist(), None
        if notes[_PLAN]:
            self._hand_on_plan()
        if notes[_STOP]:
            self.stops = True
            raise KeyboardInterrupt

    def _hand_on_plan(self) -> None:
        plans = [self._plan]
        with self.explained():
            dist.broadcast_object_list(plans, 0)
        self._plan, self._plan_is_new = plans[0], False
        self._plans += 1

    @contextmanager
    def explained(self) -> Iterator[None]:
        """See :meth:`Ranks.explained`."""
        try:
            yield
        except (RuntimeError, EOFError) as error:
            if "NCCL" in str(error) and "invalid usage" in str(error):
                raise UsageError(
                    "NCCL refuses these ranks: each needs a GPU of its own; start as many as the machine has "
                    "(--nproc-per-node), and set NCCL_DEBUG=WARN to see what it says"
                ) from None
            if not is_lost_rank(error):
                raise
            raise OtherRankError(self._lost(str(error).splitlines()[0][:160])) from None

    def _lost(self, said: str) -> str:
        if reason := reason_of(self._store, self.size):
            return reason
        silent = silent_ranks(self._store, self.rank, self.size, _ASKED_SECONDS)
        which = f"{numbered(silent)} of {self.size}" if silent else "another rank"
        return (
            f"{which} did not answer: it has ended or hangs ({said}); its own lines say why. "
            "torchrun --max-restarts N with --output DIR goes on from the last checkpoint by itself"
        )


def is_lost_rank(error: BaseException) -> bool:
    """Return whether torch's ``error`` says that another rank has ended or is silent."""
    known = isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
    return isinstance(error, RuntimeError | EOFError) and known
