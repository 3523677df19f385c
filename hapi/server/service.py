"""What a server does with a request, without sockets: documents in, streams of frames out.

The HTTP application and the loopback handler are two thin skins over this class. A stream's generator holds
its resources (resident layers, buffers) until it ends or is closed; at most two COS batches of it are in
memory: the one being sent and the one being made.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from hapi.clocks import StageClock
from hapi.errors import (
    BadRequestError,
    DeviceMemoryError,
    NotFoundError,
    TooLargeError,
    UnprocessableError,
)
from hapi.models.devices import is_out_of_memory, resolve_device
from hapi.models.layers import LayeredModel
from hapi.models.repository import list_models, materialise, open_model
from hapi.profiler.timing import TimedLayers, layer_segments
from hapi.server.account import Account, Marks
from hapi.server.device import Device
from hapi.server.model_cache import Front, ModelCache
from hapi.server.settings import ServerSettings
from hapi.storage.dataset import Dataset, Samples, open_dataset
from hapi.storage.listing import list_datasets
from hapi.storage.objects import ObjectStore
from hapi.storage.transform import input_batch, input_shape
from hapi.wire import messages
from hapi.wire.frames import (
    END_BYTES,
    Buffer,
    FrameHeader,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    frame_bytes,
)
from hapi.wire.references import DatasetReference, check_name

Frame = Iterable[Buffer]
T = TypeVar("T")

STORED_FRAME_BYTES = 8 << 20
"""Stored bytes per frame of split 0: large enough that headers do not count, small enough to overlap."""


@dataclass
class FrameStream:
    """An answer: its exact length, and its frames, each an iterable of buffers. Close it if not read to the end."""

    content_length: int
    frames: Iterator[Frame]
    clock: StageClock
    samples: int

    def close(self) -> None:
        """Release what the stream holds."""
        close = getattr(self.frames, "close", None)
        if close is not None:
            close()


class Service:
    """One store, one device, one model cache. Thread-safe; every method may block."""

    def __init__(self, settings: ServerSettings, store: ObjectStore) -> None:
        self.settings = settings
        self.store = store
        self.id = uuid.uuid4().hex[:12]
        self.cache = ModelCache(settings.model_cache_bytes, reuse=settings.model_reuse)
        self.device = Device(resolve_device(settings.device), self.cache.drop_idle)
        self.account = Account(
            self.id, self.device.device, running=settings.max_running, reuse=settings.model_reuse
        )
        self._datasets: dict[str, Dataset] = {}
        self._datasets_lock = threading.Lock()
        self._loaders = ThreadPoolExecutor(settings.max_running, thread_name_prefix="hapi-load")

    def close(self) -> None:
        """Stop the threads; streams under way end with an error."""
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.device.close()

    # -- documents ---------------------------------------------------------------------------------------

    def document(self, path: str) -> Any:
        """The JSON answer to a GET of ``path``; :class:`NotFoundError` for an unknown one."""
        parts = path.split("/")[1:]
        if parts == ["v1", "datasets"]:
            whole = [d for d in list_datasets(self.store) if d.state == "whole"]
            return {"datasets": [{"name": d.name, "version": d.version, "count": d.count} for d in whole]}
        if parts == ["v1", "models"]:
            return {"models": [summary.to_json() for summary in list_models(self.store)]}
        if len(parts) == 3 and parts[:2] == ["v1", "datasets"]:
            return self._describe_dataset(check_name(parts[2], "data set")).to_json()
        if len(parts) == 3 and parts[:2] == ["v1", "models"]:
            return open_model(self.store, check_name(parts[2], "model")).to_json()
        raise NotFoundError(f"no such path: {path[:200]!r}")

    def _describe_dataset(self, name: str) -> messages.DatasetDescription:
        dataset = open_dataset(self.store, name)
        return messages.DatasetDescription(
            reference=dataset.reference,
            count=dataset.count,
            classes=dataset.classes,
            total_bytes=dataset.total_bytes,
            layout=dataset.layout.to_json(),
            transform=dataset.transform,
        )

    # -- streams -----------------------------------------------------------------------------------------

    def stream(
        self, path: str, body: bytes, cancelled: threading.Event | None = None, queue_seconds: float = 0.0
    ) -> FrameStream:
        """The stream that answers a POST of ``body`` to ``path``.

        It stops at the next COS batch once ``cancelled`` is set; ``queue_seconds`` goes into its report.
        """
        cancelled = cancelled or threading.Event()
        document = messages.parse_body(body)
        if path == messages.EXTRACT_PATH:
            request = messages.ExtractRequest.from_json(document)
            clock = self._clock(request.job, queue_seconds)
            return self._start(self._extract(request, clock, cancelled), clock, len(request.ids))
        if path == messages.SAMPLES_PATH:
            stored = messages.SamplesRequest.from_json(document)
            clock = self._clock(stored.job, queue_seconds)
            return self._start(self._stored(stored, clock, cancelled), clock, len(stored.ids))
        if path == messages.TENSORS_PATH:
            weights = messages.TensorsRequest.from_json(document)
            clock = self._clock("", queue_seconds)
            return self._start(self._tensors(weights, clock, cancelled), clock, 0)
        raise NotFoundError(f"no such path: {path[:200]!r}")

    def _clock(self, job: str, queue_seconds: float) -> StageClock:
        clock = self.account.clock(job)
        clock.add("queue", queue_seconds)
        return clock

    def _start(self, parts: Iterator[Any], clock: StageClock, samples: int) -> FrameStream:
        """Run ``parts`` to its first yield, which is the length of the answer."""
        length = next(parts)
        if length > self.settings.max_response_bytes:
            parts.close()  # type: ignore[attr-defined]
            raise TooLargeError(
                f"the answer would be {length} bytes, at most {self.settings.max_response_bytes}; "
                "send fewer samples per request (--request-size)"
            )
        return FrameStream(length, parts, clock, samples)

    def _dataset(self, reference: DatasetReference) -> Dataset:
        dataset = self._datasets.get(reference.name)
        if dataset is not None and dataset.version == reference.version:
            return dataset  # without the lock: others may be opening something in a slow store
        with self._datasets_lock:
            dataset = self._datasets.get(reference.name)
            if dataset is None or dataset.version != reference.version:
                dataset = open_dataset(self.store, reference.name, reference.version)
                self._datasets[reference.name] = dataset
            return dataset

    def _extract(
        self, request: messages.ExtractRequest, clock: StageClock, cancelled: threading.Event
    ) -> Iterator[Any]:
        dataset = self._dataset(request.dataset)
        dataset.labels(request.ids)  # refuses ids that are not there before anything is loaded
        _check_input(dataset, request)
        key = _front_key(request)
        begun = self.account.marks(request.job)
        with self.account.busy.running(), clock.stage("model"):
            resident = self.cache.front(key, lambda: self._load_front(request))
            front = resident.__enter__()
        try:
            input_bytes = int(np.prod(request.model.input_shape)) * 4
            element = torch.empty(0, dtype=front.output_dtype).element_size()
            output_bytes = int(np.prod(front.output_shape)) * element
            batch = self._cos_batch(max(input_bytes, output_bytes), front.widest_bytes)
            chunks = [request.ids[i : i + batch] for i in range(0, len(request.ids), batch)]
            headers = [_features_header(chunk, front) for chunk in chunks]
            yield sum(frame_bytes(h) for h in headers) + END_BYTES

            def load(chunk: messages.IdArray) -> tuple[torch.Tensor, Samples]:
                with self.account.busy.running():
                    return self._load(dataset, chunk, request, clock)

            largest = 0
            timed = TimedLayers(front.layers(), self.device.device) if request.time_layers else None
            for header, (inputs, samples) in zip(headers, self._ahead(load, chunks, cancelled), strict=True):
                output = self.device.host_buffer((len(samples.ids), *front.output_shape), front.output_dtype)
                with self.account.busy.running():
                    fitted = self.device.forward(
                        timed or front.segment,
                        self.device.pinned(inputs),
                        output,
                        key=(key, inputs.shape[1:]),
                        clock=clock,
                    )
                largest = max(largest, fitted)
                yield data_frame(header, [_tensor_bytes(output), byte_view(samples.labels)])
            yield self._end(request.job, len(chunks), len(request.ids), clock, begun, largest, timed)
        finally:
            resident.__exit__(None, None, None)

    def _load(
        self, dataset: Dataset, chunk: messages.IdArray, request: messages.ExtractRequest, clock: StageClock
    ) -> tuple[torch.Tensor, Samples]:
        with clock.stage("read"):
            samples = dataset.read(chunk)
        with clock.stage("decode"):
            inputs = input_batch(samples, dataset.layout, request.transform, self.settings.decode_threads)
        return inputs, samples

    def _load_front(self, request: messages.ExtractRequest) -> Front:
        model = materialise(
            request.model,
            request.split,
            self.store,
            self.settings.allow_models,
            self.settings.max_model_bytes,
        )
        _check_split(model, request.split, request.split_name)
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
                model.to(self.device.device)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if attempt or not self.cache.drop_idle():
                break
        raise DeviceMemoryError(
            f"the weights of layers 1 to {split} ({model.resident_bytes()} bytes) do not fit "
            f"{self.device.device} beside what runs there; choose an earlier split, or try later"
        )

    def _cos_batch(self, sample_bytes: int, widest_bytes: int) -> int:
        """Samples per forward pass, so that a frame and the widest layer's output stay within their bounds."""
        settings = self.settings
        for what, need, limit in (
            ("a frame", sample_bytes, settings.max_frame_bytes),
            ("a layer's output", widest_bytes, settings.max_layer_bytes),
        ):
            if need > limit:
                raise TooLargeError(
                    f"one sample needs {need} bytes in {what}, at most {limit} are allowed; "
                    "choose another split or a smaller input (--image-size)"
                )
        return min(
            settings.cos_batch,
            settings.max_frame_bytes // max(1, sample_bytes),
            settings.max_layer_bytes // max(1, widest_bytes),
        )

    def _ahead(self, load: Any, chunks: Sequence[T], cancelled: threading.Event) -> Iterator[Any]:
        """``load`` of each chunk in order, the next one under way while the caller works on this one."""
        pending: Future[Any] = self._loaders.submit(load, chunks[0])
        try:
            for following in [*chunks[1:], None]:
                loaded = pending.result()
                if cancelled.is_set():
                    raise BadRequestError("the client went away")
                if following is not None:
                    pending = self._loaders.submit(load, following)
                yield loaded
        finally:
            pending.cancel()

    def _stored(
        self, request: messages.SamplesRequest, clock: StageClock, cancelled: threading.Event
    ) -> Iterator[Any]:
        dataset = self._dataset(request.dataset)
        begun = self.account.marks(request.job)
        lengths = dataset.lengths(request.ids)
        chunks = _by_bytes(request.ids, lengths, STORED_FRAME_BYTES)
        totals = [int(part.sum()) for part in np.split(lengths, np.cumsum([len(c) for c in chunks])[:-1])]
        headers = [_stored_header(chunk, total) for chunk, total in zip(chunks, totals, strict=True)]
        yield sum(frame_bytes(h) for h in headers) + END_BYTES

        def load(chunk: messages.IdArray) -> Samples:
            with self.account.busy.running(), clock.stage("read"):
                return dataset.read(chunk)

        for header, samples in zip(headers, self._ahead(load, chunks, cancelled), strict=True):
            yield data_frame(
                header, [byte_view(samples.data), byte_view(samples.offsets), byte_view(samples.labels)]
            )
        yield self._end(request.job, len(chunks), len(request.ids), clock, begun)

    def _tensors(
        self, request: messages.TensorsRequest, clock: StageClock, cancelled: threading.Event
    ) -> Iterator[Any]:
        model = open_model(self.store, request.name, request.digest)
        begun = self.account.marks("")
        headers = [FrameHeader((), (model.tensor_spec(name),)) for name in request.names]
        yield sum(frame_bytes(h) for h in headers) + END_BYTES

        def load(name: str) -> Buffer:
            with self.account.busy.running(), clock.stage("read"):
                return model.read_tensor(name)

        for header, raw in zip(headers, self._ahead(load, request.names, cancelled), strict=True):
            yield data_frame(header, [raw])
        yield self._end("", len(headers), 0, clock, begun)

    def _end(
        self,
        job: str,
        frames: int,
        samples: int,
        clock: StageClock,
        begun: Marks,
        cos_batch: int = 0,
        timed: TimedLayers | None = None,
    ) -> list[bytes]:
        layers = () if timed is None else tuple(timed.seconds)
        report = self.account.report(job, begun, clock, cos_batch, layers)
        return [end_frame(StreamEnd(frames, samples, report.to_json()))]


