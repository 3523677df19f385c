"""Optimiser steps of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hapi.errors import DeviceMemoryError, UnprocessableError
from hapi.process.memory_errors import is_out_of_memory
from hapi.train.objective.objective import Objective


def step_seed(seed: int, epoch: int, batch: int) -> int:
    """Return the seed of torch's generator before a step; independent of earlier steps, a resume and the
    split.
    """
    return ((seed * 1_000_003 + epoch) * 1_000_003 + batch) % (1 << 63)


class GradientStep:
    """Trains the layers after the freeze by one batch at a time."""

    def __init__(
        self,
        trained: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        seed: int,
        bs: int,
        device: torch.device,
    ) -> None:
        """See the attributes of the trainer for the first three.

        Args:
            trained: the trained layers.
            optimizer: their optimiser.
            objective: computes the loss, and sums what the report tells.
            seed: of the job.
            bs: samples of a batch, for messages.
            device: of the layers, for messages.
        """
        self._trained, self._optimizer, self._objective = trained, optimizer, objective
        self._seed, self._bs, self._device = seed, bs, device

    def take(self, features: torch.Tensor, labels: torch.Tensor, epoch: int, batch: int) -> torch.Tensor:
        """Take one step and return its loss. Its randomness (dropout, mixup) depends on seed, epoch and batch alone.

        The caller keeps other threads of the process from torch's generator meanwhile.

        Args:
            features: [B, ...] at the freeze, on the device.
            labels: of the samples, on the device.
            epoch: number from 0.
            batch: number in the epoch, from 0.

        Raises:
            DeviceMemoryError: the step does not fit the memory.
            UnprocessableError: BatchNorm has one value for each channel.
        """
        torch.manual_seed(step_seed(self._seed, epoch, batch))
        with self._explained(batch, len(labels)):
            inputs, targets = self._objective.batch_of(features, labels, epoch, batch)
            outputs = self._trained(inputs)
            loss = self._objective.loss(outputs, targets)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
        self._objective.note(outputs, targets, loss)
        return loss.detach()

    @contextmanager
    def _explained(self, batch: int, samples: int) -> Iterator[None]:
        """Map torch's errors."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"the trained layers with a batch of {self._bs} do not fit {self._device}; "
                "choose a smaller --bs or a later --freeze"
            ) from None
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UnprocessableError(
                f"batch {batch} has {samples} sample(s), too few for BatchNorm in the trained "
                "layers; give --drop-last or another --bs"
            ) from None
