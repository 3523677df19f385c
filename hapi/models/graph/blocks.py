"""The numbered list of layers, made from cut points or, for models that cannot be traced, from blocks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hapi.errors import ModelChoiceError, ModelError
from hapi.models.graph.cuts import Cut
from hapi.models.graph.tracing import Traced, TraceFailure, chain, describe_failure, trace, training_mode
from hapi.models.paper_families import Block, family_blocks

_TOLERANCE = 1e-5
"""Relative difference allowed between a model's output and that of its blocks run in sequence (float32)."""

_NAMING = (
    "Name its blocks: module paths that, run one after the other, are the model (blocks=[...] in Python,"
    " --blocks a,b,c on the command line)"
)


def trace_or_chain(
    module: nn.Module,
    input_shape: tuple[int, ...],
    blocks: Sequence[str],
    leaf_types: Sequence[type] = (),
    functions: Sequence[Any] = (),
) -> Traced:
    """Return the module's graphs: traced, or composed of its children (``nn.Sequential``) or ``blocks``.

    Args:
        module: the model.
        input_shape: shape of one sample (C, H, W).
        blocks: module paths that are run in sequence if tracing fails.
        leaf_types: module classes that are never traced into.
        functions: Python functions that the graph calls as they are.

    Raises:
        ModelError: neither works; the message says what failed, and how to name the blocks.
    """
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise ModelError("the model holds TorchScript modules, which cannot be split; build it in Python")
    if module._forward_pre_hooks or module._forward_hooks:
        raise ModelError(
            f"{type(module).__name__} has hooks on its own forward, which its parts would not run; put it into"
            " another module, whose forward calls it"
        )
    try:
        return trace(module, leaf_types, functions)
    except TraceFailure as failure:
        paths = list(blocks)
        if not paths and isinstance(module, nn.Sequential):
            paths = [name for name, _ in module.named_children()]
        if not paths:
            raise ModelError(f"{type(module).__name__} cannot be traced: {failure}. {_NAMING}.") from failure
    _check_paths(module, paths)
    traced = chain(module, paths)
    _check_composition(module, paths, input_shape)
    return traced


def _check_paths(module: nn.Module, paths: Sequence[str]) -> None:
    known = [name for name, _ in module.named_modules() if name]
    for path in paths:
        if path not in known:
            matches = difflib.get_close_matches(path, known, n=3) or known[:3]
            raise ModelChoiceError(
                f"block {path!r} is not a module of {type(module).__name__}; near it: {', '.join(matches)}"
            )


def _check_composition(module: nn.Module, paths: Sequence[str], input_shape: tuple[int, ...]) -> None:
    """:class:`ModelError` unless the blocks in sequence give the model's output on random samples."""
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return  # a structure without weights, built from a list that was checked when the model was pushed
    device = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0)).device
    x = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(0)).to(device)
    try:
        with torch.no_grad(), training_mode(module, False):
            whole = module(x.clone())
            value = x.clone()
            for path in paths:
                value = module.get_submodule(path)(value)
    except Exception as error:
        raise ModelError(
            f"the blocks of {type(module).__name__} cannot run: {describe_failure(error)}"
        ) from error
    if not isinstance(whole, torch.Tensor) or not isinstance(value, torch.Tensor):
        raise ModelError(f"{type(module).__name__} or one of its blocks does not return one tensor")
    if whole.shape != value.shape:
        raise ModelChoiceError(
            f"the blocks in sequence give {list(value.shape)}, but {type(module).__name__} gives"
            f" {list(whole.shape)}; list every step of its forward, in order"
        )
    scale = float(whole.abs().max()) or 1.0
    difference = float((whole - value).abs().max()) / scale
    if not difference <= _TOLERANCE:
        raise ModelChoiceError(
            f"the blocks in sequence differ from {type(module).__name__} by {difference:.1e} (relative);"
            " list every step of its forward, in order"
        )


def select_layers(
    module: nn.Module, cuts: Sequence[Cut], architecture: str | None, blocks: Sequence[str]
) -> list[tuple[str, Cut]]:
    """Return the layers' names and cuts: those of ``blocks``, of the paper's list, or every cut point.

    Args:
        module: the model.
        cuts: all its cut points, in order.
        architecture: its torchvision name; None for another model.
        blocks: names at which layers end, instead.
    """
    if blocks:
        wanted = [Block(name, name) for name in blocks]
    else:
        family = family_blocks(architecture, module) if architecture else None
        if family is None:
            return [(cut.name, cut) for cut in cuts]
        wanted = family
    chosen: list[tuple[str, Cut]] = []
    position = -1
    for block in wanted:
        if block.end is not None:
            found = _find(cuts, block.end)
            if found <= position:
                raise ModelChoiceError(f"block {block.name!r} does not come after block {chosen[-1][0]!r}")
            position = found
        if position < 0:
            raise ModelChoiceError(f"block {block.name!r} has no layer before it")
        chosen.append((block.name, cuts[position]))
    if position != len(cuts) - 1:
        chosen.append((cuts[-1].name, cuts[-1]))
    names = [name for name, _ in chosen]
    if len(set(names)) != len(names):
        raise ModelChoiceError(f"block {next(n for n in names if names.count(n) > 1)!r} is named twice")
    return chosen


def _find(cuts: Sequence[Cut], end: str) -> int:
    """Index of the cut named ``end``, or of the last cut inside module path ``end``."""
    for i, cut in enumerate(cuts):
        if cut.name == end:
            return i
    inside = [i for i, cut in enumerate(cuts) if cut.path == end or cut.path.startswith(end + ".")]
    if inside:
        return inside[-1]
    names = [cut.name for cut in cuts]
    matches = difflib.get_close_matches(end, names, n=3) or names[:3]
    raise ModelChoiceError(
        f"no layer can end at {end!r}: more than one tensor crosses there, or no such name; near: {matches}"
    )
