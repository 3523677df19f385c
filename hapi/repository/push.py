"""Writing a model into a store: only what the store does not have, streamed, one version more.

tensors   -- hashed: read once, piece by piece, several side by side
layers    -- looked for in the headers of the store's packs
new ones  -- written as packs, each once all in it is hashed; a killed push goes on behind those that it wrote
manifest  -- written last: a version without it does not exist
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from hapi.errors import ConflictError, DataError, ModelError, NotFoundError
from hapi.models.graph.architecture import LayerIdentity
from hapi.models.graph.digest import content_digest
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec
from hapi.models.zoo.names import is_file
from hapi.repository.entries import SourceTensor, TensorForm
from hapi.repository.known.heads import keep_heads
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import read_manifest
from hapi.repository.packs.hashing import HashProgress, hashed_layers
from hapi.repository.packs.index import PackIndex
from hapi.repository.packs.journal import next_version, note_name, written_versions
from hapi.repository.packs.layout import HashedLayer, PackPlanner, WritePlan, fits_pack, plan_packs
from hapi.repository.packs.lost import held_bytes
from hapi.repository.packs.mending import mend
from hapi.repository.packs.place import pack_id, pack_key
from hapi.repository.packs.pushes import RunningPush, running, spare_condemned
from hapi.repository.packs.writing import EarlyPacks, write_pack
from hapi.repository.stored import StoredModel
from hapi.repository.structure import LayerEntry, ModelStructure
from hapi.repository.versions import ModelAddress, list_versions, resolve
from hapi.store.base import DOCUMENT_BYTES, ObjectStore, check_document
from hapi.wire.references import check_name

_TRIES = 100
"""Versions of a name that other pushes may write while one is."""
_PLANS, _COLLECTED_SECONDS = 20, 0.5
"""Plans that collections may upset before a push gives up, and seconds that it leaves to one that removes its
structure."""


def silent(done: int, total: int) -> None:
    """Note no progress."""


@dataclass(frozen=True)
class SourceLayer:
    """The tensors of one layer of a model that is pushed as tensors only."""

    name: str
    tensors: tuple[SourceTensor, ...]


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """Outcome of a push."""

    model: StoredModel
    written: int
    """Bytes of tensors that were written; the store had the others."""
    new: bool
    """False when the latest version was this model already."""


def push(
    store: ObjectStore,
    name: str,
    model: LayeredModel,
    spec: ModelSpec,
    *,
    parent: str | None = None,
    card: Mapping[str, Any] | None = None,
    sources: Callable[[str], SourceTensor] | None = None,
    repair: bool = False,
    progress: HashProgress = silent,
) -> Pushed:
    """Write ``model``, built from ``spec``, into ``store`` as the next version of ``name``.

    Args:
        store: where it is written.
        name: its name there.
        model: all layers.
        spec: the build that made it; whoever reads the model builds its layers from it.
        parent: the pushed model that it was fine-tuned from, as NAME@VERSION.
        card: facts of the model file that is pushed (:meth:`hapi.models.model_file.ModelCard.facts`).
        sources: gives tensors by name where the model's own are not in memory; their digests are told to the model.
        repair: check what the store has of these tensors, and mend what is damaged there, for all models.
        progress: told how much of the model was hashed; what is written is a part of it.

    Raises:
        ModelError: a tensor is not loaded, or has a type or shape that cannot be stored.
        DataError: a pack vanished, or a source changed while it was read.
    """
    check_name(name, "model")
    own = sources or (lambda tensor: SourceTensor.of(tensor, model.tensors.get(tensor)))
    layers, held = [], set[str]()
    for layer in model.layers:
        names = [tensor for tensor in dict.fromkeys(layer.tensors) if tensor not in held]
        layers.append([own(tensor) for tensor in names])
        held.update(names)
    with running(store) as push:
        content = _content(store, push, layers, model.default_freeze, repair, progress)
        digests = content.digests
        model.expected_digests = {**model.expected_digests, **digests}
        for tensor, digest in digests.items():  # hashed once, here
            if not model.tensors.get(tensor).is_meta:
                model.remember_digest(tensor, digest)
        identities = model.identities()
        structure = ModelStructure(
            layers=tuple(LayerEntry(layer.name, layer.output_shape, layer.tensors) for layer in model.layers),
            forms=content.forms,
            identities=tuple(identity.structure for identity in identities),
            graph=model.leaf_layers().graph,
        )
        output = model.output_shapes()[-1]
        draft = _Draft(
            structure,
            content,
            spec=_without_path(spec),
            digests=tuple(model.prefix_digests()),
            contents=tuple(identity.content for identity in identities),
            classes=output[0] if len(output) == 1 else None,
            default_freeze=model.default_freeze,
            parent=parent,
            card=card,
        )
        return _push(store, push, name, draft, repair)


def push_tensors(
    store: ObjectStore,
    name: str,
    layers: Sequence[SourceLayer],
    *,
    parent: str | None = None,
    repair: bool = False,
    progress: HashProgress = silent,
) -> Pushed:
    """Write a model of tensors only, which nobody can build, as the next version of ``name``.

    Its layers are those of ``layers``, in their order; a layer's identity is the chain of all before it.

    Args:
        store: where it is written.
        name: its name there.
        layers: all its tensors, each once.
        parent: the pushed model that it was made from, as NAME@VERSION.
        repair: check what the store has of these tensors, and mend what is damaged there, for all models.
        progress: told how much was hashed.

    Raises:
        ModelError: there are no tensors, two have the same name, or one has a shape that cannot be stored.
        DataError: a pack vanished, or a source changed while it was read.
    """
    check_name(name, "model")
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    if len({tensor.name for tensor in tensors}) < len(tensors) or not tensors:
        raise ModelError(f"model {name!r} has no tensors, or two of one name, so it cannot be pushed")
    with running(store) as push:
        content = _content(store, push, [layer.tensors for layer in layers], None, repair, progress)
        identities = list(_chain(layers, content.digests))
        structure = ModelStructure(
            layers=tuple(LayerEntry(la.name, (), tuple(t.name for t in la.tensors)) for la in layers),
            forms=content.forms,
            identities=tuple(identity.structure for identity in identities),
            graph=None,
        )
        contents = tuple(identity.content for identity in identities)
        draft = _Draft(structure, content, digests=contents, contents=contents, parent=parent)
        return _push(store, push, name, draft, repair)


@dataclass(frozen=True)
class _Content:
    """A model's tensors by layer, hashed."""

    layers: Sequence[HashedLayer]
    written: int
    """Bytes of those that were written meanwhile."""

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the tensors by name."""
        return {tensor.source.name: tensor.digest for layer in self.layers for tensor in layer.tensors}

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        """Forms of the tensors."""
        sources = (tensor.source for layer in self.layers for tensor in layer.tensors)
        return tuple(TensorForm(source.name, source.dtype, source.shape) for source in sources)


def _content(
    store: ObjectStore,
    push: RunningPush,
    layers: Sequence[Sequence[SourceTensor]],
    freeze: int | None,
    repair: bool,
    progress: HashProgress,
) -> _Content:
    """Hash all layers, and write each pack of a large model as soon as it is complete."""
    for tensor in (tensor for layer in layers for tensor in layer):
        if tensor.refusal is not None:
            raise ModelError(f"tensor {tensor.name[:80]!r} cannot be stored: {tensor.refusal}")
    nbytes = sum(tensor.nbytes for layer in layers for tensor in layer)
    with closing(hashed_layers(layers, freeze, progress)) as hashing:
        if repair or fits_pack(nbytes):
            return _Content(list(hashing), 0)
        planner, found = PackPlanner(PackIndex.read(store)), []
        with EarlyPacks(store, push) as early:
            for layer in hashing:
                found.append(layer)
                for pack in planner.add(layer):
                    early.write(pack)
    return _Content(found, early.written)


@dataclass(frozen=True)
class _Draft:
    """A manifest without name, version and places."""

    structure: ModelStructure
    content: _Content
    digests: tuple[str, ...]
    contents: tuple[str, ...]
    spec: ModelSpec | None = None
    classes: int | None = None
    default_freeze: int | None = None
    parent: str | None = None
    card: Mapping[str, Any] | None = None

    def manifest(self, name: str, plan: WritePlan) -> ModelManifest:
        """Return the manifest with the places of ``plan``."""
        return ModelManifest(
            name=name,
            version=0,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            parent=self.parent,
            structure=self.structure,
            spec=self.spec,
            digests=self.digests,
            contents=self.contents,
            classes=self.classes,
            default_freeze=self.default_freeze,
            card=self.card,
            tensors=plan.entries,
        )


def _push(store: ObjectStore, push: RunningPush, name: str, draft: _Draft, repair: bool) -> Pushed:
    plan = _planned(store, draft, push, repair)
    if repair and not mend(store, plan, push.lease):
        plan = _planned(store, draft, push, repair=False)  # which leaves out packs that stay cut short
    _check_readable(draft.structure, name)
    found = _newest(store, name)
    newest = found if isinstance(found, ModelManifest) else None
    whole = newest is not None and all(pack_id(key) in plan.known.sizes for key in newest.packs)
    if newest is not None and whole and not plan.packs and _same(newest, draft):
        if repair:
            store.put(newest.structure.key, newest.structure.to_stored())
        return Pushed(model=StoredModel(store, newest), written=draft.content.written, new=False)
    for pack in plan.packs:
        write_pack(store, push, pack)
    keep_heads(store, {pack.id: pack.header for pack in plan.packs})
    structure, data = draft.structure, draft.structure.to_stored()
    if repair or isinstance(found, DataError) or held_bytes(store, structure.key) != len(data):
        store.put(structure.key, data)
    manifest = draft.manifest(name, plan)
    _check_packs(store, plan)
    push.lease.check()
    written, new = _append(store, push, manifest, draft)
    store.clean_temporary(f"models/{name}", alone=False)  # other pushes write there
    nbytes = plan.nbytes + draft.content.written
    return Pushed(model=StoredModel(store, written), written=nbytes, new=new)


def _append(
    store: ObjectStore, push: RunningPush, manifest: ModelManifest, draft: _Draft
) -> tuple[ModelManifest, bool]:
    """The newest version, and whether this push wrote it: another one of the same model may have been faster."""
    for _ in range(_TRIES):
        newest = _newest(store, manifest.name)
        if isinstance(newest, ModelManifest):
            if newest.packs == manifest.packs and _same(newest, draft):
                return newest, False
            number = newest.version + 1
        else:
            number = next_version(store, manifest.name)
            note_name(store, manifest.name)
        following = manifest.numbered(number)
        push.writes(following.name, number)
        if store.put_new(following.key, following.to_bytes()):
            return following, True
    raise ConflictError(f"model {manifest.name!r} is pushed by many others just now; push it again")


def _newest(store: ObjectStore, name: str) -> ModelManifest | DataError | None:
    """The newest version, as the store has it now; the error of one that is damaged; None where there is none."""
    hidden = () if list_versions(store, name) else written_versions(store, name)
    try:
        version = hidden[-1] if hidden else resolve(store, ModelAddress(name, None))
        return read_manifest(store, name, version, fresh=True)
    except NotFoundError:
        return None
    except DataError as error:  # a new version takes its place
        return error


def _same(newest: ModelManifest, draft: _Draft) -> bool:
    specs = [spec and spec.without_file() for spec in (newest.spec, draft.spec)]
    return (
        (newest.structure.digest, newest.digests, specs[0], newest.classes, newest.default_freeze)
        == (draft.structure.digest, draft.digests, specs[1], draft.classes, draft.default_freeze)
        and draft.card in (None, newest.card)
        and (draft.parent is None or draft.parent == newest.parent)
        and [e.digest for e in newest.tensors.values()] == list(draft.content.digests.values())
    )


def _planned(store: ObjectStore, draft: _Draft, push: RunningPush, repair: bool) -> WritePlan:
    """The plan, none of whose packs is condemned; those that a repair looks at are needed too."""
    layers, structure = draft.content.layers, draft.structure.digest
    avoid: frozenset[str] = frozenset()
    gone = set[str]()
    """Packs that a listing which is behind still has."""
    for _ in range(_PLANS):
        known = PackIndex.read(store, avoid | gone, cut_short=repair)
        plan = plan_packs(layers, known, avoid)
        used = set(plan.found)
        if repair:
            copies = (known.tensors.get(digest, ()) for digest in draft.content.digests.values())
            used |= {place.pack for places in copies for place in places}
        needed = used | {pack.id for pack in plan.packs}
        condemned = push.needs(needed, (structure,))
        avoid, waits = condemned.ids.packs, condemned.has_structure(structure)
        gone |= {pack for pack in used if not store.exists(pack_key(pack))}
        # A collection may have taken some between the look at their headers and the word of the need.
        if not needed & avoid and not waits and not used & gone:
            return plan
        if waits:
            if spare_condemned(store):
                avoid = frozenset()
            else:
                time.sleep(_COLLECTED_SECONDS)
    raise ConflictError(
        f"{store.url}: what this push needs is being removed by 'hapi gc'; push again when that is done, and if none "
        "runs, run it again"
    )


def _check_readable(structure: ModelStructure, name: str) -> None:
    """:class:`ModelError` for a structure that could not be read again: then no version must need it."""
    data = structure.to_bytes()
    try:
        check_document(structure.key, len(data), DOCUMENT_BYTES)
        ModelStructure.from_bytes(data, structure.digest, structure.key)
    except DataError as error:
        reason = error.__cause__ or f"its description has {len(data)} bytes, and {DOCUMENT_BYTES} are read"
        raise ModelError(
            f"model {name!r} cannot be described in a store ({reason}); push its parts under names of their own"
        ) from None


def _check_packs(store: ObjectStore, plan: WritePlan) -> None:
    """:class:`DataError` unless all packs of the plan are there."""
    needed: dict[str, int] = {}
    for entry in plan.entries.values():
        needed[entry.pack] = max(needed.get(entry.pack, 0), entry.stop)
    for key, stop in needed.items():
        if held_bytes(store, key) < stop:
            raise DataError(
                f"{store.url}/{key} is gone or too short, although it was there: another process or person removed or "
                "changed it; push the model again"
            )


def _chain(layers: Sequence[SourceLayer], digests: dict[str, str]) -> Iterator[LayerIdentity]:
    structure, content = content_digest(b"structure of tensors"), content_digest(b"content of tensors")
    yield LayerIdentity(structure, content)
    for layer in layers:
        forms = "".join(f"\n{t.dtype} {list(t.shape)}" for t in layer.tensors)
        structure = content_digest(f"{structure}{forms}".encode())
        held = "".join(f"\n{digests[t.name]}" for t in layer.tensors)
        content = content_digest(f"{content}{forms}{held}".encode())
        yield LayerIdentity(structure, content)


def _without_path(spec: ModelSpec) -> ModelSpec:
    """The spec without the folder of its weights: where they lay on this machine is nobody's business."""
    return replace(spec, weights=PurePath(spec.weights).name) if is_file(spec.weights) else spec
