"""Features that requests of a server share: the table of those under way and recent, and the operator's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from hapi.arrays import Bytes, IntArray, LabelArray
from hapi.cache.feature_key import FeatureKey
from hapi.cache.folder import CacheFolder
from hapi.cache.key_file import digest_of
from hapi.closing import Closing
from hapi.data.dataset import Dataset
from hapi.errors import UsageError
from hapi.server.context import RequestContext
from hapi.server.device.host_memory import shared_bytes
from hapi.server.device.sizing import PrefixSizes
from hapi.server.device.worker import Workers
from hapi.server.settings import ServiceSettings
from hapi.server.sharing.caches import FeatureCaches
from hapi.server.sharing.counts import SourceCounts
from hapi.server.sharing.request_share import SOUND_SAMPLES, RequestShare
from hapi.server.sharing.table import SharingTable
from hapi.wire.messages import ExtractRequest
from hapi.wire.references import ModelReference


class Sharing(Closing):
    """Lends each request what it may share. Thread-safe."""

    def __init__(
        self, table: SharingTable, caches: FeatureCaches | None, *, code: str, device: str, tf32: bool
    ) -> None:
        """Share features.

        Args:
            table: of those under way and recent ones.
            caches: on the disk; None: none are kept there.
            code: version of what computes (:mod:`hapi.cache.code_version`).
            device: kind of the devices, whose last bits may differ from those of others.
            tf32: True if a GPU may round the inputs of products.
        """
        self.table = table
        self.caches = caches
        self.counts = SourceCounts()
        self._code = f"{code}@{device}"
        self._tf32 = tf32

    @contextmanager
    def of(
        self, dataset: Dataset, request: ExtractRequest, sizes: PrefixSizes, context: RequestContext
    ) -> Iterator[RequestShare]:
        """Lend a request its share for the block; its claims are over at the end.

        Requests that time layers share nothing, since their answers are measurements. One for fewer than
        :data:`SOUND_SAMPLES` samples shares with its equals: in any other pass its samples would get other last bits.
        """
        with ExitStack() as resources:
            counts, keep, cache, digest = SourceCounts(self.counts), None, None, None
            small = len(request.ids) < SOUND_SAMPLES
            shares = not request.time_layers and not sizes.varies
            if shares and (self.table.max_bytes or self.caches is not None):
                key = feature_key(request, sizes, self._code, tf32=self._tf32)
                digest = f"{key.digest}/{request.ids.tobytes().hex()}" if small else key.digest
                # Files of others, and layers that no digest tells, may be changed without another key.
                lasting = dataset.manifest.in_place is None and not sizes.unidentified
                if self.caches is not None and lasting and not small and not _draws_anew(request):
                    cache = resources.enter_context(self.caches.of(key, dataset.count, dataset.label_form))
                    keep = self._keep(self.caches, key, dataset)
            share = RequestShare(
                self.table,
                digest,
                context.interest,
                counts,
                form=dataset.label_form,
                cache=cache,
                keep=keep,
                fewest=min(SOUND_SAMPLES, len(np.unique(request.ids))),
            )
            resources.callback(share.close)
            yield share

    def close(self) -> None:
        """Write what waits to be written."""
        if self.caches is not None:
            self.caches.close()

    @staticmethod
    def _keep(
        caches: FeatureCaches, key: FeatureKey, dataset: Dataset
    ) -> Callable[[IntArray, Bytes, LabelArray], None]:
        return partial(caches.put, key, dataset.count, dataset.label_form)


def make_sharing(settings: ServiceSettings, host_budget: int, code: str, workers: Workers) -> Sharing:
    """Return what a server of ``settings`` shares.

    Args:
        settings: the operator's.
        host_budget: bytes of the server's own memory.
        code: version of what computes.
        workers: the devices.

    Raises:
        UsageError: the folder for features cannot be used, or no features would be kept in it.
    """
    caches = None
    if settings.cache_dir is not None:
        if settings.cos_batch is not None and settings.cos_batch < SOUND_SAMPLES:
            raise UsageError(
                f"--cache-dir: features of COS batches below {SOUND_SAMPLES} differ in the last bits and are not kept; "
                "give a larger --cos-batch, or none"
            )
        folder = CacheFolder.open(settings.cache_dir, settings.cache_size, "--cache-dir")
        folder.probed_rates()  # before the first client asks for them
        made_with = f"{workers.arithmetic}; passes of {SOUND_SAMPLES} samples or more"
        caches = FeatureCaches(folder, settings.cache_memory, codec=settings.cache_codec, made_with=made_with)
    table = SharingTable(shared_bytes(settings.share_memory, host_budget))
    kinds = sorted({device_kind(worker.device.device) for worker in workers.all})
    return Sharing(table, caches, code=code, device=",".join(kinds), tf32=settings.tf32)


def device_kind(device: torch.device) -> str:
    """Return the kind of a device: features of another kind may differ in their last bits."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def feature_key(request: ExtractRequest, sizes: PrefixSizes, code: str, *, tf32: bool) -> FeatureKey:
    """Return the identity of the features that ``request`` asks for.

    Args:
        request: names dataset version, transform, layers and precision.
        sizes: of its layers.
        code: versions and device of what computes them.
        tf32: True if a GPU may round the inputs of products.
    """
    return FeatureKey(
        dataset=request.dataset,
        transform=request.transform,
        prefix=_proven(request.model),
        cut=request.split,
        cut_name=request.split_name,
        shape=sizes.output_shape,
        dtype=dtype_name(sizes.output_dtype),
        precision=request.precision,
        tf32=tf32,
        code=code,
    )


def _proven(model: ModelReference) -> str:
    """Return the identity of a prefix by which its features may be taken before its layers are loaded.

    A pushed model was compared with its digest by then. Of one that is built here the digest is the client's word: it
    may be that of a model which the client may not see, so that it stands for features of the same name alone.
    """
    if model.source == "store":
        return model.digest
    return digest_of({"digest": model.digest, "zoo": [model.name, model.weights, *model.blocks]})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type on the wire."""
    return str(dtype).removeprefix("torch.")


def _draws_anew(request: ExtractRequest) -> bool:
    """True for a random transform: no other epoch has its samples, so that to keep them would be of no use."""
    return request.transform is not None and request.transform.random
