"""Pushed models by their address: put into a store, opened, listed."""

from __future__ import annotations

from collections.abc import Sequence

from hapi.api.pushing import PushOptions, push_model
from hapi.models.zoo.architectures import ImportRule
from hapi.repository import opening
from hapi.repository.opening import ModelSummary
from hapi.repository.stored import StoredModel
from hapi.store.open import open_store, split_model_address

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
    allow_import: ImportRule = False,
) -> StoredModel:
    """Build a model and put its weights into a store, layer by layer, as ``hapi push`` does.

    >>> import hapi
    >>> pushed = hapi.push("squeezenet1_1", "store/squeeze", weights="random:0", num_classes=4, input_size=64)
    >>> pushed.manifest.classes
    4

    Train with it: ``SessionSettings(model="store:squeeze", ...)``.

    Args:
        model: a torchvision name, ``transformer`` (vit_b_16), ``timm:NAME`` or ``package.module:factory``; or a model
            file of Hapi, whose network, input size and blocks are taken; or any checkpoint (see ``weights``), which is
            pushed as tensors without a network: it can be pulled, shown, compared and verified, but not trained.
        address: STORE/NAME, such as ``store/resnet50`` or ``s3://bucket/resnet50``.
        weights: ``random`` (seed 0), ``random:SEED``, a name of the library's weights, or a local checkpoint: a
            .safetensors, .pth, .pt, .bin, .ckpt or .pth.tar file, an ``index.json`` of Hugging Face's shards, or a
            folder with one of them. It is streamed if it has the network's tensors in its types and shapes. None: the
            library's own (``DEFAULT``), and ``random`` for a factory.
        num_classes: classes of the head; None leaves it as it is.
        input_size: side of the square RGB input, in pixels; None: 224, or the model file's.
        blocks: module paths or layer names at which layers end; needed for a model that cannot be traced.
        replace: remove the earlier versions of this name that no tag holds.
        allow_import: whether the factory that a model file names may be imported: yes, no, or which.

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
        options=PushOptions(replace=replace, allow_import=allow_import),
    ).model


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
