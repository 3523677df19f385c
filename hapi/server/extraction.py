"""Layers 1..split over the samples of a request: read, decode, forward, one frame for each COS batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from hapi.arrays import IntArray, LabelArray
from hapi.codecs.names import NONE
from hapi.data.dataset import Dataset
from hapi.data.reading.reader import AccessHint
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import TooLargeError, UnprocessableError
from hapi.process.threads import Threads
from hapi.profiler.timing import TimedLayers
from hapi.server.account import Account, Marks
from hapi.server.batching.policies import FIXED_BATCH
from hapi.server.context import RequestContext
from hapi.server.decoding.pool import Decoders
from hapi.server.device.device import PassPriority
from hapi.server.device.engine import DeviceEngine
from hapi.server.device.host_memory import HostMemory, halving
from hapi.server.device.memory_budget import MemoryRequest
from hapi.server.device.prefix_loader import prefix_key
from hapi.server.device.sizing import PrefixSizes
from hapi.server.device.worker import Workers
from hapi.server.feeding import Feeding, SampleRange
from hapi.server.frame_stream import Frame, Frames, FrameStream
from hapi.server.prefetch import Prefetcher
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.settings import MAX_COS_BATCH, ServiceSettings
from hapi.server.sharing.pipeline import Part, Pipeline
from hapi.server.sharing.request_share import RequestShare
from hapi.server.sharing.sharing import Sharing, dtype_name
from hapi.wire import messages
from hapi.wire.encoding import encode_tensor
from hapi.wire.frames import (
    Buffer,
    FrameHeader,
    StreamedBytes,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_bytes,
    end_frame,
    frame_bytes,
)
from hapi.wire.labels import LabelForm

CACHED_FRAME_BYTES = 4 << 20
"""Bytes of a frame of an answer whose features are all there: little enough to need no reservation."""


class Extraction:
    """Answers extract requests; thread-safe.

    At most two COS batches of a request's outputs are in memory, the one being sent and the one being made,
    and two of inputs, of which one is read and decoded ahead.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        workers: Workers,
        account: Account,
        loaders: Threads,
        decoders: Decoders,
        host: HostMemory,
        sharing: Sharing,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._account = account
        self._loaders = loaders
        self._decoders = decoders
        self._host = host
        self._sharing = sharing
        self._orders, self._copies = itertools.count(1), itertools.count(1)

    def stream(
        self,
        dataset: Dataset,
        request: messages.ExtractRequest,
        hint: AccessHint | None,
        context: RequestContext,
    ) -> FrameStream:
        """Answer ``request``: layers are loaded and memory is reserved now, samples are read with the frames.

        If all features are there neither is done, unless some of them turn out to be damaged.

        Args:
            dataset: the one that the request names.
            request: the samples and layers.
            hint: for :meth:`Dataset.read_at`.
            context: of the request.

        Raises:
            NotFoundError: the dataset has no such id; told before anything is loaded.
            UnprocessableError: the samples do not fit the model.
            TooLargeError: one sample is more than the server allows.
            BusyError: the memory did not come free by the deadline.
        """
        _check_input(dataset, request)
        feeding = Feeding(dataset, request, hint, self._decoders, context.clock)
        begun = self._account.marks(context.clock)
        with ExitStack() as resources:
            with self._account.busy.running(), context.clock.stage("model"):
                sizes = self._workers.sizing.of(request)
            largest = self._largest(max(sizes.input_bytes, sizes.output_bytes), sizes.widest_bytes)
            device_resources = resources.enter_context(ExitStack())
            share = resources.enter_context(self._sharing.of(dataset, request, sizes, context))
            pipeline = Pipeline(
                request.ids,
                feeding,
                share,
                context,
                row_bytes=sizes.output_bytes,
                running=self._account.busy.running,
                open_engine=lambda: self._open(request, feeding, context, sizes, device_resources),
            )
            if share.holds_all(request.ids):
                batch = min(largest, max(1, CACHED_FRAME_BYTES // sizes.output_bytes))
            else:
                batch = pipeline.open().batch
            answer = _Answer(request, context, sizes, batch, feeding.label_form)
            return FrameStream(
                context,
                sum(frame_bytes(h) for h in answer.headers) + end_bytes(answer.timed_layers),
                self._frames(answer, pipeline, share, begun),
                samples=len(request.ids),
                encoded=request.codec != NONE,
                resources=resources.pop_all(),
            )

    def _open(
        self,
        request: messages.ExtractRequest,
        feeding: Feeding,
        context: RequestContext,
        sizes: PrefixSizes,
        resources: ExitStack,
    ) -> DeviceEngine:
        """Choose the device, reserve memory and load the layers; ``resources`` give all of it back."""
        clock = context.clock
        worker = resources.enter_context(self._workers.one(sizes.weights[0].key))
        wanted = self._memory_request(request, sizes)
        with clock.stage("device_wait"):
            reservation = resources.enter_context(worker.memory.reserve(wanted, context.interest))
            sample_bytes = self._host_bytes(sizes) if worker.device.device.type == "cuda" else 0
            sample_bytes += sizes.output_bytes if request.codec != NONE else 0
            need = feeding.need(reservation.batch, sample_bytes)
            held = resources.enter_context(self._host.reserve("features", need, context.interest))
        feeding.grant(held, reservation.batch, sample_bytes)
        resources.enter_context(halving(lambda: worker.memory.out_of_memory(wanted.key, reservation.batch)))
        worker.cos_batch = reservation.batch
        context.progress.choose(worker.name, reservation.batch)
        with self._account.busy.running(), clock.stage("model"):
            loading = worker.cache.prefix(
                prefix_key(request), lambda: worker.prefixes.load(request, reservation.batch)
            )
            prefix = resources.enter_context(loading)
        if self._settings.model_reuse:
            worker.memory.loaded(
                reservation
            )  # else the cache does not know of them: they count as the reservation's
        priority = self._priority(request, context.tenant)
        timed = TimedLayers(prefix.layers(), worker.device.device) if request.time_layers else None
        return DeviceEngine(
            worker.device, prefix, reservation.batch, wanted.key, priority, context.clock, timed
        )

    def _frames(self, answer: _Answer, pipeline: Pipeline, share: RequestShare, begun: Marks) -> Frames:
        """A frame for each COS batch, and the end."""
        request, context = answer.request, answer.context
        yield from self._computed(answer, pipeline)
        engine = pipeline.engine
        seconds = () if engine is None else engine.layer_seconds
        report = self._account.report(begun, context, pipeline.largest, seconds)
        counts = share.counts.all()
        report = replace(report, joined=counts["joined"], kept=counts["recent"] + counts["cache"])
        end = StreamEnd(len(answer.headers), len(request.ids), report.to_json())
        yield [end_frame(end, answer.timed_layers, context.wire)]

    def _computed(self, answer: _Answer, pipeline: Pipeline) -> Iterator[Frame]:
        """A frame for each COS batch; one that is made is sent under the next pass, and never waits for decoding."""
        progress, count = answer.context.progress, len(answer.request.ids)
        parts, made = pipeline.parts(answer.sample_ranges), list[Callable[[], Frame]]()
        with Prefetcher(self._loaders, pipeline.load, parts, answer.context.interest) as loaded:
            while progress.done < count:
                while made and not loaded.ready():
                    yield made.pop(0)()
                part = loaded.next()
                progress.forward = pipeline.begin(part)
                while made:
                    yield made.pop(0)()
                features = pipeline.finish(part)
                progress.done += part.high - part.low
                made = [
                    partial(self._frame, answer, header, rows, labels)
                    for header, rows, labels in answer.cut(part, features)
                ]
                # The inputs go before the next ones come.
                progress.forward = str
                del part, features
            while made:
                yield made.pop(0)()

    def _frame(self, answer: _Answer, header: FrameHeader, rows: memoryview, labels: LabelArray) -> Frame:
        """The frame of a COS batch, encoded if the client asked for it: meanwhile the next pass runs."""
        (features, form), codec = header.tensors, answer.request.codec
        data: Buffer | StreamedBytes = rows
        if codec != NONE:
            with self._account.busy.running(), answer.context.clock.stage("send"):
                features, data = encode_tensor(features, rows, codec)
        encoded = FrameHeader(header.ids, (features, form))
        return data_frame(encoded, [data, byte_view(labels)], answer.context.wire)

    def _priority(self, request: messages.ExtractRequest, tenant: Tenant) -> PassPriority:
        # Layers that are timed run one by one: not together with others.
        merge_key = None if request.time_layers else (request.model.digest, request.precision)
        return PassPriority(tenant=tenant, order=next(self._orders), merge_key=merge_key)

    def _memory_request(self, request: messages.ExtractRequest, sizes: PrefixSizes) -> MemoryRequest:
        largest = self._largest(max(sizes.input_bytes, sizes.output_bytes), sizes.widest_bytes)
        if self._workers.all[0].device.device.type == "cuda":
            largest = max(1, min(largest, self._host.share * 3 // 4 // self._host_bytes(sizes)))
        fixed = 0
        if self._settings.policy == "fixed":
            fixed = min(self._settings.cos_batch or FIXED_BATCH, largest)
        weights = sizes.weights
        if not self._settings.model_reuse:  # each request has a copy of its own
            weights = tuple(replace(w, key=f"{w.key}/{next(self._copies)}") for w in weights)
        return MemoryRequest(
            key=(sizes.weights[0].key, request.split, request.model.input_shape),
            samples=len(request.ids),
            forward=sizes.forward,
            weights=weights,
            smallest=fixed or min(self._settings.min_cos_batch, largest),
            largest=fixed or largest,
        )

    @staticmethod
    def _host_bytes(sizes: PrefixSizes) -> int:
        """Bytes of host memory for each sample on its way to a GPU and back: three of inputs, two of outputs."""
        return 3 * sizes.input_bytes + 2 * sizes.output_bytes

    def _largest(self, sample_bytes: int, widest_bytes: int) -> int:
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
            MAX_COS_BATCH,
            settings.max_frame_bytes // max(1, sample_bytes),
            settings.max_layer_bytes // max(1, widest_bytes),
        )


class _Answer:
    """The frames of one request, one for each COS batch."""

    def __init__(
        self,
        request: messages.ExtractRequest,
        context: RequestContext,
        sizes: PrefixSizes,
        batch: int,
        form: LabelForm,
    ) -> None:
        """Cut the request's samples into COS batches of ``batch`` samples; labels are of ``form``."""
        self.request = request
        self.context = context
        self._row_bytes = sizes.output_bytes
        ids, count = request.ids, len(request.ids)
        self.sample_ranges: list[SampleRange] = [(i, min(i + batch, count)) for i in range(0, count, batch)]
        """The samples of each."""
        self.headers = [_features_header(ids[low:high], sizes, form) for low, high in self.sample_ranges]
        """Headers of their frames."""
        self.timed_layers = request.split if request.time_layers else 0
        """Layers whose seconds the end frame has."""

    def cut(self, part: Part, features: memoryview) -> Iterator[tuple[FrameHeader, memoryview, LabelArray]]:
        """Yield header, features and labels of each frame of a part, whose ``features`` are its samples' in order."""
        for (low, high), header in zip(self.sample_ranges, self.headers, strict=True):
            if part.low <= low < part.high:
                first, last = low - part.low, high - part.low
                rows = features[first * self._row_bytes : last * self._row_bytes]
                yield header, rows, part.labels[first:last]


def _check_input(dataset: Dataset, request: messages.ExtractRequest) -> None:
    """Refuse what does not fit before anything of that size is loaded, decoded or allocated."""
    shape = input_shape(dataset.layout, request.transform)
    if shape != request.model.input_shape:
        raise UnprocessableError(
            f"samples of {dataset.name!r} come out as {shape}, the model was cut for "
            f"{request.model.input_shape}; choose a transform (--image-size) that fits"
        )


def _features_header(chunk: IntArray, sizes: PrefixSizes, form: LabelForm) -> FrameHeader:
    features = TensorSpec(
        messages.FEATURES, dtype_name(sizes.output_dtype), (len(chunk), *sizes.output_shape)
    )
    return FrameHeader(chunk, (features, form.spec(len(chunk))))
