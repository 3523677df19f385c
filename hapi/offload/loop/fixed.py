"""Refusals of an optimiser whose parameters were counted before its first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch

from hapi.errors import UsageError
from hapi.offload.activations.compiling import is_traced, key_of


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


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_KEEPING = ("momentum", "amsgrad")
"""Options that say which states an optimiser keeps."""


class FixedOptimizer(torch.optim.Optimizer):
    """An optimiser whose parameters and kinds of states stay those that it began with, and of which there are no
    copies."""

    _is_fixed = _is_step_traced = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the parameter groups of an optimiser, torch's defaults of their options, and its hooks."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for name in _HOOKS:  # a user's handle removes a hook from the dict that it was put into
            setattr(self, name, getattr(optimizer, name))
            setattr(optimizer, name, OrderedDict())
        self._step_supports_amp_scaling = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._is_fixed = True
        self._key = key_of(self)
        self._states_kept = [self._keeping(group) for group in self.param_groups]
        self._members = self._grouped()

    def note_compiling(self) -> None:
        """Note that torch compiles a function that calls ``step``."""
        self._is_step_traced = True

    def check_not_compiled(self) -> None:
        """Raise UsageError where ``step`` is called in a compiled function."""
        if self._is_step_traced:
            raise UsageError(
                "optimizer.step() is called in a function that torch.compile compiles, where steps of torch's own "
                "optimizers have other bits: compile the model or its loss, and call step() outside"
            )

    def check_options(self) -> None:
        """Raise UsageError where groups have other parameters, or options that ask for other states, than at first."""
        if self._grouped() != self._members:
            raise UsageError(
                "the parameters in optimizer.param_groups are not those of the beginning: leave them there, and freeze "
                "with requires_grad_(False)"
            )
        for kept, group in zip(self._states_kept, self.param_groups, strict=True):
            for name, is_on in self._keeping(group).items():
                if is_on != kept[name]:
                    raise UsageError(
                        f"{name} was switched {'on' if is_on else 'off'} after room was made for the states: set it "
                        "before hapi.offload_training"
                    )

    def load_options(self, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Take the groups' options out of a state dict; return its states by parameter, as they are.

        Like torch, it goes by the order of the parameters in both, whatever numbers or names they have there.
        """
        found = dict(state_dict)
        hooks = self._optimizer_load_state_dict_pre_hooks
        for hook in hooks.values():
            found = hook(self, found) or found
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        try:
            torch.optim.Optimizer.load_state_dict(self, {**found, "state": {}})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks
        names = [name for group in found["param_groups"] for name in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        return {one: found["state"].get(name, {}) for name, one in zip(names, own, strict=True)}

    def take_scale(self) -> bool:
        """Divide the gradients by the scale that ``torch.amp.GradScaler`` leaves to the step of a fused optimiser.

        Returns:
            Whether there is to be a step: the gradients are finite.
        """
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            return False
        gradients = [
            one.grad for group in self.param_groups for one in group["params"] if one.grad is not None
        ]
        for gradient in gradients if scale is not None else ():
            gradient.div_(scale)
        return True

    def _grouped(self) -> list[list[int]]:
        """Identities of the parameters of each group."""
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

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


def outside_compiled_code(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the ``step`` of a :class:`FixedOptimizer` be refused in functions that torch compiles."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def checked(optimizer: FixedOptimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer.check_not_compiled()
        return step(optimizer, *args, **kwargs)

    @wraps(step)
    def called(optimizer: FixedOptimizer, *args: Any, **kwargs: Any) -> Any:
        is_traced(optimizer._key)  # the compiled code has nothing of this
        return checked(optimizer, *args, **kwargs)

    return called
