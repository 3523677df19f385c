"""A script that sets up logging in several ways, and writes what each user of a loop sees into a folder."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hapi
from hapi.offload.optimizer import OffloadedOptimizer

SET_UP: dict[str, Callable[[], object]] = {
    "plain": lambda: None,
    "basic": logging.basicConfig,
    "info": lambda: logging.basicConfig(level=logging.INFO),
    "own-handler": lambda: (
        logging.getLogger("hapi").addHandler(logging.StreamHandler()),
        logging.getLogger("hapi").setLevel(logging.INFO),
    ),
    "errors-only": lambda: logging.getLogger("hapi").setLevel(logging.ERROR),
    "disabled": lambda: logging.disable(logging.WARNING),
}
"""Ways of a user."""


def loop(memory: str, disk: str) -> None:
    """Train some steps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    model, optimizer = hapi.offload_training(model, torch.optim.AdamW(model.parameters()), memory, disk)
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    loop("1KB", str(folder / "first"))  # what a first step loads, children have
    gc.collect()
    gc.freeze()  # a collection in each child would copy all pages
    for name, set_up in SET_UP.items():
        if os.fork():
            os.wait()
            continue
        for memory in ("1GB", "1KB"):
            output = os.open(folder / f"{name}-{memory}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 2)
            if memory == "1GB":
                set_up()
            loop(memory, str(folder / f"states-{name}"))
        os._exit(0)
