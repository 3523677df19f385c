"""Sizes of a prefix on the device, known before anything of it is loaded.

They follow from the layers' structure alone, on the meta device: a client's claim about its own memory would
have to be checked all the same. They are found once for each model and input shape (10 to 200 ms) and kept.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hapi.errors import ModelError, UnprocessableError
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.precision import in_precision
from hapi.models.graph.user_code import unidentified_layer
from hapi.profiler.work import LayerWork, layer_work
from hapi.repository.built import prefix_bytes
from hapi.repository.prefix import structure_of
from hapi.server.batching.forward_memory import ForwardMemory, forward_memory
from hapi.server.batching.policies import Weights
from hapi.store.base import ObjectStore
from hapi.wire.messages import ExtractRequest
from hapi.wire.warm_up import WarmUpRequest

PrefixRequest = ExtractRequest | WarmUpRequest
"""Requests that name layers 1..split of a model."""
KEPT = 64
"""Models whose sizes are kept; of more, the one not asked for longest is forgotten."""


@dataclass(frozen=True)
class PrefixSizes:
    """Sizes of layers 1..split of one model."""

    weights: tuple[Weights, ...]
    """One entry: all of the prefix's. Parts that other prefixes have already are seen when it is loaded."""
    output_shape: tuple[int, ...]
    """Shape of one sample's output."""
    output_dtype: torch.dtype
    input_bytes: int
    """Bytes of one sample as float32."""
    output_bytes: int
    widest_bytes: int
    """Bytes of one sample in the widest of the layers' inputs and outputs."""
    forward: ForwardMemory
    unidentified: bool = False
    """True if the digest does not tell what a layer gives: code whose source cannot be read, or :attr:`varies`."""
    varies: bool = False
    """True if each pass gives other features: a layer draws random numbers, or computes with all of its samples."""


_Kept = tuple[LayeredModel, Sequence[LayerWork], int]
"""A model, the work of its layers, and how many layers come before the first that no digest tells."""


class Sizing:
    """Sizes of fronts, kept by model; thread-safe."""

    def __init__(self, store: ObjectStore, allow_models: Sequence[str], device: torch.device) -> None:
        """Size models in ``store`` for ``device`` and others like it; ``allow_models`` may be imported."""
        self._store = store
        self._allow = allow_models
        self._device = device
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def of(self, request: PrefixRequest) -> PrefixSizes:
        """Return the sizes of the prefix that ``request`` names.

        :class:`UnprocessableError` for a split that the model does not have, :class:`ConflictError` when the
        store has another model under its name.
        """
        model, work, identified = self._model(request)
        split = request.split
        if not 1 <= split <= len(model.layers):
            raise UnprocessableError(f"split {split}: the model has layers 1 to {len(model.layers)}")
        sizes = model.output_bytes()
        return PrefixSizes(
            weights=(prefix_weights(request, model),),
            output_shape=tuple(model.output_shapes()[split]),
            output_dtype=model.output_dtypes()[split],
            input_bytes=sizes[0],
            output_bytes=sizes[split],
            widest_bytes=max(sizes[: split + 1]),
            forward=forward_memory(work[:split], sizes[0], sizes[split], self._device.type),
            unidentified=split > identified,
            varies=any(layer.always_random or layer.combines for layer in model.layers[:split]),
        )

    def _model(self, request: PrefixRequest) -> _Kept:
        # A pushed model's digest is part of it, as it may be replaced by another structure; what is found has it.
        digest = request.model.digest if request.model.source == "store" else ""
        key = json.dumps([replace(request.model, digest=digest).to_json(), request.precision])
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        whole = structure_of(request.model, request.split, self._store, self._allow)
        model = in_precision(whole, request.precision, self._device)
        first = unidentified_layer(whole, len(whole))
        identified = len(whole) if first is None else first[0].index - 1
        found = (model, _work(model, self._device.type), identified)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found


def prefix_weights(request: PrefixRequest, model: LayeredModel) -> Weights:
    """All weights of the front that ``request`` names.

    Their key is the request's digest with their bytes and type: a digest is a client's word until the front is
    loaded, and with another model behind it must not be taken for somebody else's front.
    """
    nbytes = prefix_bytes(model, request.split)
    return Weights(key=f"{request.model.digest}/{nbytes}/{request.precision}", nbytes=nbytes)


def _work(model: LayeredModel, device: str) -> Sequence[LayerWork]:
    try:
        return layer_work(model, len(model), device)
    except ModelError:  # a layer that looks at its data: by its input and output (earlier text, section 4.3)
        sizes = model.output_bytes()
        return [
            LayerWork(
                flops=0.0,
                traffic_bytes=0,
                working_bytes=before + after,
                saved_bytes=0,
                workspace_bytes=0,
            )
            for before, after in pairwise(sizes)
        ]
