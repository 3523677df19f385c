"""A process that trains one tail in one way: ``python -m benchmarks.offload.program TASK``.

It answers each line of its input (a JSON object) by one line.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hapi
from benchmarks.offload.drives import mixed_rate, use_slow_drives
from benchmarks.offload.others import LEARNING_RATE, Loop, OptimizerLoop, other_loop
from benchmarks.offload.rollback import UndoLogStates, use_undo_log
from benchmarks.offload.settings import (
    ASIDE,
    CHECKPOINTED,
    HOST,
    KEPT,
    NAIVE,
    OFFLOADED,
    OTHERS,
    RECOMPUTE,
    ROLLBACK,
    SAVED,
    SERIAL,
    SHARES,
    SWAP,
    WIDTH,
)
from hapi.models.devices import finish, resolve_device
from hapi.offload import training
from hapi.offload.activations import offload as activation_offload
from hapi.offload.layer_memory import keep_whole
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.pass_memory import highest_use
from hapi.offload.planner import Plan, Problem, by_benefit, evaluate

_LOOK_SECONDS = 0.02
_IDLE_SECONDS = 0.3
_PLENTY = 1 << 50
"""Bytes of memory, in which every training fits."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Job of one process."""

    way: str
    blocks: int
    rows: int
    memory: int
    """Bytes that Hapi is given."""
    folders: tuple[str, ...]
    rate: float = 0.0
    """Bytes a second of each drive; 0 for the disk as it is."""
    clipped: float | None = None
    device: str = "cpu"
    device_cap: int = 0
    """Bytes that may be taken of a GPU; 0 for all."""
    has_floor: bool = True
    """Whether activations get 32 MiB however little memory is left, as usual; small batches fit in them."""


class Block(nn.Module):
    """The feed-forward half of a transformer's block."""

    def __init__(self) -> None:
        """Make it with random weights."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape, (rows, ``WIDTH``)."""
        found: torch.Tensor = values + self.down(nn.functional.gelu(self.up(self.norm(values))))
        return found


class Tail(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: int, is_checkpointed: bool) -> None:
        """Make so many; checkpointed ones compute their forward pass a second time."""
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self._is_checkpointed = is_checkpointed

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        for block in self.blocks:
            values = (
                checkpoint(block, values, use_reentrant=False) if self._is_checkpointed else block(values)
            )
        return values


