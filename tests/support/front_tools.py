"""What the tests of shared weights need: fronts of invented tensors, and stores that count or fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from hapi.models.graph.digest import content_key
from hapi.models.graph.layers import LayeredModel
from hapi.repository.prefix import open_prefix
from hapi.server.device.model_cache import FrozenPrefix, ModelCache
from hapi.store.base import ObjectStore
from hapi.wire.references import ModelReference

Sizes = dict[str, int]


def made_front(
    cache: ModelCache, sizes: Sizes, load: Callable[[str], None] = lambda key: None
) -> FrozenPrefix:
    """A front that needs these tensors (key to bytes), loaded through the cache's pool."""

    def bring(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for key in missing:
            load(key)
            yield key, torch.zeros(sizes[key], dtype=torch.uint8)

    cache.pool().take(sizes, bring)
    return FrozenPrefix(nn.Identity(), (1,), torch.float32, tuple(sizes.items()))  # type: ignore[arg-type]


def use(cache: ModelCache, key: str, sizes: Sizes) -> FrozenPrefix:
    """Ask for a front and give it back."""
    with cache.prefix(key, lambda: made_front(cache, sizes)) as found:
        return found


def contents(model: LayeredModel, split: int) -> Sizes:
    """Distinct tensors of layers 1..split of a model that is loaded: key of content to bytes."""
    named = [(n, model.tensors.get(n)) for n in model.tensor_names(0, split)]
    named += [(n, model.traced.constants[n]) for n in model.constant_names(0, split)]
    return {content_key(model.digest_of(n), t): t.nbytes for n, t in named}


def tuned(model: LayeredModel, after: int) -> LayeredModel:
    """The model after another job trained all layers past ``after``."""
    twin = model.over(copy.deepcopy(model.module))
    generator = torch.Generator().manual_seed(after)
    kept = set(twin.tensor_names(0, after))
    with torch.no_grad():
        for name in twin.tensor_names(after, len(twin)):
            tensor = twin.tensors.get(name)
            if name not in kept and tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator))
    return twin


def loaded_front(
    reference: ModelReference,
    split: int,
    store: ObjectStore,
    allow_imports: Collection[str] = (),
    max_bytes: int | None = None,
) -> LayeredModel:
    """The model of ``reference`` with the weights of layers 1..``split``, in tensors of its own, and no others."""
    model, source = open_prefix(reference, split, store, allow_imports, max_bytes)
    for name, tensor in source.read(model.tensor_names(0, split)):
        model.assign(name, tensor, model.digest_of(name))
    return model
