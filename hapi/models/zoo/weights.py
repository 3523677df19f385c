"""Weights of libraries by name, and state dicts put into modules."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hapi.errors import ModelChoiceError, ModelError, WeightsAbsentError
from hapi.models.zoo.architectures import Architecture, seeded
from hapi.models.zoo.head import outputs, resize_head
from hapi.models.zoo.hub import without_retries

DOWNLOAD_SECONDS = 30.0
"""Longest silence of a server of weights."""
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_OLD_DENSENET = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.\w+)$")


class _ShortTimeoutSockets:
    """New sockets of this process fail after ``DOWNLOAD_SECONDS`` of silence inside the block.

    torch's downloads set no timeout of their own, and would wait for a silent server for ever. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: float | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = socket.getdefaulttimeout()
                socket.setdefaulttimeout(DOWNLOAD_SECONDS)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                socket.setdefaulttimeout(self._before)


_impatient_sockets = _ShortTimeoutSockets()


def library_state(architecture: Architecture, weights: str, module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the state dict of a library's weights, from its cache or downloaded.

    Args:
        architecture: the library's architecture.
        weights: name of the weights (``DEFAULT``, ``IMAGENET1K_V1``).
        module: the module that they are for.

    Raises:
        WeightsAbsentError: the weights are not available.
        ModelChoiceError: the library has no weights of this name.
        ModelError: the weights cannot be used.
    """
    if architecture.name.startswith("timm:"):
        return _timm_state(architecture, weights)
    if architecture.family_name is None:
        raise _unknown(weights)(
            f"{architecture.name} has no weights called {weights!r}; give random:SEED or a local checkpoint"
        )
    from torchvision import models

    entries = models.get_model_weights(architecture.name)
    if weights not in entries.__members__:
        known = ", ".join(["DEFAULT", *(n for n in entries.__members__ if n != "DEFAULT")])
        raise _unknown(weights)(
            f"{architecture.name} has no weights {weights!r}; it has {known} (or random:SEED, or a file)"
        )
    entry = entries[weights]
    try:
        with _impatient_sockets:
            state: dict[str, torch.Tensor] = entry.get_state_dict(
                progress=False, check_hash=True, weights_only=True
            )
    except Exception as error:
        failed = WeightsAbsentError if _download_failed(error) else ModelError
        raise failed(
            f"weights {weights} of {architecture.name} are not in torch's cache and cannot be downloaded "
            f"({_reason(error)}); give a local file (--weights PATH) or random:SEED"
        ) from error
    image_size, patch_size = getattr(module, "image_size", None), getattr(module, "patch_size", None)
    if isinstance(image_size, int) and isinstance(patch_size, int):
        # Position embeddings for another image size are interpolated, as torchvision's own reference does.
        from torchvision.models.vision_transformer import interpolate_embeddings

        state = interpolate_embeddings(image_size, patch_size, state)
    return state


def _unknown(weights: str) -> type[ModelError]:
    """The error for weights that a library does not have; it names "DEFAULT" if there are any."""
    return WeightsAbsentError if weights == "DEFAULT" else ModelChoiceError


def _reason(error: Exception) -> str:
    """Reason of a failed download without paths of this machine, as a client of the server may read it."""
    cause = getattr(error, "reason", None)
    if isinstance(cause, OSError):  # of a URLError
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the file's name
    return (str(error).splitlines() or [type(error).__name__])[0][:200].replace(
        torch.hub.get_dir(), "TORCH_HOME"
    )


def _download_failed(error: Exception) -> bool:
    """True when weights could not be fetched; False when something came that cannot be used."""
    # Libraries of HTTP have errors that are not the system's (of a proxy, of a certificate).
    return isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "requests."))


def _timm_state(architecture: Architecture, weights: str) -> Mapping[str, torch.Tensor]:
    name = architecture.name
    if weights != "DEFAULT":
        raise ModelChoiceError(
            f"{name}: timm names weights in the model ({name}.TAG); give DEFAULT, random:SEED or a file"
        )
    if architecture.make_pretrained is None:
        raise WeightsAbsentError(f"timm has no pre-trained weights of {name}; give a file or random:SEED")
    try:
        with _impatient_sockets, without_retries(), seeded(0), torch.device("cpu"):
            loaded: dict[str, torch.Tensor] = architecture.make_pretrained().state_dict()
        return loaded
    except Exception as error:
        if _download_failed(error):
            raise WeightsAbsentError(
                f"pre-trained weights of {name} cannot be fetched ({_reason(error)}); give a file or random:SEED"
            ) from error
        raise ModelError(
            f"pre-trained weights of {name} cannot be used at this input shape ({_reason(error)}); give another "
            "shape, a file or random:SEED"
        ) from error


def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copy weights into a module.

    Args:
        module: the model.
        state: tensors by name.
        origin: name of their source, for messages.

    Raises:
        ModelError: keys are missing or left over; the message has the first of them.
    """
    known = set(module.state_dict())
    renamed: Any = type(state)() if isinstance(state, dict) else {}
    for name, tensor in state.items():
        old = _OLD_DENSENET.match(name)
        name = old[1] + old[2] if old and name not in known else name
        if name in known or not name.startswith(_AUXILIARY):
            renamed[name] = tensor
    if hasattr(state, "_metadata"):
        renamed._metadata = state._metadata  # versions by which modules read old checkpoints
    try:
        missing, unexpected = module.load_state_dict(renamed, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"{origin} does not fit the model: {lines[-1][:300]}") from error
    if missing or unexpected:
        parts = [f"missing {', '.join(missing[:3])}"] if missing else []
        parts += [f"unexpected {', '.join(unexpected[:3])}"] if unexpected else []
        counts = f"{len(missing)} missing, {len(unexpected)} unexpected"
        raise ModelError(f"{origin} does not fit the model: {'; '.join(parts)} ({counts})")


def fit_head(module: nn.Module, head: str, state: Mapping[str, torch.Tensor]) -> None:
    """Give the head as many outputs as the checkpoint's has, so that it can be loaded."""
    weight = state.get(f"{head}.weight")
    if weight is not None and weight.dim() > 0 and weight.shape[0] != outputs(module.get_submodule(head)):
        resize_head(module, head, weight.shape[0], seed=0)