class Training:
    """A tail in training."""

    def __init__(self, task: TrainTask) -> None:
        """Build it."""
        torch.manual_seed(0)
        self._task, self._steps = task, 0
        self._device = resolve_device(task.device)
        self._loss = torch.zeros(())
        if task.device_cap:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.device_cap / total), self._device)
        if task.rate:
            use_slow_drives(task.rate)
        if not task.has_floor:
            vars(training)["_LEAST_BYTES"] = 0
        if task.way == ROLLBACK:
            use_undo_log()
        if task.way in SHARES:
            save_share(SHARES[task.way])
        with self._device:
            model = Tail(task.blocks, task.way == CHECKPOINTED)
            self._input, self._target = torch.randn(task.rows, WIDTH), torch.randn(task.rows, WIDTH)
        self._optimizer: torch.optim.Optimizer | None = None
        self._loop = other_loop(task.way, model, task.rows) if task.way in OTHERS else self._own_loop(model)

    def _own_loop(self, model: nn.Module) -> Loop:
        task = self._task
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if task.way in (*OFFLOADED, HOST, ASIDE):
            model, self._optimizer = hapi.offload_training(
                model,
                self._optimizer,
                memory=_PLENTY if task.way == ASIDE else task.memory,
                disk=list(task.folders) or None,
                mode=task.way if task.way in (NAIVE, SERIAL) else "active",
                activations=task.way if task.way in (SWAP, RECOMPUTE, KEPT) else "auto",
            )
        return OptimizerLoop(model, self._optimizer)

    def step(self) -> None:
        """Take one."""
        model = self._loop.model
        hooks: AbstractContextManager[Any] = nullcontext()
        if self._task.way == SAVED:
            hooks = torch.autograd.graph.save_on_cpu(pin_memory=self._device.type == "cuda")
        with hooks:
            loss = nn.functional.mse_loss(model(self._input), self._target)
        self._loop.backward(loss)
        if self._task.clipped is not None:
            share, count = self._task.clipped, self._steps
            clips = int((count + 1) * share) > int(count * share)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if clips else 1e9)
        self._loop.step()
        self._loss = loss.detach()
        self._steps += 1

    def take_turn(self, steps: int) -> dict[str, Any]:
        """Take one step that does not count and ``steps`` that do; wait until nothing is written any more."""
        self.step()
        first = self._loss.item()  # waits for a GPU
        before, began = self.counts(), time.perf_counter()
        for _ in range(steps):
            self.step()
        last = self._loss.item()
        finish(self._device)
        seconds, after = (time.perf_counter() - began) / steps, self.counts()
        _await_idle()
        moved = {name: (after[name] - before[name]) / steps for name in before}
        return {"seconds": seconds, "losses": [first, last], **moved, **self._plan()}

    def _plan(self) -> dict[str, Any]:
        """Return the bytes of activations that the plan swaps, and the layers that it recomputes."""
        if not isinstance(self._optimizer, OffloadedOptimizer):
            return {"swapped": 0, "recomputed": 0}
        found = self._optimizer.report()["activations"]
        recomputed = sum(layer["action"] == "recompute" for layer in found["layers"])
        return {"swapped": found.get("swapped_bytes", 0), "recomputed": recomputed}

    def counts(self) -> dict[str, float]:
        """Return what this process took and moved so far."""
        use = resource.getrusage(resource.RUSAGE_SELF)
        taken = {"processor": use.ru_utime + use.ru_stime, "system": use.ru_stime, "faults": use.ru_minflt}
        if not isinstance(self._optimizer, OffloadedOptimizer):
            return {**taken, "bytes": 0, "waited": 0.0, "redone": 0}
        found, states = self._optimizer.report(), self._optimizer._store
        swapped = found["activations"]
        logged = states.logged_bytes if isinstance(states, UndoLogStates) else 0
        return {
            **taken,
            "bytes": logged + sum(each["bytes_read"] + each["bytes_written"] for each in (found, swapped)),
            "waited": found["waited_seconds"] + swapped["seconds_waited"],
            "redone": found["redone_steps"],
        }

    def needs(self) -> dict[str, int]:
        """Return the bytes that are taken beside a pass, and those of a pass: the least with which any layer may be
        computed again, and the most, with which all is kept."""
        if (
            not isinstance(self._optimizer, OffloadedOptimizer)
            or self._optimizer._activations._problem is None
        ):
            return {}
        activations, problem = self._optimizer._activations, self._optimizer._activations._problem
        layers, in_use = problem.layers, problem.machine.in_use_bytes
        largest = max((layer.saved_bytes for layer in layers), default=0)
        # Bytes on their way take an eighth of the memory, or one more tensor.
        smallest = int((largest + problem.other_bytes + 2 * in_use) * 8 / 7)
        kept = highest_use(
            layers, [keep_whole(one) for one in layers], 0, problem.events, has_tier_below=False
        )
        constant = self._task.memory - activations._memory
        return {"constant": constant, "least": smallest, "most": kept.peak}

    def close(self) -> None:
        """Remove what lies on the disk."""
        if isinstance(self._optimizer, OffloadedOptimizer):
            self._optimizer.close()


def save_share(share: float) -> None:
    """Let activations be planned by a share of the layers that are saved, in the order of Algorithm 1, from now on."""

    def planned(problem: Problem) -> Plan:
        order = by_benefit(problem)
        return evaluate(problem, order[: round(share * len(order))])

    vars(activation_offload)["plan_activations"] = planned


class Memory:
    """Highest resident and anonymous memory of this process, and of its tensors on a GPU."""

    def __init__(self, device: str) -> None:
        """Look from now on."""
        self._anonymous, self._device = 0, torch.device(device)
        threading.Thread(target=self._watch, name="hapi-memory", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._anonymous = max(self._anonymous, _status("RssAnon"))
            time.sleep(_LOOK_SECONDS)

    def peaks(self) -> dict[str, int]:
        """Return all in bytes."""
        on_device = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return {"peak": _status("VmHWM"), "anonymous": self._anonymous, "device_peak": on_device}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _await_idle() -> None:
    """Wait until this process has moved no byte from or to a disk for a while."""
    before, since = "", time.monotonic()
    while time.monotonic() - since < _IDLE_SECONDS:
        now = Path("/proc/self/io").read_text(encoding="ascii")
        moved = "".join(line for line in now.splitlines() if line.startswith(("read_bytes", "write_bytes")))
        if moved != before:
            before, since = moved, time.monotonic()
        time.sleep(_LOOK_SECONDS)


def _disk_bytes(folders: tuple[str, ...]) -> int:
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


def main() -> int:
    """Answer lines until there are no more."""
    known = json.loads(sys.argv[1])
    task = TrainTask(**{**known, "folders": tuple(known["folders"])})
    # Where the memory of a shared machine ends, this process is to end, and no other.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    memory, trained = Memory(task.device), Training(task)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "warm":
                for _ in range(order["steps"]):
                    trained.step()
                _await_idle()
                answer: dict[str, Any] = {}
            elif order["do"] == "needs":
                answer = trained.needs()
            elif order["do"] == "rate":
                folders = [Path(folder) for folder in task.folders]
                answer = {"rate": mixed_rate(folders, order["bytes"], task.rate)}
            else:
                answer = trained.take_turn(order["steps"])
            print(json.dumps({**answer, **memory.peaks(), "on_disk": _disk_bytes(task.folders)}), flush=True)
    finally:
        trained.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
