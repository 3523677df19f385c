"""Keys of a run's features: what they are named by, or why they may not be kept.

A key is built once for each cut (and view) that features are kept at, before the first batch::

    codes = codes_of(job_context)                          # short questions to each server
    key = feature_key(job_context, job_context.last_split, codes=codes)
    if isinstance(key, Refusal):
        ...                                                # ``--cache on``: an error; ``auto``: a line in the report
    cache = FeatureCache(folder, key, description.count, description.label_form)

The held-out samples have a transform of their own, and may be another dataset: ``validation=True``. With
``--augment-views K`` there are K keys, one for each view; epoch e has the samples of ``view_of(job_context, e)``.

A key holds while the servers are those that ``codes`` came from. It does not depend on the split, unless features are
rounded there: layers after it run on this side, of the same digest, and both sides' code is in the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hapi.cache.code_version import code_version
from hapi.cache.feature_key import FeatureKey, WireRounding
from hapi.client.job_context import JobContext
from hapi.client.transport.server_pool import ServerPool
from hapi.client.transport.trouble import is_servers_fault
from hapi.codecs.names import NONE
from hapi.errors import BadRequestError, HapiError
from hapi.models.devices import changed_arithmetic
from hapi.models.graph.numbering import Layer
from hapi.models.graph.user_code import unidentified_layer
from hapi.text import printable
from hapi.wire import messages
from hapi.wire.cache_room import CacheRoom
from hapi.wire.frames import codec_fits
from hapi.wire.references import Augmentation, DatasetReference, check_digest
from hapi.wire.transport.base import Transport


@dataclass(frozen=True)
class Refusal:
    """Why features may not be kept, with the transform or layer that forbids it."""

    reason: str
    """One line for people, without an end mark."""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class ServerCode:
    """Facts that a server tells of the code that computes features there."""

    url: str
    code: str | None
    """Digest of :func:`hapi.cache.code_version.code_version`; None from an older server, which tells none."""
    changed: tuple[str, ...] = ()
    """Names of the run's datasets whose files there are not those that were indexed."""
    silent: bool = False
    """True when it did not answer."""
    computes: str = ""
    """Devices and libraries, for people; empty when it does not tell."""
    room: CacheRoom | None = None
    """Room of its cache of features; None when it does not tell, or has none."""


def codes_of(job_context: JobContext) -> tuple[ServerCode, ...]:
    """Ask all servers of a run for their code and the state of its datasets; see :func:`server_codes`."""
    return server_codes(
        job_context.servers, (job_context.description.reference, job_context.held_out.reference)
    )


def server_codes(servers: ServerPool, datasets: Iterable[DatasetReference] = ()) -> tuple[ServerCode, ...]:
    """Ask each server of ``servers`` for its code version, and whether files changed since they were indexed.

    Args:
        servers: of a run; the answers are in their order.
        datasets: that the run reads.

    Raises:
        HapiError: the only server cannot be reached within the pool's patience. One of several is not waited for.
    """
    known = dict.fromkeys(datasets)
    return tuple(_code_of(servers, url, known) for url in servers.urls)


def _code_of(servers: ServerPool, url: str, datasets: Iterable[DatasetReference]) -> ServerCode:
    alone = servers.size == 1
    try:
        return servers.run(lambda transport: _told_by(transport, datasets), only=url, once=not alone)
    except HapiError as error:
        if alone or not is_servers_fault(error):
            raise
        return ServerCode(url, None, silent=True)


def _told_by(transport: Transport, datasets: Iterable[DatasetReference]) -> ServerCode:
    document = transport.call("GET", messages.VERSION_PATH)
    code = _code(document)
    if code is None:
        return ServerCode(transport.url, None)
    changed = [known.name for known in datasets if not _is_as_indexed(transport, known)]
    computes = printable(str(document.get("computes", "")), 200)
    return ServerCode(transport.url, code, tuple(changed), computes=computes, room=_room(document))


def _is_as_indexed(transport: Transport, dataset: DatasetReference) -> bool:
    document = transport.call("GET", f"{messages.DATASETS_PATH}/{dataset.name}/{messages.CHANGED}")
    found = document if isinstance(document, dict) else {}
    return (found.get("version"), found.get("changed")) == (dataset.version, 0)


def _code(document: Any) -> str | None:
    found = document.get("code") if isinstance(document, dict) else None
    try:
        return None if found is None else check_digest(found, "code")
    except BadRequestError:
        return None


def _room(document: dict[str, Any]) -> CacheRoom | None:
    try:
        return CacheRoom.from_json(document["cache"]) if "cache" in document else None
    except BadRequestError:
        return None


