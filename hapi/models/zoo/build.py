"""Models by name, with given weights and number of classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import nn

from hapi.errors import BadRequestError, ModelChoiceError, ModelError
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.tensors import copied
from hapi.models.zoo.architectures import (
    Architecture,
    ImportRule,
    build_module,
    build_structure,
    find_architecture,
)
from hapi.models.zoo.head import find_head, retarget
from hapi.models.zoo.names import ALIASES, FILE_SUFFIXES, MAX_CLASSES, is_file, random_seed
from hapi.models.zoo.weights import fit_head, library_state, load_state
from hapi.wire.documents import check_int, strict_fields
from hapi.wire.references import check_shape


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything needed to build a model again."""

    architecture: str
    """torchvision name, ``transformer`` (vit_b_16), ``timm:NAME``, or ``package.module:factory``."""
    num_classes: int | None = None
    """Classes of the head; None keeps the architecture's own."""
    weights: str = "random:0"
    """``random:SEED``, a name of the library's weights (``DEFAULT``), or a local checkpoint."""
    input_shape: tuple[int, ...] = (3, 224, 224)
    """Shape of one sample (C, H, W)."""
    blocks: tuple[str, ...] = ()
    """Names at which layers end (module path or cut name); empty for the automatic or the paper's list."""
    head_seed: int = 0
    """Seed of a head made for another number of classes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "architecture", ALIASES.get(self.architecture, self.architecture))
        if self.num_classes is not None and not 1 <= self.num_classes <= MAX_CLASSES:
            raise ModelChoiceError(f"{self.num_classes} classes: give a number from 1 to {MAX_CLASSES}")
        try:
            check_shape(list(self.input_shape), "input shape")
        except BadRequestError as error:
            raise ModelChoiceError(str(error)) from None

    @property
    def pretrained(self) -> bool:
        """True for weights from the architecture's own library."""
        return random_seed(self.weights) is None and not is_file(self.weights)

    def without_file(self) -> Self:
        """Return the spec with one name for every local checkpoint, for comparisons of models whose bytes are known."""
        return replace(self, weights=FILE_SUFFIXES[0]) if is_file(self.weights) else self

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {**asdict(self), "blocks": list(self.blocks), "input_shape": list(self.input_shape)}

    @classmethod
    def from_json(cls, document: Any, *, answer: bool = False) -> Self:
        """Parse :meth:`to_json`'s form, and unknown fields of an ``answer``; :class:`BadRequestError` on others."""
        d = strict_fields(document, {f.name: True for f in fields(cls)}, "spec", answer=answer)
        for name in ("architecture", "weights"):
            if not isinstance(d[name], str) or not 0 < len(d[name]) <= 4096:
                raise BadRequestError(f"spec.{name}: expected text")
        if not isinstance(d["blocks"], list) or not all(isinstance(b, str) for b in d["blocks"]):
            raise BadRequestError("spec.blocks: expected a list of module paths")
        classes = d["num_classes"]
        return cls(
            architecture=d["architecture"],
            num_classes=None if classes is None else check_int(classes, 1, MAX_CLASSES, "spec.num_classes"),
            weights=d["weights"],
            input_shape=check_shape(d["input_shape"], "spec.input_shape"),
            blocks=tuple(d["blocks"]),
            head_seed=check_int(d["head_seed"], 0, 2**63 - 1, "spec.head_seed"),
        )


def build(
    spec: ModelSpec,
    *,
    allow_import: ImportRule = False,
    state: Callable[[Collection[str]], Mapping[str, torch.Tensor]] | None = None,
) -> LayeredModel:
    """Build the model of ``spec`` with its weights, on the CPU.

    The prefix does not depend on ``num_classes``: the model is made with its architecture's own number and
    only then gets another head.

    Args:
        spec: the model.
        allow_import: whether a ``package.module:factory`` may be imported: yes, no, or which.
        state: reads the weights in the file that the spec names, for a network with tensors of the given names; None:
            they may not be in one.

    Raises:
        ModelError: the model or its weights cannot be made.
    """
    from_file = state if is_file(spec.weights) else None
    if is_file(spec.weights) and from_file is None:
        raise ModelError(
            "weights from a local file are not allowed here; push the model into the store instead"
        )
    architecture = architecture_of(spec, allow_import)
    module = build_module(architecture, random_seed(spec.weights) or 0)
    model = layers_of(architecture, spec, module)
    if from_file is not None:
        model = _load_file(architecture, spec, model, from_file(module.state_dict()))
    elif spec.pretrained:
        load_state(module, library_state(architecture, spec.weights, module), f"weights {spec.weights}")
    return retarget(model, spec.num_classes, spec.head_seed, lambda m: layers_of(architecture, spec, m))


def structure(spec: ModelSpec, *, allow_import: ImportRule = False) -> LayeredModel:
    """Return the model of ``spec`` without weights: most tensors are on the meta device.

    Load the needed ones with :meth:`LayeredModel.assign`. The head has the architecture's own size.
    """
    architecture = architecture_of(spec, allow_import)
    model = layers_of(architecture, spec, build_structure(architecture))
    if any(t.is_meta for t in model.unregistered()):
        model = layers_of(architecture, spec, build_module(architecture, 0))
    return model


def headed_structure(spec: ModelSpec, *, allow_import: ImportRule = False) -> LayeredModel:
    """Return :func:`structure` with the head of the spec's classes."""
    architecture = architecture_of(spec, allow_import)
    model = structure(spec, allow_import=allow_import)
    return retarget(model, spec.num_classes, spec.head_seed, lambda m: layers_of(architecture, spec, m))


def skeleton(spec: ModelSpec, allow_import: ImportRule = False) -> LayeredModel:
    """Return :func:`structure` from a small cache: a model is traced once for all requests that name it.

    Each call returns a module of its own.
    """
    kept = common_skeleton(spec, allow_import)
    return kept.over(copied(kept.module))


def common_skeleton(spec: ModelSpec, allow_import: ImportRule = False) -> LayeredModel:
    """Return the cache's own :func:`skeleton`, to be read or put over another module, never to be changed."""
    architecture_of(spec, allow_import)  # the permission is asked for every time
    weights = "DEFAULT" if spec.pretrained else "random:0"  # all that the structure depends on
    return _skeleton(replace(spec, weights=weights, num_classes=None, head_seed=0))


@lru_cache(maxsize=16)
def _skeleton(spec: ModelSpec) -> LayeredModel:
    return structure(spec, allow_import=True)


def architecture_of(spec: ModelSpec, allow_import: ImportRule) -> Architecture:
    """The architecture that ``spec`` names, at its input shape."""
    return find_architecture(
        spec.architecture, spec.input_shape, pretrained=spec.pretrained, allow_import=allow_import
    )


def layers_of(architecture: Architecture, spec: ModelSpec, module: nn.Module) -> LayeredModel:
    """The layers of a module of this architecture."""
    return layered(
        module,
        spec.input_shape,
        architecture=architecture.family_name,
        blocks=spec.blocks,
        leaf_types=architecture.leaf_types,
        functions=architecture.functions,
    )


def _load_file(
    architecture: Architecture, spec: ModelSpec, model: LayeredModel, state: Mapping[str, torch.Tensor]
) -> LayeredModel:
    head = _head_or_none(model)
    if head is not None:
        fit_head(model.module, head, state)
    load_state(model.module, state, f"weights file {spec.weights}")
    return layers_of(architecture, spec, model.module)


def _head_or_none(model: LayeredModel) -> str | None:
    try:
        return find_head(model)
    except ModelError:
        return None  # without a head that can be told, the checkpoint must fit as it is
