"""Layers 1..split of the model that a request names: found, checked, and placed on the device."""

from __future__ import annotations

import json

from hapi.errors import DeviceMemoryError, UnprocessableError
from hapi.models.devices import is_out_of_memory
from hapi.models.layers import LayeredModel
from hapi.models.repository import materialise
from hapi.profiler.timing import layer_segments
from hapi.server.device import Device
from hapi.server.model_cache import Front, ModelCache
from hapi.server.settings import ServerSettings
from hapi.storage.objects import ObjectStore
from hapi.wire import messages


class FrontLoader:
    """Loads the fronts of one device; thread-safe."""

    def __init__(
        self, settings: ServerSettings, store: ObjectStore, device: Device, cache: ModelCache
    ) -> None:
        self._settings = settings
        self._store = store
        self._device = device
        self._cache = cache

    def load(self, request: messages.ExtractRequest) -> Front:
        """The front of ``request``; raises as :func:`materialise`, and :class:`DeviceMemoryError`."""
        model = materialise(
            request.model,
            request.split,
            self._store,
            self._settings.allow_models,
            self._settings.max_model_bytes,
        )
        check_split(model, request.split, request.split_name)
        self._place(model, request.split)
        segment = model.segment(0, request.split, frozen=True)
        nbytes = sum(t.nbytes for t in (*segment.parameters(), *segment.buffers()))
        shapes, dtypes = model.output_shapes(), model.output_dtypes()
        widest = max(model.output_bytes()[: request.split + 1])
        return Front(
            segment,
            tuple(shapes[request.split]),
            dtypes[request.split],
            nbytes,
            widest,
            lambda: layer_segments(model, 0, request.split),
        )

    def _place(self, model: LayeredModel, split: int) -> None:
        """Move the model to the device; when it does not fit, once more without the idle fronts."""
        for attempt in range(2):
            try:
                model.to(self._device.device)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if attempt or not self._cache.drop_idle():
                break
        raise DeviceMemoryError(
            f"the weights of layers 1 to {split} ({model.resident_bytes()} bytes) do not fit "
            f"{self._device.device} beside what runs there; choose an earlier split, or try later"
        )


def front_key(request: messages.ExtractRequest) -> str:
    """All that the request says about its layers: whether a name is checked must not depend on the cache."""
    return json.dumps([request.model.to_json(), request.split, request.split_name])


def check_split(model: LayeredModel, split: int, name: str) -> None:
    """:class:`UnprocessableError` unless layer ``split`` is called ``name`` here too."""
    if not 1 <= split <= len(model.layers):
        raise UnprocessableError(f"split {split}: the model has layers 1 to {len(model.layers)}")
    if model.layers[split - 1].name != name:
        raise UnprocessableError(
            f"split {split} is layer {model.layers[split - 1].name!r} here and {name!r} at the client; "
            "use the same versions of hapi and of the model's library on both sides"
        )
