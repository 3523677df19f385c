"""Networks that many tests build: drawn, digested and traced once for each process, and then copied."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hapi.models.graph.digest import TensorDigests
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.architectures import Architecture, build_module
from hapi.models.zoo.build import ModelSpec, layers_of
from support.thin_resnet import THIN_RESNET

NAMES = frozenset({"resnet18", "squeezenet1_1", THIN_RESNET})
"""Whose modules do not depend on the input's shape."""
KEPT = 8
"""Networks at a time, of at most 47 MB."""
_drawn: dict[tuple[str, int], nn.Module] = {}
_copied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors of copies to their version when they were made and the tensor that they were copied from."""
_digests = TensorDigests()
TRACED = 64
"""Lists of layers at a time, without weights."""
_traced: dict[tuple[object, ...], LayeredModel] = {}


def drawn_once(architecture: Architecture, seed: int) -> nn.Module:
    """As :func:`build_module`, for most tests in a fraction of its time."""
    if architecture.name not in NAMES:
        return build_module(architecture, seed)
    key = architecture.name, seed
    if key not in _drawn and len(_drawn) >= KEPT:
        _drawn.clear()
    module = _drawn.get(key) or build_module(architecture, seed)
    _drawn[key] = module
    made = copy.deepcopy(module)
    for mine, its in zip(_tensors(made), _tensors(module), strict=True):
        _copied[mine] = mine._version, its
    return made


def traced_once(architecture: Architecture, spec: ModelSpec, module: nn.Module) -> LayeredModel:
    """As :func:`layers_of`: modules of one architecture with tensors of the same shapes have one structure."""
    if ":" in architecture.name and architecture.name != THIN_RESNET:
        return layers_of(architecture, spec, module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    facts = [(name, t.shape, t.dtype, t.device.type, t.requires_grad) for name, t in tensors]
    key = architecture.name, spec.input_shape, spec.blocks, module.training, *facts
    if key not in _traced:
        made = layers_of(architecture, spec, module)
        if len(_traced) >= TRACED:
            _traced.clear()
        with torch.device("meta"):
            _traced[key] = made.over(copy.deepcopy(module).to("meta"))
    return _traced[key].over(module)


def digested_once(
    of: Callable[[TensorDigests, str, torch.Tensor], str],
) -> Callable[[TensorDigests, str, torch.Tensor], str]:
    """Make :meth:`TensorDigests.of` of a copy that nobody has changed that of what it was copied from."""

    def found(self: TensorDigests, name: str, tensor: torch.Tensor) -> str:
        version, its = _copied.get(tensor, (None, None))
        if its is None or version != tensor._version:
            return of(self, name, tensor)
        return of(_digests, name, its)

    return found


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
