"""Pushed models by their address: put into a store, opened, listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_fields

from hapi.errors import UsageError
from hapi.factories import is_factory
from hapi.models.model_file import read_card
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.names import FILE_SUFFIXES, with_seed
from hapi.models.zoo.weights import file_state
from hapi.repository import opening
from hapi.repository.opening import ModelSummary
from hapi.repository.push import Pushed, PushProgress, silent
from hapi.repository.push import push as push_layers
from hapi.repository.stored import StoredModel
from hapi.repository.versions import add_tag, drop_versions
from hapi.store.open import open_store, split_address, split_model_address

__all__ = ("list_models", "open_model", "push")


def push(
    model: str,
    address: str,
    *,
    weights: str | None = None,
    num_classes: int | None = None,
    input_size: int | None = None,
    blocks: Sequence[str] = (),
    replace: bool = False,
) -> StoredModel:
    """Build a model and put its weights into a store, layer by layer, as ``hapi push`` does.

    >>> import hapi
    >>> pushed = hapi.push("squeezenet1_1", "store/squeeze", weights="random:0", num_classes=4, input_size=64)
    >>> pushed.manifest.classes
    4

    Train with it: ``SessionSettings(model="store:squeeze", ...)``.

    Args:
        model: a torchvision name, ``transformer`` (vit_b_16), ``timm:NAME`` or ``package.module:factory``; or a model
            file of Hapi, whose network, input size and blocks are taken.
        address: STORE/NAME, such as ``store/resnet50`` or ``s3://bucket/resnet50``.
        weights: ``random`` (seed 0), ``random:SEED``, a name of the library's weights, or a local .safetensors or
            .pth file. None: the library's own (``DEFAULT``), and ``random`` for a factory.
        num_classes: classes of the head; None leaves it as it is.
        input_size: side of the square RGB input, in pixels; None: 224, or the model file's.
        blocks: module paths or layer names at which layers end; needed for a model that cannot be traced.
        replace: remove the earlier versions of this name that no tag holds.

    Raises:
        ModelError: the model cannot be built, traced or loaded as asked.
    """
    return push_model(
        model,
        address,
        weights=weights,
        num_classes=num_classes,
        input_size=input_size,
        blocks=blocks,
        replace=replace,
    ).model


def push_model(
    model: str,
    address: str,
    *,
    weights: str | None = None,
    num_classes: int | None = None,
    input_size: int | None = None,
    blocks: Sequence[str] = (),
    replace: bool = False,
    repair: bool = False,
    tag: str | None = None,
    progress: PushProgress = silent,
) -> Pushed:
    """Do as :func:`push`, and say what was written.

    Args:
        model: see :func:`push`, also for the arguments that are not here.
        address: STORE/NAME.
        weights: the weights.
        num_classes: classes of the head.
        input_size: side of the input.
        blocks: layers' ends.
        replace: remove earlier versions.
        repair: check and mend what the store has of the tensors.
        tag: name of the version.
        progress: told of it.
    """
    if model.endswith(FILE_SUFFIXES):
        spec = _spec_of_file(model, weights)
    else:
        usual = "random:0" if is_factory(model) else "DEFAULT"
        spec = ModelSpec(architecture=model, weights=usual if weights is None else with_seed(weights, 0))
    shape = spec.input_shape if input_size is None else (3, input_size, input_size)
    spec = replace_fields(
        spec,
        num_classes=spec.num_classes if num_classes is None else num_classes,
        input_shape=shape,
        blocks=tuple(blocks) or spec.blocks,
    )
    url, name = split_address(address)
    store = open_store(url)
    built = build(spec, allow_import=True)
    pushed = push_layers(store, name, built, spec, repair=repair, progress=progress)
    version = pushed.model.manifest.version
    if tag is not None:
        add_tag(store, name, tag, version)
    if replace:
        drop_versions(store, name, before=version)
    return pushed


def _spec_of_file(model: str, weights: str | None) -> ModelSpec:
    """The build of a model file's network, with the file as its weights."""
    if weights is not None:
        raise UsageError(
            f"--weights {weights}: {model} has weights already; give an architecture, or leave it out"
        )
    if not model.endswith(".safetensors"):
        file_state(model)  # a checkpoint says what to do
        raise UsageError(
            f"{model} does not say its architecture: hapi push ARCHITECTURE STORE/NAME --weights {model}"
        )
    return replace_fields(read_card(model).spec, weights=model)


def open_model(address: str, digest: str | None = None) -> StoredModel:
    """Return the pushed model at STORE/NAME: its layers, and their tensors read by range.

    >>> import hapi
    >>> _ = hapi.push("squeezenet1_1", "store/squeeze", weights="random:0", num_classes=4, input_size=64)
    >>> model = hapi.open_model("store/squeeze")
    >>> model.manifest.layers[0].name
    'features.0'
    >>> [(name, tuple(tensor.shape)) for name, tensor in model.read(["features.0.bias"])]
    [('features.0.bias', (64,))]

    Args:
        address: STORE/NAME for the latest version, STORE/NAME@VERSION, STORE/NAME@TAG or STORE/NAME@DIGEST.
        digest: the digest that the model must have; None for any.

    Raises:
        NotFoundError: there is no such model; the message names those that are there.
        ConflictError: the model has another digest.
    """
    url, reference = split_model_address(address)
    return opening.open_model(open_store(url), reference, digest)


def list_models(store: str) -> list[ModelSummary]:
    """Return a store's pushed models, with unfinished and damaged ones; ``store`` is a URL or folder.

    >>> import hapi
    >>> _ = hapi.push("squeezenet1_1", "store/squeeze", weights="random:0", num_classes=4, input_size=64)
    >>> [(found.name, found.architecture, found.problem) for found in hapi.list_models("store")]
    [('squeeze', 'squeezenet1_1', None)]
    """
    return opening.list_models(open_store(store))
