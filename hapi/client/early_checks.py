"""Names in a session's settings, checked before torch is imported or a server is ready: wrong ones are told at once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hapi.client.augment import parsed
from hapi.client.settings import (
    STORE_PREFIX,
    STRATEGY_NAMES,
    DataSettings,
    ModelSettings,
    PlanningSettings,
    SessionSettings,
    default_store,
)
from hapi.codecs.names import LOSSY
from hapi.data.epoch_order import EpochOrder, Shuffle
from hapi.data.listing import check_store
from hapi.errors import HapiError, ModelError, UsageError
from hapi.factories import check_module, is_factory
from hapi.models.zoo.names import check_model, check_weights, could_be_layer
from hapi.paths import user_path
from hapi.profiler.profile import Profile
from hapi.profiler.strategies import STRATEGIES, choose_split
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.wire.references import TransformSpec, given_name

if TYPE_CHECKING:
    from hapi.models.graph.layers import LayeredModel

_CUTOFF = 0.7
"""Similarity from which a word that is no strategy was probably meant to be one; no library's layer comes as close."""


def check_names(settings: SessionSettings) -> None:
    """Check the names of model, weights, split, transforms, order, store and datasets, and the profile's file, as far
    as this machine alone can tell.

    Raises:
        UsageError: a name is wrong, or a file or the store is not there; the message names near misses.
        ModelChoiceError: there is no such model.
    """
    check_views(settings.augment, settings.augment_views)
    if settings.augment:
        parsed(settings.augment)
    _check_order(settings)
    check_rounding(settings)
    settings.prices.check(settings.objective)
    pushed = settings.model.startswith(STORE_PREFIX)
    if not pushed:
        check_model(settings.model)
        check_module(settings.model)
        check_weights(settings.model, settings.weights)
    _check_split(settings, settings)
    if is_fixed(settings.split):
        check_fixed(settings)
    _check_profile(settings.profile)
    if settings.ca_file is not None and not settings.server:
        raise UsageError(f"--ca-file {settings.ca_file}: is for an https:// --server, and none is named")
    try:
        store = _folder(settings)
    except UsageError:  # told by whoever opens it, after what is wrong elsewhere
        return
    if store is None:
        return
    if not store.list_names("datasets"):
        check_store(settings.store or default_store(), "--dataset")
        return
    validation = settings.validation if isinstance(settings.validation, str) else None
    for flag, folder, name in (
        ("--dataset", "datasets", settings.dataset),
        ("--validation", "datasets", validation),
        (
            "--model",
            "models",
            settings.model.removeprefix(STORE_PREFIX).partition("@")[0] if pushed else None,
        ),
    ):
        if name is not None:
            _check_stored(store, folder, given_name(name, flag), flag)


def check_views(augment: Sequence[str], views: int | None) -> None:
    """Raise :class:`UsageError` when there are ``views`` of a transform that draws nothing."""
    if views is not None and not augment:
        raise UsageError(
            f"--augment-views {views}: nothing is drawn without --augment; give it, or leave --augment-views away"
        )


def is_fixed(split: int | str) -> bool:
    """Return whether ``split``, the setting, needs no profile to be chosen."""
    return split in STRATEGIES or split not in STRATEGY_NAMES


def check_fixed(settings: PlanningSettings) -> None:
    """Raise :class:`UsageError` for settings that have no effect with a split that is fixed."""
    for flag, needed in (
        ("--profile", settings.profile is not None),
        ("--objective money", settings.objective == "money"),
    ):
        if needed:
            raise UsageError(f"{flag} {fixed_split(settings)}")


def fixed_split(settings: PlanningSettings) -> str:
    """Return the end of the error for a flag about profiles beside a fixed split."""
    return (
        f"needs a split that is chosen from a profile, such as --split auto; split {settings.split} is fixed"
    )


def check_layers(settings: SessionSettings) -> None:
    """Check the network, its head, the freeze and a fixed split, as far as this machine alone can tell.

    The images' form and the classes are those of the dataset in a local store; without one, a library's network is
    taken to suit them.

    Raises:
        ModelError: the network cannot be made, divided, or given a head for the classes.
        UsageError: there is no such layer, or it cannot be frozen or split at.
    """
    own, fixed = is_factory(settings.model), settings.split not in STRATEGY_NAMES
    if settings.model.startswith(STORE_PREFIX) or not (own or fixed or settings.freeze is not None):
        return
    from hapi.client.soundness import check_head
    from hapi.models.zoo.build import ModelSpec, build, headed_structure
    from hapi.models.zoo.freeze import choose_freeze

    found, side = _local_form(settings), settings.image_size or TransformSpec().crop
    if own and found is None:
        return
    shape, classes = found or ((3, side, side), None)
    spec = ModelSpec(
        architecture=settings.model, num_classes=classes, input_shape=shape, blocks=settings.blocks
    )
    try:
        check_head(spec, classes or 1, allow_import=own)
        model = headed_structure(spec, allow_import=own)
    except ModelError:
        if found is None:  # it may be one for the dataset's inputs
            return
        if not own:
            raise
        model = build(spec, allow_import=own)  # the factory's code may need values, which a structure has not
    resolve_split(model, settings.split, choose_freeze(model, settings.freeze))


