"""Refusals of optimisers, parameters and gradients that cannot be offloaded exactly."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hapi.errors import UsageError

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers whose step on a part of a tensor is that part of the step on the whole."""
TRAINED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
POLICIES = ("auto", "keep", "swap", "recompute")
"""Ways to treat activations."""


def check_policy(policy: str) -> None:
    """Raise UsageError for an unknown way to treat activations."""
    if policy not in POLICIES:
        raise UsageError(f"activations={policy!r}: take one of {', '.join(POLICIES)}")


def check_model(model: object) -> None:
    """Raise UsageError for what is no module of Python's, in which nothing can be followed."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{f'the layer {name}' if name else 'the model'} is a ScriptModule: give hapi.offload_training the "
                "module that torch.jit made it from"
            )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimiser that cannot be offloaded exactly, or whose parameters have no size yet."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UsageError(f"{type(optimizer).__name__} cannot be offloaded: take one of torch's {names}")
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        own = vars(optimizer).get(name)
        is_torchs = getattr(own, "_wrapped_by_lr_sched", False) or hasattr(own, "__self__")
        if own is not None and not is_torchs:
            raise UsageError(
                f"{name} of this optimizer was replaced by another function: replace that of the optimizer that "
                "hapi.offload_training returns"
            )
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                raise UsageError(f"an optimizer with {option}=True cannot be offloaded: leave it out")
        if any(is_lazy(parameter) for parameter in group["params"]):
            raise UsageError(
                "the optimizer has parameters of a lazy layer, which have no size yet: run the model once before "
                "the optimizer is made"
            )


def is_wrapper(tensor: object) -> bool:
    """Return whether a tensor is of a kind whose values lie in other ones."""
    return bool(is_traceable_wrapper_subclass(tensor))


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise UsageError for a parameter that cannot be offloaded."""
    if is_wrapper(parameter):
        raise UsageError(
            f"{name} is a {type(parameter).__name__}, whose values lie in other tensors: offloaded training takes "
            "plain parameters, and DistributedDataParallel"
        )
    if parameter.dtype not in TRAINED_TYPES:
        raise UsageError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}: offloaded training takes parameters in "
            "float32, bfloat16 or float16"
        )
    if parameter.is_meta:
        raise UsageError(f"{name} is on the device meta: give it values before hapi.offload_training")
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda axis: (-strides[axis], axis))
    if not parameter.detach().permute(order).is_contiguous():
        raise UsageError(
            f"{name} does not own its memory (an expanded or strided view): make it contiguous first"
        )


def check_memory(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise UsageError for two parameters that share memory: the order of their updates would be another one."""
    taken = [(one.device.index or 0, one.data_ptr(), one.nbytes, name) for name, one in named if one.numel()]
    taken.sort()
    for (device, at, nbytes, name), (other_device, other_at, _, other) in pairwise(taken):
        if device == other_device and other_at < at + nbytes:
            raise UsageError(
                f"{name} and {other} are two parameters in the same memory: make them one, as tied weights are, or "
                "copy one of them"
            )


def check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise UsageError for a gradient that cannot be offloaded."""
    if gradient.layout != torch.strided:
        raise UsageError(f"{name} has sparse gradients, which cannot be offloaded: give sparse=False")
    if gradient.dtype != parameter.dtype:
        raise UsageError(
            f"the gradient of {name} is {gradient.dtype}, and the parameter {parameter.dtype}: leave its grad_dtype "
            "as it is"
        )