def feature_key(
    job_context: JobContext,
    cut: int,
    *,
    validation: bool = False,
    view: int = 0,
    codes: Sequence[ServerCode],
    split: int | None = None,
) -> FeatureKey | Refusal:
    """Return the key of the samples' features at ``cut``, or the reason why they may not be kept.

    Args:
        job_context: the run.
        cut: layer whose output is kept, from 1 to the run's last split.
        validation: the held-out samples instead of the training ones.
        view: which of the run's views, from 0; without views the only one.
        codes: of all servers of the run (:func:`codes_of`); those that do not answer compute nothing now.
        split: layer after which samples cross, up to ``cut``; None for the run's fixed one, or its first.
    """
    if cut > job_context.last_split:
        return Refusal(_trained(job_context.model.layers[job_context.last_split]))
    transform = job_context.transforms[validation]
    if transform is not None and transform.augment is not None:
        if job_context.views is None:
            return Refusal(_random(transform.augment))
        transform = transform.at(job_context.order.seed, view % job_context.views)
    # One of several that is silent computes nothing now, and tells its code with each answer when it comes back.
    may_be_silent = not all(server.silent for server in codes)
    unknown = [one for one in codes if one.code is None and not (one.silent and may_be_silent)]
    if unknown:
        why = (
            "does not answer, so it is unknown with"
            if unknown[0].silent
            else "is of an older hapi and does not tell with"
        )
        return Refusal(f"{unknown[0].url} {why} which versions it computes")
    description = job_context.held_out if validation else job_context.description
    edited = [server.url for server in codes if description.reference.name in server.changed]
    if edited:
        return Refusal(
            f"files of dataset {description.reference.name!r} at {edited[0]} changed or moved since they were indexed; "
            "index it again with --replace"
        )
    if (unidentified := unidentified_layer(job_context.model, cut)) is not None:
        layer, why = unidentified
        return Refusal(f"layer {layer.index} ({layer.name}) {why}")
    frozen = job_context.frozen
    return FeatureKey(
        dataset=description.reference,
        transform=transform,
        prefix=job_context.present_digest(cut),
        cut=cut,
        cut_name=frozen.layers[cut - 1].name if cut else "",
        shape=tuple(frozen.output_shapes()[cut]),
        dtype=str(frozen.output_dtypes()[cut]).removeprefix("torch."),
        precision=job_context.precision,
        tf32=job_context.tf32,
        code=joined_code(
            [server.code for server in codes if server.code is not None],
            changed_arithmetic(job_context.device, tf32=job_context.tf32),
        ),
        rounding=rounding_at(job_context, min(cut, job_context.split if split is None else split)),
    )


def rounding_at(job_context: JobContext, split: int) -> WireRounding | None:
    """Return how a run rounds what crosses at ``split``; None where it comes as it is, like stored samples."""
    codec = job_context.wire_rounding
    if codec == NONE or not split:
        return None
    dtype = str(job_context.frozen.output_dtypes()[split]).removeprefix("torch.")
    return WireRounding(codec, split) if codec_fits(codec, dtype) else None


def joined_code(codes: Sequence[str], settings: Mapping[str, str] | None = None) -> str:
    """Return the code of features that any of these servers and this side compute: each version once, sorted.

    Args:
        codes: code versions of the servers, in any order.
        settings: of this side that change numbers, by name.
    """
    return "+".join(sorted({*codes, code_version(settings)}))


def _trained(layer: Layer) -> str:
    if layer.random:
        why = "draws anew in every batch while training"
    elif layer.mixes:
        why = "normalises by the batch at hand"
    else:
        why = "is trained"
    return f"layer {layer.index} ({layer.name}) {why}, so what comes after it differs from epoch to epoch"


def view_of(job_context: JobContext, epoch: int) -> int:
    """Return the view whose samples ``epoch`` has: 0 for a run without views."""
    return epoch % (job_context.views or 1)


def _random(augment: Augmentation) -> str:
    return (
        f"--augment {','.join(_random_parts(augment))} draws anew in each epoch, so no epoch has the samples of "
        "another; --augment-views K draws K times for each sample"
    )


def _random_parts(augment: Augmentation) -> list[str]:
    """Names of the random parts, as ``--augment`` takes them."""
    on = {
        "resized-crop": augment.scale is not None,
        "crop": augment.padding is not None,
        "flip": augment.flip > 0,
        "jitter": augment.jitters,
    }
    return [name for name, is_on in on.items() if is_on]
