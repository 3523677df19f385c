"""Refusals of an optimiser whose parameters were counted before its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from hapi.errors import UsageError


class BoundToModel:
    """Holds on to a model in training: copies of the model share it without effect, and pickles of it are refused."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return itself."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse pickles of the model with what trains it."""
        raise UsageError(
            "a model in offloaded training is not pickled whole: save its state_dict(), or close() the optimizer first"
        )


_KEEPING = ("momentum", "amsgrad")
"""Options that say which states an optimiser keeps."""


class FixedOptimizer(torch.optim.Optimizer):
    """An optimiser whose parameters and kinds of states stay those that it began with, and of which there are no
    copies."""

    _is_fixed = False

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        """Begin with these parameter groups, and torch's defaults of their options."""
        super().__init__(groups, defaults)
        self._is_fixed = True
        self._states_kept = [self._keeping(group) for group in self.param_groups]

    def check_options(self) -> None:
        """Raise UsageError where an option asks for other states than there is room for."""
        for kept, group in zip(self._states_kept, self.param_groups, strict=True):
            for name, is_on in self._keeping(group).items():
                if is_on != kept[name]:
                    raise UsageError(
                        f"{name} was switched {'on' if is_on else 'off'} after room was made for the states: set it "
                        "before hapi.offload_training"
                    )

    @staticmethod
    def _keeping(group: Mapping[str, Any]) -> dict[str, bool]:
        return {name: bool(group.get(name)) for name in _KEEPING}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters: there is no room for their states."""
        if self._is_fixed:
            raise UsageError(
                "an offloaded optimizer takes no further parameters: give them to the optimizer before "
                "hapi.offload_training, frozen ones with requires_grad_(False)"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: the states lie elsewhere, and belong to one job."""
        raise UsageError(
            "an offloaded optimizer is not copied or pickled, its states lie outside the memory: save its state_dict()"
        )


def refuse_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser that was handed over refuse to step: its gradients and states are another one's.

    A scheduler that was made with it drives the same groups, and need not warn that it never stepped.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise UsageError(
            "this optimizer was handed over to hapi.offload_training: use the one that it returned (model, optimizer = "
            "hapi.offload_training(model, optimizer, ...))"
        )

    optimizer.register_step_pre_hook(refuse)
