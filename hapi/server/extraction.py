"""Layers 1..split over the samples of a request: read, decode, forward, one frame for each COS batch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hapi.clocks import StageClock
from hapi.errors import TooLargeError, UnprocessableError
from hapi.profiler.timing import TimedLayers
from hapi.server.account import Account, RequestClock
from hapi.server.ahead import Ahead
from hapi.server.device import Device
from hapi.server.fronts import FrontLoader, front_key
from hapi.server.model_cache import Front, ModelCache
from hapi.server.settings import ServerSettings
from hapi.storage.dataset import Dataset, Samples
from hapi.storage.objects import ObjectStore
from hapi.storage.transform import input_batch, input_shape
from hapi.wire import messages
from hapi.wire.frames import (
    Buffer,
    FrameHeader,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_bytes,
    end_frame,
    frame_bytes,
)

Frame = Iterable[Buffer]


class Extraction:
    """Answers extract requests on one device; thread-safe.

    Of a request at most two COS batches of outputs are in memory, the one being sent and the one being made, and
    one of inputs that is read and decoded ahead.
    """

    def __init__(
        self,
        settings: ServerSettings,
        store: ObjectStore,
        device: Device,
        cache: ModelCache,
        account: Account,
        loaders: ThreadPoolExecutor,
    ) -> None:
        self._settings = settings
        self._device = device
        self._cache = cache
        self.fronts = FrontLoader(settings, store, device.device, cache)
        self._account = account
        self._loaders = loaders

    def frames(
        self,
        dataset: Dataset,
        request: messages.ExtractRequest,
        clock: RequestClock,
        cancelled: threading.Event,
    ) -> Iterator[Any]:
        """First the answer's length in bytes, then its frames."""
        dataset.labels(request.ids)  # refuses ids that are not there before anything is loaded
        _check_input(dataset, request)
        key = front_key(request)
        begun = self._account.marks(request.job)
        with self._account.busy.running(), clock.stage("model"):
            resident = self._cache.front(key, lambda: self.fronts.load(request))
            front = resident.__enter__()
        try:
            input_bytes = int(np.prod(request.model.input_shape)) * 4
            element = torch.empty(0, dtype=front.output_dtype).element_size()
            output_bytes = int(np.prod(front.output_shape)) * element
            batch = self._cos_batch(max(input_bytes, output_bytes), front.widest_bytes)
            chunks = [request.ids[i : i + batch] for i in range(0, len(request.ids), batch)]
            headers = [_features_header(chunk, front) for chunk in chunks]
            timed_layers = request.split if request.time_layers else 0
            yield sum(frame_bytes(h) for h in headers) + end_bytes(timed_layers)

            def load(chunk: messages.IdArray) -> tuple[torch.Tensor, Samples]:
                with self._account.busy.running():
                    return self._load(dataset, chunk, request, clock)

            timed = TimedLayers(front.layers(), self._device.device) if request.time_layers else None
            largest = 0
            with Ahead(self._loaders, load, chunks, cancelled) as loaded:
                frame: Frame | None = None
                for header in headers:
                    # A frame that is made is sent under the next forward pass, and does not wait for decoding.
                    if frame is not None and not loaded.ready():
                        yield frame
                        frame = None
                    inputs, samples = loaded.next()
                    shape = (len(samples.ids), *front.output_shape)
                    output = self._device.host_buffer(shape, front.output_dtype)
                    with self._account.busy.running():
                        running = self._device.begin(
                            timed or front.segment,
                            self._device.pinned(inputs),
                            output,
                            key=(key, inputs.shape[1:]),
                            clock=clock,
                        )
                    try:
                        if frame is not None:
                            yield frame
                    finally:
                        with self._account.busy.running():
                            largest = max(largest, running.result())  # until then it writes into ``output``
                    frame = data_frame(header, [tensor_bytes(output), byte_view(samples.labels)])
                if frame is not None:
                    yield frame
            layers = () if timed is None else tuple(timed.seconds)
            report = self._account.report(request.job, begun, clock, largest, layers)
            yield [end_frame(StreamEnd(len(chunks), len(request.ids), report.to_json()), timed_layers)]
        finally:
            resident.__exit__(None, None, None)

    def _load(
        self, dataset: Dataset, chunk: messages.IdArray, request: messages.ExtractRequest, clock: StageClock
    ) -> tuple[torch.Tensor, Samples]:
        with clock.stage("read"):
            samples = dataset.read(chunk)
        with clock.stage("decode"):
            inputs = input_batch(samples, dataset.layout, request.transform, self._settings.decode_threads)
        return inputs, samples

    def _cos_batch(self, sample_bytes: int, widest_bytes: int) -> int:
        """Samples per forward pass, so that a frame and the widest layer's output stay within their bounds."""
        settings = self._settings
        for what, need, limit, flag in (
            ("a frame", sample_bytes, settings.max_frame_bytes, "--max-frame-bytes"),
            ("a layer's output", widest_bytes, settings.max_layer_bytes, "--max-layer-bytes"),
        ):
            if need > limit:
                raise TooLargeError(
                    f"one sample needs {need} bytes in {what}, the server allows at most {limit} "
                    f"({flag} of hapi-server); choose another split or a smaller input (--image-size)"
                )
        return min(
            settings.cos_batch,
            settings.max_frame_bytes // max(1, sample_bytes),
            settings.max_layer_bytes // max(1, widest_bytes),
        )


def _check_input(dataset: Dataset, request: messages.ExtractRequest) -> None:
    """Refuse what does not fit before anything of that size is loaded, decoded or allocated."""
    shape = input_shape(dataset.layout, request.transform)
    if shape != request.model.input_shape:
        raise UnprocessableError(
            f"samples of {dataset.name!r} come out as {shape}, the model was cut for "
            f"{request.model.input_shape}; choose a transform (--image-size) that fits"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _features_header(chunk: messages.IdArray, front: Front) -> FrameHeader:
    features = TensorSpec(
        messages.FEATURES, _dtype_name(front.output_dtype), (len(chunk), *front.output_shape)
    )
    labels = TensorSpec(messages.LABELS, "int64", (len(chunk),))
    return FrameHeader(tuple(chunk.tolist()), (features, labels))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous host tensor of any dtype (numpy knows no bfloat16)."""
    return byte_view(tensor.reshape(-1).view(torch.uint8).numpy())
