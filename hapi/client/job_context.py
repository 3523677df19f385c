"""A runnable job, made from settings: servers, dataset, model, freeze and split, checked against each other."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from hapi.arrays import IntArray
from hapi.cache.folder import CacheFolder
from hapi.cache.open_folder import open_cache_folder
from hapi.client.connect import Connected, connect, over, share_processors
from hapi.client.dataset_choice import augmented, choose_dataset, hold_out, transform_of
from hapi.client.early_checks import check_layers, check_views, resolve_split
from hapi.client.frozen_weights import FrozenWeights
from hapi.client.joint.ranks import ALONE, Ranks
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.stall_share import StallShare
from hapi.client.memory import move_weights, status_bytes
from hapi.client.models import ClientModel, open_client_model
from hapi.client.settings import CacheMode, DataSettings, NetworkSettings, SessionSettings
from hapi.client.soundness import check_inputs
from hapi.client.transport.embedded_server import EmbeddedServer
from hapi.client.transport.server_pool import ServerPool
from hapi.codecs.names import LOSSY, NONE, Codec
from hapi.data.epoch_order import EpochOrder, Shuffle
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import ModelError, UsageError
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.precision import check_kernels, in_precision
from hapi.models.shared.weights import shared_weights
from hapi.models.zoo.freeze import choose_freeze
from hapi.repository.built import prefix_bytes
from hapi.wire.messages import DatasetDescription
from hapi.wire.references import Precision, TransformSpec
from hapi.wire.transport.base import Transport


@dataclass(eq=False)
class JobContext:
    """Everything that a session needs, made by :func:`resolve_job`. Close it."""

    servers: ServerPool
    stall: StallShare
    """Share of waiting that the servers are told."""
    urls: list[str]
    embedded: EmbeddedServer | None
    embedded_pid: int | None
    """Process of the embedded server, also where another rank of this machine started it; None without one."""
    one_machine: bool
    """True when the servers run on this process's processors."""
    device: torch.device
    description: DatasetDescription
    model: LayeredModel
    """All layers in their own types: those that are trained run in them."""
    frozen: LayeredModel
    """The layers up to the last split as they run on both tiers: ``model``, or its layers in the job's precision."""
    precision: Precision
    tf32: bool
    """True when a GPU of this side rounds the inputs of float32 products."""
    wire_rounding: Codec
    """Codec that rounds features on the wire; ``none`` where they come as they are."""
    weights: str
    """Source of the model's weights; see :class:`hapi.client.models.ClientModel`."""
    freeze: int
    prefix_digests: tuple[str, ...]
    """Over structure and weights of the layers up to each candidate split."""
    candidate_splits: range
    """Splits that may be extracted at."""
    strategy: str | None
    """Name of the strategy that chooses the split while training runs; None when ``split`` is fixed."""
    split: int
    """The fixed split, or where a strategy begins."""
    training_ids: IntArray
    validation_ids: IntArray
    """Ids of the validation samples."""
    order: EpochOrder
    """Order of the training samples, and this trainer's share of them."""
    ranks: Ranks
    """Processes of this trainer, which take parts of each of its batches."""
    client_model: ClientModel
    held_out: DatasetDescription
    """Dataset of the validation samples: the training's own unless another one is given."""
    transforms: tuple[TransformSpec | None, TransformSpec | None]
    """Transforms of the training samples, perhaps random, and of the validation samples, never random."""
    views: int | None
    """Draws of a random transform that take turns from epoch to epoch; None: a new one in each."""
    cache_folder: CacheFolder | None
    """Cache of features and stored samples on this machine; None when nothing is kept."""
    cache_mode: CacheMode
    """Whether the plan decides what is kept."""
    shared: FrozenWeights | None = None
    """Frozen weights that other processes of this machine use too; None where each has its own."""
    _jobs: dict[tuple[int, bool], ExtractionJob] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Processes that share an epoch's samples: all ranks of all trainers."""
        return self.order.trainers * self.ranks.size

    @property
    def last_split(self) -> int:
        """The largest of the candidate splits: layers after it are trained."""
        return self.candidate_splits[-1]

    @property
    def rough(self) -> bool:
        """True when the frozen layers' results are rounded to fewer bits than float32 has."""
        return self.precision != "fp32" or self.tf32 or self.wire_rounding != NONE

    @property
    def prefix_digest(self) -> str:
        """Digest over the frozen layers' structure and weights."""
        return self.prefix_digests[self.freeze]

    def present_digest(self, cut: int) -> str:
        """Return the digest of the layers up to ``cut`` as they are now: a caller may have changed their weights.

        Layers whose weights are not in memory here are those that the servers have been asked for.
        """
        try:
            return self.model.prefix_digest(cut)
        except ModelError:
            return self.prefix_digests[cut]

    def job(self, split: int, *, validation: bool = False) -> ExtractionJob:
        """Return the job of requests at ``split``. Thread-safe: the jobs are made before training begins."""
        return self._jobs[split, validation]

    def make_jobs(self) -> None:
        """Make the jobs of every possible split; they name prefixes by the digests of weights, loaded or not."""
        splits, run = self.candidate_splits if self.strategy else (self.split,), uuid.uuid4().hex
        both = ((self.description, self.transforms[0]), (self.held_out, self.transforms[1]))
        for validation, (description, transform) in enumerate(both):
            for split in splits:
                job = _job(description, self.client_model, self.frozen, split, transform)
                windows = None if validation else self.order.windows()
                self._jobs[split, bool(validation)] = replace(
                    job, id=run, windows=windows, precision=self.precision, views=self.views
                )

    def bring_weights(self, split: int) -> None:
        """Bring the weights of the layers after ``split`` to the device; errors are those of reading, and of
        :meth:`place_weights`.
        """
        if self.shared is not None:
            self.shared.bring(split)
        self.client_model.load_from(split if self.shared is None else self.last_split)
        self.place_weights(split)

    def place_weights(self, split: int) -> None:
        """Bring the weights of the layers after ``split``, which are in memory, to the device in the type that they
        run in; :class:`DeviceMemoryError` when they do not fit.
        """
        model, frozen, count = self.model, self.frozen, len(self.model)
        move_weights(model, self.device, split if frozen is model else self.last_split, count)
        if frozen is not model:
            move_weights(frozen, self.device, split, self.last_split)

    def keep_shuffle(self, shuffle: Shuffle) -> None:
        """Go on in the order of a run before this one; before any batch is asked for."""
        self.order = replace(self.order, shuffle=shuffle)
        for (split, validation), job in self._jobs.items():
            if not validation:
                self._jobs[split, validation] = replace(job, windows=self.order.windows())

    def use_transform(self, transform: TransformSpec | None) -> None:
        """Read all samples with ``transform``, whose outputs have the same shape; before any batch is asked for."""
        self.transforms = (transform, transform)
        self._jobs.update({key: replace(job, transform=transform) for key, job in self._jobs.items()})

    def embedded_bytes(self) -> int:
        """Return the memory of the embedded server: what it has, and the weights of a model that it builds whole.

        0 without one, and where its layers are on a GPU.
        """
        if self.embedded_pid is None or self.device.type != "cpu":
            return 0
        model = self.model
        last = self.last_split if self.client_model.pushed is not None else len(model)
        return status_bytes("RssAnon", str(self.embedded_pid)) + prefix_bytes(model, last)

    def close(self) -> None:
        """End the embedded server, if there is one."""
        if self.embedded is not None:
            self.embedded.close()