def _check_input(dataset: Dataset, request: messages.ExtractRequest) -> None:
    """Refuse what does not fit before anything of that size is loaded, decoded or allocated."""
    shape = input_shape(dataset.layout, request.transform)
    if shape != request.model.input_shape:
        raise UnprocessableError(
            f"samples of {dataset.name!r} come out as {shape}, the model was cut for "
            f"{request.model.input_shape}; choose a transform (--image-size) that fits"
        )


def _front_key(request: messages.ExtractRequest) -> str:
    """All that the request says about its layers: whether a name is checked must not depend on the cache."""
    return json.dumps([request.model.to_json(), request.split, request.split_name])


def _check_split(model: LayeredModel, split: int, name: str) -> None:
    if not 1 <= split <= len(model.layers):
        raise UnprocessableError(f"split {split}: the model has layers 1 to {len(model.layers)}")
    if model.layers[split - 1].name != name:
        raise UnprocessableError(
            f"split {split} is layer {model.layers[split - 1].name!r} here and {name!r} at the client; "
            "use the same versions of hapi and of the model's library on both sides"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _features_header(chunk: messages.IdArray, front: Front) -> FrameHeader:
    features = TensorSpec(
        messages.FEATURES, _dtype_name(front.output_dtype), (len(chunk), *front.output_shape)
    )
    labels = TensorSpec(messages.LABELS, "int64", (len(chunk),))
    return FrameHeader(tuple(chunk.tolist()), (features, labels))


def _stored_header(chunk: messages.IdArray, total: int) -> FrameHeader:
    return FrameHeader(
        tuple(chunk.tolist()),
        (
            TensorSpec(messages.STORED, "uint8", (total,)),
            TensorSpec(messages.OFFSETS, "int64", (len(chunk) + 1,)),
            TensorSpec(messages.LABELS, "int64", (len(chunk),)),
        ),
    )


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous host tensor of any dtype (numpy knows no bfloat16)."""
    return byte_view(tensor.reshape(-1).view(torch.uint8).numpy())


def _by_bytes(ids: messages.IdArray, lengths: messages.IdArray, limit: int) -> list[messages.IdArray]:
    """Consecutive pieces of ``ids`` of about ``limit`` stored bytes, at least one sample each."""
    before = np.cumsum(lengths) - lengths
    return [part for part in np.split(ids, np.flatnonzero(np.diff(before // limit)) + 1) if len(part)]
