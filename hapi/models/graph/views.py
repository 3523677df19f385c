"""Views of modules: the same parameters and buffers under another ``training`` flag, without a copy.

A frozen front must stay in eval mode whatever happens to the module it was cut from, and a ``Dropout`` or
``ReLU`` object may serve on both sides of a cut. So a frozen segment runs views, never the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

Substitute = Callable[[torch.Tensor], torch.Tensor]

_SHARED = {*vars(nn.Module()), "_flat_weights"}
"""Attributes that torch itself keeps in containers: changes on one side must be seen by the other."""


def shadow(module: nn.Module, memo: dict[int, nn.Module], substitute: Substitute | None = None) -> nn.Module:
    """Return a copy of ``module`` in eval mode that shares the dictionaries of its parameters and buffers.

    Because the dictionaries themselves are shared, moving or loading one side is seen by the other.
    Containers made by the module's class are not shared: values that forward keeps in them (a cache) stay
    with the side that ran.

    Args:
        module: the module.
        memo: copies by ``id``, so that a module that appears twice stays one object.
        substitute: makes another tensor for each one; nothing is shared then.
    """
    if id(module) in memo:
        return memo[id(module)]
    twin: nn.Module = object.__new__(type(module))
    memo[id(module)] = twin
    for key, value in module.__dict__.items():
        own = type(value) in (dict, list, set) and key not in _SHARED
        twin.__dict__[key] = value.copy() if own else value
    twin.__dict__["training"] = False
    twin.__dict__["_modules"] = {
        name: None if child is None else shadow(child, memo, substitute)
        for name, child in module._modules.items()
    }
    if substitute is not None:
        for kind in ("_parameters", "_buffers"):
            held = module.__dict__[kind]
            twin.__dict__[kind] = {n: None if t is None else substitute(t) for n, t in held.items()}
        if isinstance(twin, nn.RNNBase):  # keeps its parameters in a second list
            twin.__dict__["_flat_weights"] = [getattr(twin, name) for name in twin._flat_weights_names]
    return twin


class Tree(nn.Module):
    """Containers that hold chosen submodules and tensors of a model under their original paths.

    A tree is never called, like a ``ModuleList``: a segment reads and runs what it holds.
    """


def build_tree(
    module: nn.Module,
    leaves: Iterable[str],
    tensors: Iterable[str],
    constants: Mapping[str, torch.Tensor],
    make: Callable[[nn.Module], nn.Module],
) -> Tree:
    """Return a tree with submodules and tensors of a model under their original paths.

    Args:
        module: the model.
        leaves: paths of submodules.
        tensors: names of parameters and buffers of ``module``, or of ``constants``.
        constants: tensors by name that are neither parameters nor buffers.
        make: returns the object that the tree holds for a submodule.
    """
    root = Tree()
    called = set(leaves)
    read: dict[str, list[str]] = {}
    for tensor in dict.fromkeys(tensors):
        read.setdefault(tensor.rpartition(".")[0], []).append(tensor)
    # In the module's own order, which is that of parameters(), and parents before their children.
    order = [
        path for path, _ in module.named_modules(remove_duplicate=False) if path in called or path in read
    ]
    for path in order:
        if path in called:
            holder = _holder(root, path)
            if holder is not None:
                holder._modules[path.rpartition(".")[2]] = make(module.get_submodule(path))
                continue
        for tensor in read.get(path, ()):
            _hold(root, module.get_submodule(path), tensor, constants)
    return root


def _hold(root: Tree, owner: nn.Module, path: str, constants: Mapping[str, torch.Tensor]) -> None:
    """Put the tensor ``path`` of ``owner`` into the tree, unless a planted module has it already."""
    holder, name = _holder(root, path), path.rpartition(".")[2]
    if holder is None:
        return
    if path in constants:
        holder._buffers[name] = constants[path]
        holder._non_persistent_buffers_set.add(name)
    elif name in owner._parameters:
        holder._parameters[name] = owner._parameters[name]
    else:
        holder._buffers[name] = owner._buffers[name]
        if name in owner._non_persistent_buffers_set:
            holder._non_persistent_buffers_set.add(name)


def _holder(root: Tree, path: str) -> nn.Module | None:
    """The container for ``path``, made when missing; None when a planted module already contains it."""
    holder: nn.Module = root
    for part in path.split(".")[:-1]:
        child = holder._modules.get(part)
        if child is None:
            child = holder._modules[part] = Tree()
        if not isinstance(child, Tree):
            return None
        holder = child
    return holder
