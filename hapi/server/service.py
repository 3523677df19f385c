"""A server's answers to requests, without sockets: documents in, streams of frames out.

The HTTP application and the loopback handler are two thin skins over this class. A stream holds its resources
(resident layers, reserved memory) until it ends or is closed; at most two COS batches of it are in memory:
the one being sent and the one being made.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hapi import __version__
from hapi.cache.code_version import code_version
from hapi.data.epoch_order import HOLDOUT_EPOCH
from hapi.data.listing import list_datasets
from hapi.data.reading.reader import chunk_cache
from hapi.data.shard_marks import changed_shards
from hapi.data.transforms.decode_limits import DecodeLimits
from hapi.errors import BadRequestError, DataError, NotFoundError, TooLargeError
from hapi.process.machine_id import machine_id
from hapi.repository.manifest import ModelManifest, structure_of_document
from hapi.repository.opening import has_structure, list_models, open_model, read_structure
from hapi.repository.versions import list_versions, model_names, read_document, version_key
from hapi.server.account import Account
from hapi.server.context import RequestClock, RequestContext
from hapi.server.datasets import OpenDatasets
from hapi.server.decoding.pool import TASK_BYTES, Decoders
from hapi.server.device.host_memory import HostMemory, host_budget
from hapi.server.device.worker import make_workers
from hapi.server.epoch_orders import EpochOrderCache
from hapi.server.extraction import Extraction
from hapi.server.frame_stream import FrameStream
from hapi.server.lifecycle.progress_watch import ProgressWatch
from hapi.server.packs.streams import STREAM_MEMORY, STREAMS, PackStreams
from hapi.server.providers.stores import make_providers, memory_bytes
from hapi.server.scheduling.costs import Request
from hapi.server.settings import ServiceSettings
from hapi.server.sharing.sharing import make_sharing
from hapi.server.status import DeviceStatus
from hapi.server.stored_bytes import StoredBytes
from hapi.server.tenants.access import EVERYTHING, Access
from hapi.server.warm_up import WarmUps
from hapi.store.base import ObjectStore
from hapi.wire import held_out, messages
from hapi.wire.frames import WIRE_VERSION
from hapi.wire.references import check_digest, check_name
from hapi.wire.sequences import SequenceRange

DOCUMENT_PATHS = (
    messages.DATASETS_PATH,
    f"{messages.DATASETS_PATH}/{{name}}",
    f"{messages.DATASETS_PATH}/{{name}}/{messages.CHANGED}",
    f"{messages.DATASETS_PATH}/{{name}}/{held_out.PART}/{{seed}}/{{count}}",
    messages.MODELS_PATH,
    f"{messages.MODELS_PATH}/{{model}}",
    f"{messages.STRUCTURES_PATH}/{{digest}}",
)
"""Paths that :meth:`Service.document` answers."""


class Service:
    """One store, its devices and what is resident on them. Thread-safe; every method may block."""

    def __init__(self, settings: ServiceSettings, store: ObjectStore, token: str | None = None) -> None:
        """Serve ``store``; ``token`` is for the other servers of ``settings.providers``."""
        self.settings = settings
        self.store = store
        self.providers = make_providers(settings, store, token)
        self.id = uuid.uuid4().hex[:12]
        self.code = code_version(settings.arithmetic)
        """Version of the code that computes features here; see :mod:`hapi.cache.code_version`."""
        self.workers = make_workers(settings, self.providers.packs)
        self.slots = settings.max_running * len(self.workers.all)
        """Requests worked on at a time, but for one more of a tenant that asks rarely."""
        chunks = chunk_cache(store, settings.chunk_cache)
        overhead = self.workers.host_bytes + len(chunks.data) + settings.cache_memory
        overhead += STREAM_MEMORY + memory_bytes(settings, store)
        budget = host_budget(settings.host_memory, overhead)
        self.sharing = make_sharing(settings, budget, self.code, self.workers)
        self.host = HostMemory(
            budget,
            self.slots + 1,
            settings.decode_processes,
            TASK_BYTES,
            self.sharing.table.max_bytes,
        )
        self.host.shared_held = lambda: self.sharing.table.nbytes
        limits = DecodeLimits(
            settings.max_image_pixels, "--max-image-pixels of hapi-server", self.host.images
        )
        self.decoders = Decoders(settings.decode_processes, settings.decode_threads, limits)
        self.account = Account(
            self.id,
            self.workers.all[0].device.device,
            running=self.slots,
            devices=len(self.workers.all),
            reuse=settings.model_reuse,
            elsewhere=lambda: self.decoders.cpu_seconds,
        )
        self.watch = ProgressWatch(settings.stuck_seconds, settings.lost_threads(self.slots))
        self.watch.also(store.pools())
        self.watch.also(self.providers.pools())
        self._loaders = self.watch.threads(self.slots + 1, "hapi-load", of_slots=True)
        self._datasets = OpenDatasets(store, chunks)
        self._orders = EpochOrderCache()
        self.extraction = Extraction(
            settings, self.workers, self.account, self._loaders, self.decoders, self.host, self.sharing
        )
        self.warm_ups = WarmUps(self.workers, self.watch.threads(1, "hapi-warm"), keeps=settings.model_reuse)
        self._stored = StoredBytes(self.account, self._loaders, self.host)
        self.packs = PackStreams(
            self.providers.packs,
            self.providers.own,
            self.account,
            lambda name: self.watch.threads(STREAMS + 1, name, of_slots=True),
        )
        try:
            self.decoders.wait()
        except BaseException:
            self.close()
            raise

    @property
    def device_names(self) -> str:
        """Names of all devices, with commas between them."""
        return ",".join(str(worker.device.device) for worker in self.workers.all)

    def children(self) -> list[int]:
        """Ids of the processes that end with this one."""
        return self.decoders.pids

    def devices(self) -> list[DeviceStatus]:
        """All devices as they are now."""
        return [worker.status() for worker in self.workers.all]

    def close(self) -> None:
        """Stop the threads; streams under way end with an error."""
        self.watch.close()
        self._loaders.close()
        self.packs.close()
        self.warm_ups.close()
        self.providers.close()
        self.decoders.close()
        self.workers.close()
        self.sharing.close()

    # -- documents ---------------------------------------------------------------------------------------

    def document(self, path: str, access: Access = EVERYTHING) -> Any:
        """The JSON answer to a GET of ``path``; :class:`NotFoundError` for an unknown one, and for what ``access`` has
        not.
        """
        parts = path.split("/")[1:]
        if path == messages.VERSION_PATH:
            return self.version()
        if parts == ["v1", "datasets"]:
            whole = [
                d for d in list_datasets(self.store) if d.state == "whole" and access.sees_dataset(d.name)
            ]
            return {"datasets": [{"name": d.name, "version": d.version, "count": d.count} for d in whole]}
        if parts == ["v1", "models"]:
            return {"models": self._list_models(access)}
        if len(parts) > 2 and parts[:2] == ["v1", "datasets"]:
            access.check_dataset(check_name(parts[2], "dataset"))
        if len(parts) > 2 and parts[:2] == ["v1", "models"]:
            access.check_model(parts[2])
        if len(parts) == 3 and parts[:2] == ["v1", "datasets"]:
            return self._describe_dataset(check_name(parts[2], "dataset")).to_json()
        if len(parts) == 4 and parts[:2] == ["v1", "datasets"] and parts[3] == messages.CHANGED:
            return self._changed_shards(check_name(parts[2], "dataset"))
        if len(parts) == 6 and parts[:2] == ["v1", "datasets"] and parts[3] == held_out.PART:
            return self._held_out(held_out.HeldOut.from_path(parts[2], *parts[4:])).to_json()
        if len(parts) == 3 and parts[:2] == ["v1", "models"]:
            return self._describe_model(parts[2], access).to_json()
        if len(parts) == 3 and parts[:2] == ["v1", "structures"]:
            return self._structure(check_digest(parts[2], "structure"), access)
        raise NotFoundError(f"no such path: {path[:200]!r}")

    def version(self, wait: float | None = None) -> dict[str, Any]:
        """Versions of Hapi, of the wire and of the code that computes features here, what that is, the ids of this
        process and of the processors that it runs on, and the room of its cache of features; and how many seconds a new
        job's requests would ``wait``, where that is known.
        """
        caches = self.sharing.caches
        return {
            "hapi": __version__,
            "wire": WIRE_VERSION,
            "server": self.id,
            "code": self.code,
            "machine": machine_id(),
            "computes": self.workers.arithmetic,
            **({} if wait is None else {"wait": round(wait, 3)}),
            **({} if caches is None else {"cache": caches.room.to_json()}),
        }

    def _describe_dataset(self, name: str) -> messages.DatasetDescription:
        dataset = self._datasets.current(name)
        return messages.DatasetDescription(
            reference=dataset.reference,
            count=dataset.count,
            classes=dataset.classes,
            total_bytes=dataset.total_bytes,
            layout=dataset.layout.to_json(),
            transform=dataset.transform,
            group=dataset.reader.default_shuffle.group,
            window=dataset.reader.default_shuffle.window,
            prefers_chunks=dataset.reader.prefers_chunks,
            label_kind=dataset.label_form.kind,
            label_counts=dataset.label_counts,
            keeps_features=self.sharing.caches is not None and dataset.manifest.in_place is None,
        )

    def _list_models(self, access: Access) -> list[dict[str, Any]]:
        """Summaries; what is wrong with a damaged one names the store."""
        found = [s.to_json() for s in list_models(self.store) if access.sees_model(s.name)]
        for one in found:
            if one["problem"] is not None and not (self.settings.tell_store and access.whole):
                one["problem"] = "it is damaged: 'hapi verify' tells how"
        return found

    def _describe_model(self, reference: str, access: Access) -> ModelManifest:
        """A manifest without the names in it that ``access`` has not."""
        manifest = open_model(self.store, reference).manifest
        if manifest.parent is not None and not access.sees_model(manifest.parent):
            manifest = replace(manifest, parent=None)
        trained_on = (manifest.card or {}).get("dataset")
        if trained_on is not None and not access.sees_dataset(str(trained_on.get("name", ""))):
            manifest = replace(manifest, card={**(manifest.card or {}), "dataset": None})
        return manifest

    def _structure(self, digest: str, access: Access) -> dict[str, Any]:
        seen = "*" in access.models or self._has_structure(digest, access)
        if not seen or not has_structure(self.store, digest):
            raise NotFoundError(f"there is no structure {digest} here")
        return read_structure(self.store, digest).to_json()

    def _has_structure(self, digest: str, access: Access) -> bool:
        """True when a model that ``access`` has is of the structure."""
        names = [name for name in model_names(self.store) if access.sees_model(name)]
        for key in (
            version_key(name, n) for name in names for n in reversed(list_versions(self.store, name))
        ):
            with suppress(NotFoundError, DataError, BadRequestError):  # removed just now, or damaged
                if structure_of_document(read_document(self.store, key)) == digest:
                    return True
        return False

    def _changed_shards(self, name: str) -> dict[str, Any]:
        dataset = self._datasets.current(name)
        changed = changed_shards(self.store, dataset.manifest, dataset.shards)
        return {"version": dataset.version, "changed": changed}

    def _held_out(self, wanted: held_out.HeldOut) -> held_out.HeldOutCounts:
        dataset = self._datasets.current(wanted.name)
        places = SequenceRange(
            seed=wanted.seed, epoch=HOLDOUT_EPOCH, group=0, window=0, start=0, stop=wanted.count
        )
        ids = self._orders.find(dataset, places)
        return held_out.HeldOutCounts(version=dataset.version, label_counts=dataset.label_counts_of(ids))

    # -- streams -----------------------------------------------------------------------------------------

    def request(self, path: str, body: bytes) -> Request:
        """Parse a POST of ``body`` to ``path``; nothing is looked up yet."""
        kinds: dict[str, Callable[[Any], Request]] = {
            messages.EXTRACT_PATH: messages.ExtractRequest.from_json,
            messages.SAMPLES_PATH: messages.SamplesRequest.from_json,
            messages.TENSORS_PATH: messages.TensorsRequest.from_json,
        }
        if path not in kinds:
            raise NotFoundError(f"no such path: {path[:200]!r}")
        return kinds[path](messages.parse_body(body))

    def clock(self, request: Request) -> RequestClock:
        """Return a clock for ``request``; its counts go into its job's and the server's account too."""
        return self.account.clock("" if isinstance(request, messages.TensorsRequest) else request.job)

    def stream(self, request: Request, context: RequestContext | None = None) -> FrameStream:
        """Answer ``request``; the stream's report has the stages of the context's clock.

        It stops at the next COS batch once the client is gone. Without ``context`` it is anonymous and has no
        deadline.

        Raises:
            TooLargeError: the answer would be longer than the server allows.
            HapiError: the named dataset or model does not exist, does not fit, or has no room now.
        """
        context = context or RequestContext(clock=self.clock(request))
        context.clock.begin()
        stream = self._opened(request, context)
        length, max_bytes = stream.max_bytes, self.settings.max_response_bytes
        if length > max_bytes:
            stream.close()
            raise TooLargeError(
                f"the answer would be {length} bytes, at most {max_bytes} (--max-response-bytes of hapi-server); "
                "send fewer samples per request (--request-size)"
            )
        return stream

    def _opened(self, request: Request, context: RequestContext) -> FrameStream:
        if isinstance(request, messages.TensorsRequest):
            model = open_model(self.providers.packs, request.name, request.digest)
            return self._stored.tensors(model, request.names, context)
        with context.clock.stage("model"):  # with all that is loaded once
            dataset = self._datasets.get(request.dataset)
        hint = self._orders.access_hint(dataset, request.windows, context.tenant)
        if isinstance(request, messages.ExtractRequest):
            return self.extraction.stream(dataset, request, hint, context)
        ids = request.ids
        if isinstance(ids, SequenceRange):
            with self.account.busy.running(), context.clock.stage("model"):
                ids = self._orders.find(dataset, ids, context.tenant)
        return self._stored.samples(dataset, ids, hint, context)
