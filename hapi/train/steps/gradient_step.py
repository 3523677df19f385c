"""Optimiser steps of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi.client.session import Session
from hapi.errors import DeviceMemoryError, UnprocessableError
from hapi.models.devices import seed_generators
from hapi.offload.loop.gradients import OffloadedGradient
from hapi.process.memory_errors import is_out_of_memory
from hapi.train.distributed.batch_norm import synchronise
from hapi.train.distributed.unused import may_be_unused
from hapi.train.objective.objective import Objective
from hapi.train.steps.accumulation import Accumulation
from hapi.train.steps.clipping import Clipping
from hapi.train.steps.ema import MovingAverage
from hapi.train.steps.optimizer import head_names, make_optimizer
from hapi.train.steps.precision import Precision
from hapi.train.steps.settings import AllStepSettings, schedule_of
from hapi.train.steps.smallest_batch import check_smallest_batch
from hapi.train.steps.update_spread import UpdateSpread

_NOTHING = nullcontext()
_NOT_REDUCED = "Expected to have finished reduction in the prior iteration"
"""Beginning of torch's error where a rank's step has left a parameter out."""


def step_seed(seed: int, epoch: int, batch: int, rank: int = 0) -> int:
    """Return the seed of torch's generator before a step; independent of earlier steps, a resume and the split.

    Ranks draw for samples of their own, and differently.
    """
    return (((seed * 1_000_003 + epoch) * 1_000_003 + batch) + rank * 0x9E3779B97F4A7C15) % (1 << 63)


class GradientStep:
    """Trains the layers after the freeze by one batch at a time, and updates them after each accumulation."""

    def __init__(self, session: Session, settings: AllStepSettings, objective: Objective) -> None:
        """Begin with the session's layers as they are.

        Args:
            session: has the layers, their device and the batches.
            settings: of the optimiser and its steps, checked.
            objective: computes the loss, and sums what the report tells.

        Raises:
            UsageError: settings that do not fit the model, the device or the length of the training.
        """
        self._session, self._objective, self._ranks = session, objective, session.ranks
        self.trained, device = session.trained, session.device
        if settings.sync_batchnorm:
            synchronise(self.trained, session.ranks)
        self._sizes = [len(ids) for ids in session.batch_ids(0)]  # those of all epochs
        check_smallest_batch(session, self._sizes)
        head = head_names(session.job_context.model)
        self.optimizer = make_optimizer(settings, self.trained, head)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._accumulation = Accumulation(self._sizes, settings.accumulate)
        self._schedule = schedule_of(settings, session.settings.epochs, self._accumulation.steps_per_epoch)
        self.precision = Precision(settings.precision, device)
        self._clipping = None if settings.clip_norm is None else Clipping(settings.clip_norm, device)
        self._average = None if settings.ema is None else MovingAverage(self.trained, settings.ema)
        self._spread = UpdateSpread(session.meter, device, settings.accumulate)
        unused = self._ranks.size > 1 and may_be_unused(session)
        self.module = self._ranks.wrapped(self.trained, unused=unused)
        """The trained layers, whose backward averages gradients over the ranks."""

    @property
    def evaluated(self) -> nn.Module:
        """The layers to validate and to keep: the moving average if there is one, else the trained ones."""
        return self.trained if self._average is None else self._average.module

    def take(self, features: torch.Tensor, labels: torch.Tensor, epoch: int, batch: int) -> torch.Tensor:
        """Train with one batch and return its loss. Its randomness (dropout, mixup) depends on seed, epoch and batch.

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
        seed = step_seed(self._session.settings.seed, epoch, batch, self._ranks.rank)
        seed_generators(self._session.device, seed)
        accumulation = self._accumulation
        is_last = accumulation.ends(batch)
        with self._explained(batch, len(labels)), self._ranks.explained():
            with self._reduced(is_last):
                inputs, targets = self._objective.batch_of(features, labels, epoch, batch)
                outputs = self.precision.outputs(self.module, inputs)
                loss = self._objective.loss(outputs, targets)
                result = self._objective.result(outputs, targets, loss, self._sizes[batch], self._ranks)
                if accumulation.begins(batch):
                    self.optimizer.zero_grad(set_to_none=True)
                    accumulation.is_open = True
                self._set_rates(accumulation.step(epoch, batch))
                own = loss if result.factor is None else loss * result.factor
                self.precision.backward(accumulation.weighed(own, batch, result.mean_weight))
            with self._spread.batch(is_last):
                if is_last:
                    self._update()
        self._objective.note(result)
        return result.loss

    def _reduced(self, is_last: bool) -> AbstractContextManager[None]:
        """Average gradients over the ranks in the last batch of an accumulation only: the sums are the same."""
        if is_last or not isinstance(self.module, DistributedDataParallel):
            return _NOTHING
        found: AbstractContextManager[None] = self.module.no_sync()
        return found

    def _set_rates(self, step: int) -> None:
        """Set the learning rates before backward, within which an offloaded optimiser works ahead."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = self._schedule.rate(rate, step)

    def _update(self) -> None:
        """Take the optimiser step of the gradients so far."""
        self._accumulation.finish(self._parameters())
        if self._clipping is not None:
            self.precision.unscale(self.optimizer)
            self._clipping.clip(self._parameters())
        self.precision.step(self.optimizer)
        if self._average is not None:
            self._average.update()

    def figures(self, epoch: int) -> dict[str, float]:
        """Return the facts of the steps of ``epoch``, which has just ended, by their names in the report."""
        last = self._accumulation.step(epoch + 1, 0) - 1
        rates = {self._schedule.rate(rate, last): None for rate in self._rates}
        figures: dict[str, float] = {"learning_rate": next(iter(rates))}
        if len(rates) > 1:  # of the layers before the head, and of the head
            figures["head_learning_rate"] = list(rates)[-1]
        clipping = {} if self._clipping is None else self._clipping.figures()
        return {**figures, **clipping, **self.precision.figures()}

    def clear(self) -> None:
        """Begin a new epoch's figures."""
        self.precision.clear()
        if self._clipping is not None:
            self._clipping.clear()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on beside layers and optimiser, for a checkpoint."""
        return {
            "gradients": self._gradients() if self._accumulation.is_open else {},
            "accumulation": self._accumulation.state_dict(),
            "precision": self.precision.state_dict(),
            "clipping": None if self._clipping is None else self._clipping.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; any error for anything else."""
        gradients = dict(state["gradients"])
        self.optimizer.zero_grad(set_to_none=True)
        for name, gradient in gradients.items():
            parameter = self.trained.get_parameter(name)
            parameter.grad = gradient.to(parameter.device)
        self._accumulation.load_state_dict(state["accumulation"], self._session.device)
        self.precision.load_state_dict(state["precision"])
        if self._clipping is not None:
            self._clipping.load_state_dict(state["clipping"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Gradients so far, read back where they are on a disk; averaged over the ranks."""
        found = {n: p.grad for n, p in self.trained.named_parameters() if p.grad is not None}
        own = {n: g.clone() if isinstance(g, OffloadedGradient) else g for n, g in found.items()}
        if self._ranks.size == 1:
            return own
        return {
            n: (self._ranks.summed(g.flatten()) / self._ranks.size).reshape(g.shape) for n, g in own.items()
        }

    @contextmanager
    def _explained(self, batch: int, samples: int) -> Iterator[None]:
        """Map torch's errors."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if _NOT_REDUCED in str(error):
                raise UnprocessableError(
                    "a step left a parameter of the trained layers without a gradient, which several ranks cannot "
                    "average; let the model's own code use all of them in each step, or train by one process"
                ) from None
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"the trained layers with a batch of {self._session.settings.bs} do not fit {self._session.device}; "
                "choose a smaller --bs or a later --freeze"
            ) from None
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UnprocessableError(
                f"batch {batch} has {samples} sample(s), too few for BatchNorm in the trained "
                "layers; give --drop-last or another --bs"
            ) from None
