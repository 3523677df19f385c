"""Version of the code that computes features: Hapi's own parts and the libraries under them, as one short digest.

It belongs to every feature key (:mod:`hapi.cache.feature_key`): another decoder or another kernel gives other bits, so
what was kept with the old one must not be found any more. A server tells its digest in the answer to ``GET /v1``; older
servers tell none, and what they compute is not kept.

Not in it, since another machine with the same code shall find what this one kept: the device and the instructions that
torch chose for it (AVX2, AVX-512). They decide the last bits of float32 sums;
:func:`hapi.models.devices.arithmetic_name` says which they are, for people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from PIL import features

TRANSFORMS_VERSION = 1
"""Raise it when a sample's bytes and a transform give other numbers than before, in any bit: decoding, resizing,
cropping, normalising and the draws of random transforms (:mod:`hapi.data.transforms`)."""

LAYERS_VERSION = 3
"""Raise it when a frozen layer gives other numbers than before for the same digest of structure and weights: how
graphs are cut and run, what is rounded, and where (:mod:`hapi.models.graph`)."""

ROUNDING_VERSION = 1
"""Raise it when a codec that rounds gives other values than before for the same features
(:mod:`hapi.codecs.lossy`)."""

LIBRARIES = ("torch", "torchvision", "timm", "pillow", "numpy")
"""Distributions that decode or compute, if they are installed; torch's brings its own kernels for a CPU."""

GPU_LIBRARIES = tuple(
    f"nvidia-{name}{suffix}" for name in ("cublas", "cudnn") for suffix in ("", "-cu12", "-cu13")
)
"""Distributions of kernels beside torch's own, which may be updated without it."""

DECODERS = ("libjpeg_turbo", "jpg", "libtiff", "webp")
"""Libraries inside Pillow whose versions may decode to other pixels, by Pillow's names (zlib's cannot)."""

DIGITS = 16
"""Hexadecimal digits of a code version."""


@cache
def code_versions() -> Mapping[str, str]:
    """Versions of everything that decides features on this side, by name; costs no import of torch."""
    found = {
        "transforms": str(TRANSFORMS_VERSION),
        "layers": str(LAYERS_VERSION),
        "rounding": str(ROUNDING_VERSION),
    }
    for name in (*LIBRARIES, *GPU_LIBRARIES):
        if (version := _installed(name)) is not None:
            found[name] = version
    supported = features.get_supported()
    for name in DECODERS:
        if name in supported:
            found[f"pillow {name}"] = str(features.version(name))
    return found


def code_version(settings: Mapping[str, str] | None = None) -> str:
    """Return the digest of :func:`code_versions`.

    Args:
        settings: names and values of settings that change numbers and differ from their defaults.

    Returns:
        :data:`DIGITS` hexadecimal digits; those of two sides are equal if their libraries and settings are.
    """
    return digest_of_versions({**code_versions(), **(settings or {})})


def digest_of_versions(versions: Mapping[str, str]) -> str:
    """Return the code version that stands for ``versions``, by name and in any order."""
    text = json.dumps(dict(versions), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def libraries_text() -> str:
    """Return names and versions of the libraries that decode or compute here, for people."""
    versions = code_versions()
    return ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