def resolve_job(
    settings: SessionSettings,
    device: torch.device,
    *,
    token: str | None = None,
    transports: Sequence[Transport] | None = None,
    ranks: Ranks = ALONE,
) -> JobContext:
    """Connect, and decide everything that a session needs.

    It starts an embedded server when the settings name none, and ends it again when anything fails.

    Args:
        settings: the session's settings.
        device: of this side.
        token: the servers' bearer token; None for the settings' own.
        transports: replace the servers of the settings (tests, the loopback).
        ranks: processes of this training.

    Raises:
        HapiError: the settings do not fit each other, the store or the servers; one line with the reason.
    """
    check_views(settings.augment, settings.augment_views)
    off = settings.cache == "off"
    cache = None if off else open_cache_folder(settings.cache_dir, settings.cache_size)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    connected = (
        connect(settings, token, ranks, meanwhile=lambda: check_layers(settings))
        if transports is None
        else over(settings, transports, settings.store)
    )
    try:
        job_context = _build_context(settings, connected, device, cache, ranks)
        _load_weights(settings, job_context)
    except BaseException:
        connected.close()
        raise
    return job_context


def _build_context(
    settings: SessionSettings,
    connected: Connected,
    device: torch.device,
    cache: CacheFolder | None,
    ranks: Ranks,
) -> JobContext:
    servers = connected.servers
    description = choose_dataset(servers, settings.dataset)
    order = order_of(settings, description)
    layout, transform = (
        SampleLayout.from_json(description.layout, answer=True),
        transform_of(settings, description.transform),
    )
    shape = check_inputs(description, transform)
    model = open_client_model(
        settings, servers, connected.store, seed=settings.seed, classes=len(description.classes), shape=shape
    )
    layered = model.layered
    freeze = choose_freeze(layered, settings.freeze)
    frozen = _frozen(layered, freeze, settings.frozen_precision, device)
    strategy, split = resolve_split(frozen, settings.split, freeze)
    training, validation, held_out = hold_out(settings, servers, description)
    shared, last_split = shared_weights(device), layered.last_split(freeze)
    digests = tuple(layered.prefix_digests(last_split))
    # The servers alone will have some of these tensors; a caller may change the others.
    names = layered.tensor_names(0, last_split)
    layered.expected_digests = {**layered.expected_digests, **{n: layered.digest_of(n) for n in names}}
    return JobContext(
        servers=servers,
        stall=connected.stall,
        urls=connected.urls,
        embedded=connected.embedded,
        embedded_pid=connected.embedded_pid,
        one_machine=connected.embedded_pid is not None
        or (strategy is not None and share_processors(servers)),
        device=device,
        description=description,
        model=layered,
        frozen=frozen,
        precision=settings.frozen_precision,
        wire_rounding=next((codec for codec in LOSSY if codec == settings.wire_codec), NONE),
        tf32=settings.tf32,
        weights=model.weights,
        freeze=freeze,
        prefix_digests=digests,
        candidate_splits=layered.candidate_splits(freeze),
        strategy=strategy,
        split=split,
        training_ids=training,
        validation_ids=validation,
        order=order,
        ranks=ranks,
        client_model=model,
        held_out=held_out or description,
        transforms=(
            augmented(transform, layout, settings.augment),
            transform if held_out is None else transform_of(settings, held_out.transform),
        ),
        views=settings.augment_views,
        cache_folder=cache,
        cache_mode=settings.cache,
        shared=None if shared is None else FrozenWeights(layered, frozen, last_split, shared, model.read),
    )