def _local_form(settings: SessionSettings) -> tuple[tuple[int, ...], int] | None:
    """Shape of an input and number of classes of the dataset in a local store; None where they are not known.

    What is wrong with the dataset is told by its server.
    """
    from hapi.client.dataset_choice import transform_of
    from hapi.data.manifest import Manifest, manifest_key
    from hapi.data.transforms.pipeline import input_shape

    try:
        store = _folder(settings)
        names = [] if store is None else store.list_names("datasets")
        name = names[0] if settings.dataset is None and len(names) == 1 else settings.dataset
        if store is None or name is None:
            return None
        manifest = Manifest.from_bytes(store.get(manifest_key(name)), name, store.url)
        return input_shape(manifest.layout, transform_of(settings, manifest.transform)), len(manifest.classes)
    except HapiError:
        return None


def resolve_split(model: LayeredModel, requested: int | str, freeze: int) -> tuple[str | None, int]:
    """Return (strategy, the first split) for a strategy's name, or (None, split) for a fixed split.

    Args:
        model: the model.
        requested: strategy's name or a split.
        freeze: last frozen layer.

    Raises:
        UsageError: the split is past the last split.
    """
    if isinstance(requested, str) and requested in STRATEGIES:
        return None, choose_split(requested, model.output_bytes(), freeze)
    if isinstance(requested, str) and requested in STRATEGY_NAMES:
        return requested, freeze
    try:
        split = model.resolve(requested)
    except ModelError as error:
        strategies = f", nor a strategy ({', '.join(STRATEGY_NAMES)})" if isinstance(requested, str) else ""
        raise UsageError(f"--split: {error} ('hapi layers MODEL' lists them){strategies}") from None
    last_split = model.last_split(freeze)
    if split > last_split:
        raise UsageError(
            f"--split {requested}: layer {split} comes after the freeze ({freeze}) and is trained or random; "
            f"choose 0 to {last_split}"
        )
    return None, split


def check_rounding(settings: SessionSettings) -> None:
    """Raise :class:`UsageError` when features would be rounded twice."""
    if settings.wire_codec in LOSSY and settings.frozen_precision != "fp32":
        raise UsageError(
            f"--wire-codec {settings.wire_codec} rounds float32 features, and with --frozen-precision "
            f"{settings.frozen_precision} there are none; leave one of them away"
        )


def local_store(settings: SessionSettings) -> LocalStore | None:
    """The folder that an embedded server is to serve; None where servers are named, or the store is remote.

    Raises:
        UsageError: no dataset is in it.
    """
    store = _folder(settings)
    if store is not None and store.root.is_file():
        raise UsageError(f"--store {store.url} is a file; name the folder of a store")
    if store is not None and not store.list_names("datasets"):
        raise UsageError(
            f"no dataset in the store {store.url!r}; make one with 'hapi pack SOURCE {store.url}/NAME', "
            "name another store (--store), or a running server (--server URL)"
        )
    return store


def _folder(settings: SessionSettings) -> LocalStore | None:
    url = settings.store or default_store()
    if settings.server or ("://" in url and not url.startswith("file://")):
        return None
    folder = user_path(url.removeprefix("file://"), "--store")
    try:
        folder.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--store {url}: cannot be read: {error.strerror}") from None
    return LocalStore(folder)


def _check_order(settings: DataSettings) -> None:
    """Raise :class:`UsageError` for an order or a share of it that there cannot be."""
    shuffle = Shuffle.parse(settings.shuffle, Shuffle(1, 1), what="--shuffle")
    EpochOrder(seed=settings.seed, shuffle=shuffle, trainers=settings.trainers, trainer=settings.trainer)
    share = settings.validation
    if isinstance(share, float) and not 0 < share < 1:
        raise UsageError(f"--validation {share}: expected a share between 0 and 1, or the name of a dataset")


def _check_profile(path: str | None) -> None:
    """Raise :class:`UsageError` for a file that is no profile."""
    if path is None:
        return
    try:
        Profile.load(path)
    except UsageError as error:
        raise type(error)(f"--profile {error}") from None


def _check_split(model: ModelSettings, planning: PlanningSettings) -> None:
    word = planning.split
    if not isinstance(word, str) or word in STRATEGY_NAMES or ":" in model.model or model.blocks:
        return
    matches = difflib.get_close_matches(word, STRATEGY_NAMES, 1, _CUTOFF)
    if matches or not could_be_layer(model.model, word):
        meant = (
            f"; did you mean {matches[0]}?"
            if matches
            else f": neither a strategy ({', '.join(STRATEGY_NAMES)}) "
        )
        layer = "" if matches else f"nor a layer ('hapi layers {model.model}' lists them)"
        raise UsageError(f"--split {word[:80]}{meant}{layer}")


def _check_stored(store: ObjectStore, folder: str, name: str, flag: str) -> None:
    known = store.list_names(folder)
    if name in known:
        return
    kind = "dataset" if folder == "datasets" else "pushed model"
    raise UsageError(f"{flag}: there is no {kind} {name!r} in {store.url}; {_advice(name, known)}")


def _advice(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, 1, 0.6)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"there are {', '.join(known[:20])}" if known else "there are none"
