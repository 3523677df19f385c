"""Layers 1..split of the model that a request names: found, checked, and placed on the device."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

import torch

from hapi.allocator import give_back_freed_memory
from hapi.errors import ModelError, UnprocessableError
from hapi.models.devices import does_not_fit
from hapi.models.graph.digest import content_key
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.precision import check_kernels, in_precision, rounded_weight
from hapi.models.shared.device_weights import DeviceWeights, device_weights
from hapi.models.shared.keys import rounded_key
from hapi.models.shared.weights import SharedWeights, shared_weights
from hapi.process.memory_errors import is_out_of_memory
from hapi.profiler.timing import layer_segments
from hapi.repository.built import BuiltModels
from hapi.repository.prefix import PrefixSource, open_prefix
from hapi.server.device.memory_format import suits_channels_last
from hapi.server.device.model_cache import FrozenPrefix, ModelCache
from hapi.server.device.sizing import PrefixRequest, prefix_weights
from hapi.server.settings import ServiceSettings
from hapi.store.base import ObjectStore


class PrefixLoader:
    """Loads the fronts of one device, over weights that they share; thread-safe."""

    def __init__(
        self, settings: ServiceSettings, store: ObjectStore, device: torch.device, cache: ModelCache
    ) -> None:
        self._settings = settings
        self._store = store
        self._device = device
        self._cache = cache
        self._shared: SharedWeights | DeviceWeights | None = None
        if cache.reuse:
            self._shared = shared_weights(device) or device_weights(device)
        self.builds = BuiltModels() if cache.reuse else BuiltModels(kept=0)

    def load(self, request: PrefixRequest, batch: int) -> FrozenPrefix:
        """Return the prefix of ``request``; raises as :func:`open_prefix` and :func:`does_not_fit`.

        ``batch`` samples of it fit the memory.
        Its weights are taken from the cache's pool; only missing ones are read or built.
        :class:`UnprocessableError` names a layer that cannot compute in the request's precision.
        A model from the zoo is built whole: the memory of its layers after the split goes back to the system.
        """
        builds = self.builds.builds
        try:
            return self._load(request, batch)
        finally:
            if self.builds.builds != builds:
                give_back_freed_memory()

    def _load(self, request: PrefixRequest, batch: int) -> FrozenPrefix:
        split = request.split
        model, source = open_prefix(
            request.model,
            split,
            self._store,
            self._settings.allow_model,
            self._settings.max_model_bytes,
            self.builds,
        )
        check_split(model, split, request.split_name)
        model = in_precision(model, request.precision, self._device)
        try:
            check_kernels(model, 0, split, self._device)
        except ModelError as error:
            raise UnprocessableError(f"the server's {error}") from None
        needs = PrefixTensors(model, source, split)
        pool = self._cache.pool()
        found = pool.take(needs.sizes, lambda missing: self._bring(needs, missing, split))
        try:
            needs.assign(found)
            prefix = _prefix(request, model, tuple(needs.sizes.items()))
            prefix.channels_last = suits_channels_last(
                prefix.segment, self._settings.memory_format, self._device, batch
            )
            return prefix
        except BaseException:
            pool.release(found)
            raise

    def _bring(
        self, needs: PrefixTensors, missing: Collection[str], split: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        brought = needs.bring(missing)
        if self._shared is not None:
            brought = self._shared.take({key: needs.forms[key] for key in missing}, needs.bring)
        for key, tensor in brought:
            yield key, self._to_device(tensor, split)

    def _to_device(self, tensor: torch.Tensor, split: int) -> torch.Tensor:
        """Copy to the device; when it does not fit, once more without the idle prefixes."""
        for attempt in range(2):
            try:
                placed = tensor.detach().to(self._device)
                # What is a part of something larger would keep all of that from being freed.
                return placed.clone() if placed.untyped_storage().nbytes() > placed.nbytes else placed
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if attempt or not self._cache.drop_idle():
                break
        raise does_not_fit(
            self._device,
            f"the weights of layers 1 to {split} do not fit {self._device} beside the {self._cache.resident_bytes} "
            "bytes of weights and all else there; choose an earlier split, or try later",
        )


class PrefixTensors:
    """The tensors that a prefix needs, by key of content. Several names may stand for one content."""

    def __init__(self, model: LayeredModel, source: PrefixSource, split: int) -> None:
        self._model = model
        self._source = source
        self._names: dict[str, list[str]] = {}
        self._constants: dict[str, list[str]] = {}
        self.forms: dict[str, torch.Tensor] = {}
        """Tensors of the same form by key, in layer order, constants last."""
        for name in model.tensor_names(0, split):
            key = rounded_key(model, name, source.key(name))
            self._names.setdefault(key, []).append(name)
            self.forms[key] = model.tensors.get(name)
        for name in model.constant_names(0, split):
            constant = model.traced.constants[name]
            known = model if model.rounding is None else model.rounding.base
            key = content_key(known.digest_of(name), constant)
            self._constants.setdefault(key, []).append(name)
            self.forms[key] = constant
        self.sizes = {key: form.numel() * form.itemsize for key, form in self.forms.items()}
        """Bytes by key."""

    def bring(self, keys: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of ``keys`` on the CPU; one is read for names with the same content."""
        names = {self._names[key][0]: key for key in keys if key in self._names}
        for key in keys:
            if key not in self._names:
                yield key, self._model.traced.constants[self._constants[key][0]]
        for name, tensor in self._source.read(list(names)):
            yield names[name], rounded_weight(self._model, name, tensor)

    def assign(self, found: Mapping[str, torch.Tensor]) -> None:
        """Put the resident tensors into the model."""
        for key, names in self._names.items():
            for name in names:
                self._model.assign(name, found[key])
        for key, names in self._constants.items():
            self._model.traced.constants.update(dict.fromkeys(names, found[key]))


def _prefix(
    request: PrefixRequest, model: LayeredModel, weights: tuple[tuple[str, int], ...]
) -> FrozenPrefix:
    split = request.split
    return FrozenPrefix(
        segment=model.segment(0, split, frozen=True),
        output_shape=tuple(model.output_shapes()[split]),
        output_dtype=model.output_dtypes()[split],
        weights=weights,
        identity=prefix_weights(request, model).key,
        make_layers=lambda: layer_segments(model, 0, split),
    )


def prefix_key(request: PrefixRequest) -> str:
    """Return all facts of the request about its layers: the check of a name must not depend on the cache."""
    return json.dumps([request.model.to_json(), request.split, request.split_name, request.precision])


def check_split(model: LayeredModel, split: int, name: str) -> None:
    """Raise :class:`UnprocessableError` unless layer ``split`` is called ``name`` here too."""
    if not 1 <= split <= len(model.layers):
        raise UnprocessableError(f"split {split}: the model has layers 1 to {len(model.layers)}")
    if model.layers[split - 1].name != name:
        raise UnprocessableError(
            f"split {split} is layer {model.layers[split - 1].name!r} here and {name!r} at the client; "
            "use the same versions of hapi and of the model's library on both sides"
        )
