"""Hooks of a model whose gradients are consumed as backward makes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hapi.errors import UsageError
from hapi.offload.activations.compiling import is_traced, key_of
from hapi.offload.loop.fixed import BoundToModel
from hapi.offload.loop.holders import usual_uses
from hapi.offload.parameters import TrainedParameter


def attach(
    model: nn.Module,
    parameters: Sequence[TrainedParameter],
    on_gradient: Callable[[TrainedParameter], None] | None,
    ahead: Collection[int],
    before_use: Callable[[], None],
    before_pass: Callable[[], None],
    on_compiling: Callable[[], None],
) -> list[Any]:
    """Follow a model's passes.

    Args:
        model: has the parameters, or some of them.
        parameters: trained ones, frozen ones among them: a loop may thaw them later.
        on_gradient: called each time a gradient was accumulated; None where gradients are reduced first.
        ahead: pieces that are computed for a step that is not taken yet; none most of the time.
        before_use: called before a module's forward pass or ``state_dict`` when parameters of it, or of modules in it,
            take the values of such a step.
        before_pass: called before a module's forward pass in training.
        on_compiling: called while torch compiles a module's forward pass, which does without these calls then.

    Returns:
        Handles; ``remove()`` ends each.
    """
    usual_uses()  # measured outside of any backward pass
    handles: list[Any] = []
    for taking in [] if on_gradient is None else [_GradientHook(known, on_gradient) for known in parameters]:
        known = taking.known
        with _needing_gradients(known.parameter):
            handles.append(known.parameter.register_post_accumulate_grad_hook(taking))
            handles.append(known.parameter.register_hook(_making_way(known)))
    by_identity = {id(known.parameter): known for known in parameters}
    for module in model.modules():  # many read parameters of inner ones, which they do not call
        found = [by_identity.get(id(parameter)) for parameter in module.parameters()]
        used = [known for known in found if known is not None]
        if used:
            hook = _UseHook(module, used, ahead, before_use)
            first = _PassHook(hook, before_pass, on_compiling)
            handles.append(
                module.register_forward_pre_hook(first, prepend=True)
            )  # others may read parameters
            handles.append(module.register_state_dict_pre_hook(hook))
    return handles


def check_not_followed(parameters: Iterable[TrainedParameter]) -> None:
    """Raise UsageError for a parameter that another offloaded optimizer follows."""
    for known in parameters:
        if is_followed(known.parameter):
            raise UsageError(
                f"{known.name} is trained by another offloaded optimizer: close() that one first, or go on with it"
            )


def is_followed(parameter: torch.Tensor) -> bool:
    """Return whether an offloaded optimizer follows a parameter."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, _GradientHook) for hook in hooks.values())


class _GradientHook:
    """Hands a parameter's gradient over."""

    def __init__(self, known: TrainedParameter, on_gradient: Callable[[TrainedParameter], None]) -> None:
        self.known, self._on_gradient = known, on_gradient

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, parameter: torch.Tensor) -> None:
        """Tell of the gradient."""
        self._on_gradient(self.known)


class _UseHook(BoundToModel):
    """Gives a module's parameters back the values that they have before the step, when it is used."""

    def __init__(
        self,
        owner: nn.Module,
        used: Sequence[TrainedParameter],
        ahead: Collection[int],
        before_use: Callable[[], None],
    ) -> None:
        self._owner, self._used, self._ahead = weakref.ref(owner), used, ahead
        self._before_use = before_use

    def __call__(self, module: nn.Module, *args: object) -> None:
        """Look whether values of a step that is not taken yet are in memory; a copy has values of its own."""
        if self._ahead and module is self._owner() and any(known.is_submitted for known in self._used):
            self._before_use()


class _PassHook(BoundToModel):
    """Tells of a pass in training before it begins, and of the use of the parameters."""

    def __init__(
        self, use: _UseHook, before_pass: Callable[[], None], on_compiling: Callable[[], None]
    ) -> None:
        self._use, self._before_pass, self._on_compiling = use, before_pass, on_compiling
        self._key = key_of(self)

    def note_compiling(self) -> None:
        """Tell of the compiler."""
        self._on_compiling()

    def __call__(self, module: nn.Module, *args: object) -> None:
        """Tell; a validation with other weights is no pass in training."""
        if is_traced(self._key):
            return
        if module.training and torch.is_grad_enabled():
            self._before_pass()
        self._use(module)


@contextmanager
def _needing_gradients(parameter: torch.Tensor) -> Iterator[None]:
    """Let a frozen parameter take hooks."""
    is_frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)


def _making_way(known: TrainedParameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that is called before a gradient is added.

    It lets autograd give a further gradient away, to which the kept one is added part by part: otherwise the memory
    would hold both. A pass that only asks for the gradient, without accumulating it (``torch.autograd.grad``), finds
    the kept one in its place at its end.
    """

    def hook(gradient: torch.Tensor) -> None:
        known.note_own_buffer()
        if known.set_aside():
            Variable._execution_engine.queue_callback(known.put_back)

    made: Callable[[torch.Tensor], None] = torch.compiler.disable(hook)
    return made
