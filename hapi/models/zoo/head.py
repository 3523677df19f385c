"""The classification head: found by its number of outputs, replaced for another number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hapi.errors import ModelError
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import copied
from hapi.models.zoo.architectures import seeded

Relayer = Callable[[nn.Module], LayeredModel]


def class_count(model: LayeredModel) -> int:
    """Number of classes: the size of the first dimension of one sample's output."""
    shape = model.output_shapes()[-1]
    if len(shape) != 1:
        raise ModelError(f"the model's output per sample has shape {list(shape)}, not one number per class")
    return shape[0]


def find_head(model: LayeredModel) -> str:
    """Path of the last Linear or Conv2d in execution order that has one output per class."""
    classes = class_count(model)
    for path in reversed(model.executed_modules()):
        inner = list(model.module.get_submodule(path).named_modules())
        for name, module in reversed(inner):
            if outputs(module) == classes:
                return ".".join(part for part in (path, name) if part)
    raise ModelError(
        f"no Linear or Conv2d with {classes} outputs was found, so the head cannot be replaced; have a factory"
        " of your own (package.module:factory) make it with one output per class"
    )


def outputs(module: nn.Module) -> int | None:
    """Number of outputs of a Linear or Conv2d, None for anything else."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else None


def resize_head(
    module: nn.Module, path: str, classes: int, seed: int, device: torch.device | None = None
) -> None:
    """Give the head at ``path`` other outputs, freshly initialised from ``seed`` as torch initialises them.

    The new head is trainable, also if the old one was not.

    Args:
        module: the model.
        path: module path of a Linear or Conv2d.
        classes: its new outputs.
        seed: of the initialisation.
        device: the new head's device; None: that of the old one. On the meta device it takes no memory.
    """
    old = module.get_submodule(path)
    new = copied(old)
    if not isinstance(new, nn.Linear | nn.Conv2d):
        raise ModelError(f"head {path!r} is a {type(new).__name__}, neither Linear nor Conv2d")
    before = outputs(new)
    with seeded(seed), torch.no_grad():
        weight = new.weight
        device = device or weight.device
        made = torch.device("meta" if device.type == "meta" else "cpu")  # the same numbers on every device
        fresh = torch.empty((classes, *weight.shape[1:]), dtype=weight.dtype, device=made)
        new.weight = nn.Parameter(fresh)
        # torch's own initialisation of both kinds (nn.Linear.reset_parameters), seeded.
        nn.init.kaiming_uniform_(new.weight, a=math.sqrt(5))
        if new.bias is not None:
            bound = 1 / math.sqrt(max(1, fresh[0].numel()))
            bias = torch.empty(classes, dtype=weight.dtype, device=made).uniform_(-bound, bound)
            new.bias = nn.Parameter(bias)
    if isinstance(new, nn.Linear):
        new.out_features = classes
    else:
        new.out_channels = classes
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new.to(device))
    if getattr(module, "num_classes", None) == before:
        module.__dict__["num_classes"] = classes  # read by some models' forward (a final view)


def retarget(model: LayeredModel, classes: int | None, seed: int, relayer: Relayer) -> LayeredModel:
    """Return ``model`` with a fresh head.

    The head is real even when the rest is not loaded.

    Args:
        model: the model.
        classes: outputs of the head; None or the same number leaves the model as it is.
        seed: of the head's initialisation.
        relayer: makes the layers of the changed module.

    Raises:
        ModelError: it has no head that can be told, or does not run with the new one.
    """
    if classes is None or (classes == model.output_shapes()[-1][0] and len(model.output_shapes()[-1]) == 1):
        return model
    path = find_head(model)
    is_meta = any(p.is_meta for p in model.module.get_submodule(path).parameters())
    resize_head(model.module, path, classes, seed, torch.device("cpu") if is_meta else None)
    try:
        changed = relayer(model.module)
    except ModelError as error:
        raise type(error)(
            f"{path} was made for {classes} classes, and now {error}; if the network has several heads, name a "
            f"factory of your own that returns it with {classes} outputs (package.module:factory)"
        ) from None
    changed.fresh = frozenset(changed.tensors.inside(path))
    return changed
