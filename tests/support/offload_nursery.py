"""A process that trains in children of its own, so that a killed one costs no start of Python and torch.

It reads lines ``FOLDER STEPS LOOP`` and prints each child's number, its lines, and how it ended.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from support.offload_loops import (
    accumulated,
    clipped,
    groups_of,
    images_model,
    offloaded,
    plain,
    tied_model,
)

SMALL = 1 << 14
"""Values of a parameter of which no change is missed."""


def half() -> nn.Module:
    """Make a model in half precision, whose master weights lie on the disks."""
    return images_model().bfloat16()


def changed(model: nn.Module, optimizer: Any, step: int) -> None:
    """Change parameters after the step, so that it shows when that is done twice, or not at all.

    After some twenty steps clamping changes a few values of some parameters; of large ones it is done as the docs say.
    """
    plain(model, optimizer, step)
    for parameter in (one for one in model.parameters() if one.requires_grad):
        with torch.no_grad():
            if step % 2:
                (parameter.data if parameter.numel() <= SMALL else parameter).clamp_(-0.04, 0.04)
            else:
                parameter.mul_(0.9)


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "plain": (tied_model, plain),
    "clipped": (tied_model, clipped),
    "accumulated": (tied_model, accumulated),
    "half": (half, clipped),
    "scheduled": (tied_model, clipped),
    "changed": (tied_model, changed),
    "half-changed": (half, changed),
}
"""The model has tied embeddings, frozen layers between, and two groups."""


def warmed_up(optimizer: Any) -> SequentialLR:
    """Make a scheduler with a warm-up, moved on to the optimizer's step as the docs say it."""
    parts = [LinearLR(optimizer, 0.1, total_iters=7), CosineAnnealingLR(optimizer, 50)]
    scheduler = SequentialLR(optimizer, parts, [7])
    for _ in range(optimizer.steps):
        scheduler.step()
    return scheduler


def say(*words: object) -> None:
    """Write a line whole, also where a kill comes next."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def train(folder: Path, steps: int, loop: str) -> None:
    make, one_step = LOOPS[loop]
    model = make()
    torch.manual_seed(21)
    optimizer = offloaded(model, torch.optim.AdamW(groups_of(model), lr=1e-2), [folder / "a", folder / "b"])
    say("from", optimizer.steps)
    scheduler = warmed_up(optimizer) if loop == "scheduled" else None
    for step in range(optimizer.steps, steps):
        one_step(model, optimizer, step)
        if scheduler is not None:
            scheduler.step()
        say(optimizer.steps)
    torch.save(model.state_dict(), folder / "model.part")
    (folder / "model.part").rename(folder / "model.pt")
    say("saved")
    optimizer.close()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what a first step loads and makes, children have
        train(Path(folder), 2, "clipped")
    for line in sys.stdin:
        folder, steps, loop = line.split()
        child = os.fork()
        if not child:
            train(Path(folder), int(steps), loop)
            os._exit(0)
        say("child", child)
        _, status = os.waitpid(child, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
