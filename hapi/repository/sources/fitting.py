"""A checkpoint as the weights of a network: streamed where it has all tensors in the very forms of the network."""

from __future__ import annotations

from collections.abc import Mapping

from hapi.errors import ModelError
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, architecture_of, layers_of, skeleton
from hapi.models.zoo.head import find_head, outputs, resize_head
from hapi.repository.entries import SourceTensor
from hapi.repository.sources.open import TensorSource

FittedModel = tuple[LayeredModel, Mapping[str, SourceTensor]]


def fitted(spec: ModelSpec, source: TensorSource) -> FittedModel | None:
    """Return the layers of ``spec`` without weights, and its tensors in ``source`` by name.

    None where the network must be built in memory: the checkpoint has other names, shapes or types, or the head is to
    be a fresh one.

    Args:
        spec: the network. Its own weights are not looked at.
        source: the checkpoint.
    """
    model = _with_head(skeleton(spec, allow_import=True), spec, source)
    registered = model.module.state_dict()
    shape = model.output_shapes()[-1]
    given = source.named_as(registered)
    if registered.keys() != given.keys() or spec.num_classes not in (
        None,
        shape[0] if shape else None,
    ):
        return None
    # Of two names of one tensor the later one counts, as when they are loaded in their order.
    homes = {model.tensors.first_name(name): given[name] for name in registered}
    tensors = {}
    for name in model.tensor_names(0, len(model)):
        own = model.tensors.get(name)
        found = homes.get(name) or (None if own.is_meta else SourceTensor.of(name, own))
        if found is None or (found.dtype, found.shape) != (
            str(own.dtype).removeprefix("torch."),
            tuple(own.shape),
        ):
            return None
        tensors[name] = SourceTensor(name, found.dtype, found.shape, found.pieces)
    return model, tensors


def _with_head(model: LayeredModel, spec: ModelSpec, source: TensorSource) -> LayeredModel:
    """The model with as many outputs as the checkpoint has."""
    try:
        head = find_head(model)
    except ModelError:
        return model  # the checkpoint must fit as it is
    weight = source.named_as(model.module.state_dict()).get(f"{head}.weight")
    if weight is None or not weight.shape or weight.shape[0] == outputs(model.module.get_submodule(head)):
        return model
    resize_head(model.module, head, weight.shape[0], seed=0)
    return layers_of(architecture_of(spec, allow_import=True), spec, model.module)
