"""Other libraries that train beyond a GPU's memory, each as its own documentation says."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.offload.settings import DEEPSPEED, TORCHAO, TRAINSTREAM
from hapi.errors import UsageError

LEARNING_RATE = 1e-4


class Loop(Protocol):
    """What a step of a training calls."""

    model: nn.Module

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""

    def step(self) -> None:
        """Update the parameters, and forget the gradients."""


class OptimizerLoop:
    """A loop around an optimiser."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train ``model`` with ``optimizer``."""
        self.model, self._optimizer = model, optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()

    def step(self) -> None:
        """Update the parameters, and forget the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class DeepSpeedLoop:
    """ZeRO-Offload: stage 2 with states in pinned host memory, one process, DeepSpeed's own AdamW on the CPU."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        """Train ``model`` on batches of ``rows``."""
        deepspeed = _library("deepspeed")
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        }  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        }
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        self.model.backward(loss)

    def step(self) -> None:
        """Update the parameters, and forget the gradients."""
        self.model.step()


def other_loop(way: str, model: nn.Module, rows: int) -> Loop:
    """Return the loop of another library over ``model``, which is on a GPU; UsageError where it is not installed."""
    if way == TORCHAO:
        made = _library("torchao.optim").CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LEARNING_RATE
        )
        return OptimizerLoop(model, made)
    if way == TRAINSTREAM:
        adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return OptimizerLoop(*_library("trainstream").wrap(model, adamw, offload=True))
    if way == DEEPSPEED:
        return DeepSpeedLoop(model, rows)
    raise UsageError(f"{way}: is no library that is known")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name.partition('.')[0]} cannot be imported: {error}") from None
