"""A session's caches: which samples and features are kept here, and whether what was kept may be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hapi.arrays import IntArray
from hapi.cache.disk_rates import DiskRates
from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.memory_rows import memory_bound
from hapi.cache.samples import SampleCache
from hapi.cache.writing.record_codec import PassTimes
from hapi.client.caching.code_watch import CodeWatch, computers
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.fill_forecast import FillForecast
from hapi.client.caching.filling import ComputedRows, Filling, rows_where
from hapi.client.caching.keys import Refusal, ServerCode, codes_of, feature_key, rounding_at, view_of
from hapi.client.caching.sources import PassFeatures, in_part
from hapi.client.caching.training_features import TrainingFeatures, probe_ahead
from hapi.client.job_context import JobContext
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.planning.cache_forecast import close_caches, open_caches
from hapi.client.settings import SessionSettings
from hapi.closing import Closing
from hapi.codecs.names import NONE
from hapi.errors import UsageError
from hapi.profiler.reuse.choice import Mode
from hapi.profiler.reuse.choose import ReusePlan
from hapi.profiler.reuse.facts import CutCodecs
from hapi.profiler.stages.pipeline import FEWEST_ROWS
from hapi.trace import Tracer
from hapi.wire.cache_room import CacheRoom
from hapi.wire.references import DatasetReference

log = logging.getLogger("hapi.client")

ONCE = "every sample is used once"
FULL = "the cache has no room for more; --cache-size gives it more"
UNWRITABLE = "nothing more can be written to the cache's disk"
BY_SERVER = "the server keeps them"
SLOW = "the disk was slower than the training; later epochs keep the rest"
DISTRUSTED = (
    "a server was left whose features may be among those that were kept; 'hapi cache clear' removes them"
)


class Keeping(Closing):
    """Samples and features that a session keeps on this side. Not thread-safe, but what it hands out is."""

    def __init__(
        self,
        settings: SessionSettings,
        job_context: JobContext,
        buffers: BufferPool,
        tried: TriedCodecs,
        tracer: Tracer,
        split: Callable[[], int] | None = None,
    ) -> None:
        """Open the caches that ``job_context`` has a folder for; ``tried`` tells of cuts that nothing was kept at yet,
        ``split`` where samples cross now.

        Raises:
            UsageError: features are to be kept in any case, and may not be.
            HapiError: the folder cannot be used, or a server does not tell what computes its features.
        """
        self._settings, self._job_context = settings, job_context
        self._buffers, self._tried, self._tracer = buffers, tried, tracer
        self._always = settings.cache == "on"
        self._split = split or (lambda: job_context.split)
        self.samples: Mapping[DatasetReference, SampleCache] = open_caches(job_context)
        """Caches of stored samples that may be used, by dataset."""
        self._samples = dict(self.samples)
        self._filling = Filling(tracer)
        self._forecast = FillForecast(
            rows=settings.bs, ahead=max(1, settings.in_flight // -(-settings.bs // settings.request_size))
        )
        self._features: dict[str, FeatureCache] = {}
        self.training = TrainingFeatures(
            job_context, self._usable_key, self._is_begun, self._cache, self._split
        )
        """Caches of the training samples' features."""
        self._memory_bytes = memory_bound(settings.cache_memory)
        self._codes: tuple[ServerCode, ...] | None = None
        self._keys: dict[tuple[object, ...], FeatureKey | Refusal] = {}
        """Keys of the pass that is under way, by codes, cut, whether of the validation samples, view, and rounding."""
        self._watch = CodeWatch()
        self._trusted = True
        self.cut = job_context.last_split
        """Layer whose outputs are kept."""
        self.fills = self._worthwhile = self._always or settings.epochs > (job_context.views or 1)
        """True while features that are computed are kept."""
        self._codec: str | None = None
        """Codec that the plan has chosen for what is kept; None before there is a plan."""
        self._part = 1.0
        """Part of the samples that is kept and read: more may be read more slowly than it is computed."""
        self._reads = True
        """False while what is kept is not worth reading."""
        self._mode: Mode = "keep here" if self.fills else "recompute"
        self._verdict = "" if self.fills else ONCE
        """Why features are not kept although they may be; empty while they are."""
        try:
            self.refusals = self._refusals()
            """Why features may not be kept at all, by whether they are of the validation samples."""
            if self._always and self.refusals:
                raise UsageError(f"--cache on: features cannot be kept: {next(iter(self.refusals.values()))}")
            if job_context.strategy is not None and self._worthwhile and not self.refusal:
                probe_ahead(job_context.cache_folder)
        except BaseException:
            self.close()
            raise

    def _refusals(self) -> dict[bool, str]:
        found: dict[bool, str] = {}
        if self._job_context.cache_folder is None and not self._job_context.description.keeps_features:
            return found
        if self.cut == 0:
            return dict.fromkeys((False, True), "no layer is frozen")
        for validation in (False, True) if len(self._job_context.validation_ids) else (False,):
            key = self._key(0, validation)
            if isinstance(key, Refusal):
                found[validation] = key.reason
        return found

    def _key(self, epoch: int, validation: bool, split: int | None = None) -> FeatureKey | Refusal:
        """The key of samples that cross at ``split``, or where they do now."""
        if self._codes is None:
            self._codes = codes_of(self._job_context)
            self._watch.expect(server.code for server in self._codes if not server.silent)
        view = 0 if validation else view_of(self._job_context, epoch)
        context, split = self._job_context, self._split() if split is None else split
        at = self._codes, self.cut, validation, view, rounding_at(context, min(split, self.cut))
        if at not in self._keys:
            self._keys[at] = feature_key(
                context, self.cut, validation=validation, view=view, codes=self._codes, split=split
            )
        return self._keys[at]

    def begin_pass(self) -> None:
        """Look at the frozen weights anew: a caller may have changed them since the pass before."""
        self._keys.clear()

    def source(
        self, counts: KeptCounts, epoch: int, split: int | None, *, validation: bool
    ) -> PassFeatures | None:
        """Return the kept features of the samples of a pass that begins; None when there are none.

        Args:
            counts: takes what the pass reads and keeps.
            epoch: number from 0.
            split: where most of its samples cross; None where a caller names it for each batch.
            validation: whether the pass is over the validation samples.
        """
        context = self._job_context
        if self._watch.changed:
            self._codes = None
        if (
            context.cache_folder is None
            or not self._trusted
            or validation in self.refusals
            or not self._reads
            or (split is None and context.wire_rounding != NONE)
        ):
            return None
        key = self._key(epoch, validation, split)
        if isinstance(key, Refusal):
            return None
        dtype = context.frozen.output_dtypes()[self.cut]
        form = (context.held_out if validation else context.description).label_form
        cache = self._cache(key)
        cache.refresh()
        ids = context.training_ids
        if self.fills and not validation and context.views is None and context.processes == 1:
            self._forecast.begin_pass(cache, counts, ids[in_part(ids, self._part)])
        part = 1.0 if validation else self._part
        return PassFeatures(
            cache, self.cut, dtype, form, self._buffers, counts, self._tracer, self._watch, part
        )

    def _cache(self, key: FeatureKey) -> FeatureCache:
        """The cache of ``key``, opened when it is not yet."""
        context = self._job_context
        if context.cache_folder is None:
            raise UsageError("there is no folder for kept features")
        if key.digest not in self._features:
            taken = sum(cache.memory_bytes for cache in self._features.values())
            smallest = min(FEWEST_ROWS, context.ranks.largest_part(self._settings.bs))
            own = key.dataset == context.description.reference
            description = context.description if own else context.held_out
            computed_by = computers(context.device, (server.computes for server in self._codes or ()))
            cache = self._features[key.digest] = FeatureCache(
                context.cache_folder,
                key,
                description.count,
                description.label_form,
                max(0, self._memory_bytes - taken),
                made_with=f"{computed_by}; passes of {smallest} samples or more",
                codec=self._settings.cache_codec,
                reads=max(1, self._settings.epochs - 1),
            )
            figures = self._tried.at(key.cut, self._settings.cache_codec, records=True)
            if figures and key.rounding is None:  # those that are tried were not rounded
                cache.codec.expect(figures)
            if self._codec is not None:
                cache.codec.follow(self._codec)
        return self._features[key.digest]

    def follow(self, reuse: ReusePlan | None) -> None:
        """Take over what the plan has found worth keeping, if it is asked; between two passes."""
        if reuse is None or self._always:
            return
        self._mode, self._verdict = reuse.mode, "" if reuse.mode == "keep here" else reuse.reason
        if reuse.mode == "keep there":
            self._verdict = f"{BY_SERVER}; {reuse.reason}"
        self.fills = reuse.mode == "keep here"
        once = reuse.epochs <= (self._job_context.views or 1)
        self._reads = reuse.mode != "keep samples" and (reuse.mode != "recompute" or once)
        self._part = 1.0
        if reuse.mode == "keep here":
            self.cut, self._part, self._codec = reuse.cut, reuse.choice.limit, reuse.codec
            for cache in self._features.values():
                cache.codec.follow(reuse.codec)

    def left_over(
        self, source: PassFeatures, epoch: int, planned: Sequence[IntArray], reuse: ReusePlan | None
    ) -> IntArray:
        """Return training samples to compute for the cache alone: ``--drop-last`` left them out of ``epoch``, and a
        later one would ask for them batch by batch, each in a forward pass of its own.

        Args:
            source: the epoch's features.
            epoch: number from 0, at its end.
            planned: sample ids of all its batches.
            reuse: the present choice of what is kept in later epochs; None without one.

        Returns:
            int64 [n], ascending; none when they are kept already, or are not worth keeping.
        """
        context, part = self._job_context, source.part
        worth = self.fills and source.cache.admits and epoch + (context.views or 1) < self._settings.epochs
        if reuse is not None and not self._always:
            worth = worth and reuse.mode == "keep here" and reuse.cut == source.cut
            part = min(part, reuse.choice.limit)
        if not worth or not self._settings.drop_last or context.processes > 1:
            return np.empty(0, dtype=np.int64)
        ids: IntArray = np.setdiff1d(context.training_ids, np.concatenate(planned), assume_unique=True)
        return ids[in_part(ids, part) & ~source.cache.held(ids)]

    def _usable_key(self, epoch: int) -> FeatureKey | None:
        """Key of the training samples in the view of ``epoch``; None where none may be kept."""
        if self._job_context.cache_folder is None or not self._trusted or self.refusal:
            return None
        key = self._key(epoch, False)
        return key if isinstance(key, FeatureKey) else None

    def _is_begun(self, key: FeatureKey) -> bool:
        folder = self._job_context.cache_folder
        return key.digest in self._features or (folder is not None and FeatureCache.is_begun(folder, key))

    def codecs(self) -> tuple[CutCodecs, ...]:
        """Return the codecs of kept features of training samples, by cut: the one of most that are kept, if any, else
        those that may be taken. Those of cuts that nothing was kept at were tried on a sample.
        """
        wanted, found = self._settings.cache_codec, []
        on = None if wanted == "auto" else wanted
        for (cut, _), cache in list(self.training.of().items())[:1]:  # that of the present split
            kept = cache.stored_as()
            if kept is not None and cache.share(self._job_context.training_ids) > 0.5:
                found.append(CutCodecs.measured(cut, (kept,), on=kept.name))
            elif cache.codec.figures:
                found.append(CutCodecs.measured(cut, cache.codec.figures, on))
        met = {at.cut for at in found}
        found += [
            CutCodecs.measured(cut, figures, on)
            for cut in self._tried.cuts
            if cut not in met and (figures := self._tried.at(cut, wanted, records=True))
        ]
        return tuple(found)

    def rates(self) -> DiskRates:
        """Return the rates of the disk that features of training samples are kept on, as measured or by a probe."""
        return self.training.rates(probe=self._worthwhile)

    @property
    def server_room(self) -> CacheRoom | None:
        """Room of all servers together, by the slowest of their disks; None when one that answers does not tell."""
        servers = [server for server in self._codes or () if not server.silent]
        rooms = [server.room for server in servers if server.room is not None]
        return CacheRoom.together(rooms) if rooms and len(rooms) == len(servers) else None

    @property
    def mode(self) -> Mode:
        """Mode of the pass that is under way: what it keeps, and where."""
        features = self._job_context.cache_folder is not None and not self.refusal
        possible = {"keep here": features, "keep samples": bool(self.samples)}
        return self._mode if possible.get(self._mode, True) else "recompute"

    @property
    def refusal(self) -> str:
        """Reason why features of the training samples cannot be kept; empty if they can."""
        return self.refusals.get(False, "") if self._trusted else DISTRUSTED

    def keep(self, source: PassFeatures, computed: ComputedRows, times: PassTimes) -> None:
        """Keep features that were computed, behind the training; not those of code that their key does not name.

        Args:
            source: the pass's features.
            computed: those of a batch.
            times: of the pass so far.
        """
        if self._watch.changed:
            source.counts.wrote(0, 0, len(computed.ids))
            return
        cache = self._cache_of(source, computed)
        if cache is None:
            source.counts.wrote(0, 0, len(computed.ids))
            return
        computed = rows_where(computed, in_part(computed.ids, source.part))
        if not len(computed.ids):
            return
        self._filling.offer(cache, computed, source.counts, times)
        self._forecast.offered(cache, len(computed.ids), times.step)

    def _cache_of(self, source: PassFeatures, computed: ComputedRows) -> FeatureCache | None:
        """The cache for ``computed``: another one where it was rounded at the split to which the plan has moved
        since the pass began. None for a split that was taken for profiling alone.
        """
        key = source.cache.key
        if computed.rounding == key.rounding:
            return source.cache
        if computed.rounding != rounding_at(self._job_context, min(self._split(), source.cut)):
            return None
        return self._cache(replace(key, rounding=computed.rounding))

    @property
    def why(self) -> str:
        """One line: why features are not kept, or not all of them; empty when they are, or with ``--cache off``."""
        if self._job_context.cache_folder is None:
            return "" if self._settings.cache == "off" else "there is no folder for it"
        if not self._trusted:
            return DISTRUSTED
        if self.refusals:
            return next(iter(self.refusals.values()))
        if self._watch.why or self._verdict:
            return self._watch.why or self._verdict
        if trouble := next((cache.trouble for cache in self._features.values() if cache.trouble), ""):
            return f"{UNWRITABLE}: {trouble}"
        if not all(cache.admits for cache in self._features.values()):
            return FULL
        return SLOW if self._filling.overrun else ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts for a run's report."""
        folder = self._job_context.cache_folder
        return {
            "mode": self._settings.cache,
            "folder": None if folder is None else str(folder.path),
            "bytes": None if folder is None else folder.budget,
            "cut": self.cut,
            "keys": sorted(self._features),
            "codecs": [
                {"cut": cache.key.cut, **cache.codec.to_json()} for _, cache in sorted(self._features.items())
            ],
            "why": self.why,
            "fill": self._forecast.to_json(),
        }

    def distrust(self) -> None:
        """Use nothing more of what was kept: a server was left that some of it may come from."""
        self._filling.drop()
        if self.samples or self._features:
            log.warning(
                "the cache may hold samples or features of that server: it is not used any more; empty it with "
                "'hapi cache clear'"
            )
        self.samples, self._trusted = {}, False

    def flush(self) -> None:
        """Make what was kept available to other processes, as far as the disk keeps up."""
        self._filling.flush(self._features.values())
        for cache in self._samples.values():
            cache.flush()

    def close(self) -> None:
        """Flush, and give the folder back."""
        if self._trusted:
            self._filling.flush(self._features.values(), last=True)
        self._filling.close()
        for cache in self._features.values():
            cache.close()
        close_caches(self._samples)