def _load_weights(settings: NetworkSettings, job_context: JobContext) -> None:
    """Bring what runs on this side into its memory, and make the job's requests."""
    layered, strategy = job_context.model, job_context.strategy
    # What runs on the servers takes no memory here, unless it is compared; a strategy may yet want every layer; on a
    # GPU when it does.
    first = job_context.split if strategy is None else job_context.last_split
    if settings.recheck:
        first = 0
    job_context.make_jobs()
    if strategy is None:
        layered.release(first, len(layered))
    job_context.bring_weights(first)
    if job_context.shared is not None:
        job_context.shared.share()


def _frozen(model: LayeredModel, freeze: int, precision: Precision, device: torch.device) -> LayeredModel:
    last = model.last_split(freeze)
    frozen = in_precision(model, precision, device, last)
    try:
        check_kernels(frozen, 0, last, device)
    except ModelError as error:
        raise UsageError(str(error)) from None
    return frozen


def order_of(settings: DataSettings, description: DatasetDescription) -> EpochOrder:
    """Return the order that the settings name, with groups and windows that suit the server's store by
    default.
    """
    return EpochOrder(
        seed=settings.seed,
        shuffle=Shuffle.parse(
            settings.shuffle,
            Shuffle(description.group, description.window),
            prefers_chunks=description.prefers_chunks,
            what="--shuffle",
        ),
        trainers=settings.trainers,
        trainer=settings.trainer,
    )


def _job(
    description: DatasetDescription,
    model: ClientModel,
    frozen: LayeredModel,
    split: int,
    transform: TransformSpec | None,
) -> ExtractionJob:
    layered = model.layered
    layout = SampleLayout.from_json(description.layout, answer=True)
    if input_shape(layout, transform) != layered.input_shape:
        raise UsageError(
            f"dataset {description.reference.name!r} gives inputs of {input_shape(layout, transform)}, the model "
            f"takes {layered.input_shape}; give --image-size"
        )
    return ExtractionJob(
        dataset=description.reference,
        layout=layout,
        mean_stored_bytes=description.total_bytes / max(1, description.count),
        stored_bytes=description.total_bytes,
        transform=transform,
        split=split,
        split_name=layered.layers[split - 1].name if split else "",
        model=model.reference(split) if split else None,
        shape=tuple(layered.output_shapes()[split]),
        dtype=frozen.output_dtypes()[split],
        labels=description.label_form,
    )
