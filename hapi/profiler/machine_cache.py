"""Cache of this machine's measurements in the user's cache folder. No torch.

Each measurement is one small JSON file. It is valid only for the machine, the settings and the versions that
it was made with, for 30 days. A damaged folder or file is no error: a missing measurement is repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from hapi import __version__
from hapi.atomic import write_atomically
from hapi.paths import user_cache_folder
from hapi.process.processors import processor_count
from hapi.wire.documents import parse_document

FORM = 1
MAX_AGE_SECONDS = 30 * 86400
MAX_BYTES = 16 << 20
_FUTURE_SECONDS = 86400
"""A clock may have been set back by so much."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_PACKAGES = ("torch", "torchvision", "timm")
_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that decide how fast this process computes."""


@dataclass(frozen=True)
class Kept:
    """Contents of the cache."""

    content: Any
    measured: str
    """Time of the measurement, as ISO 8601."""
    path: Path


def identity() -> tuple[str, ...]:
    """Return the facts that a measurement of this machine depends on, as ``name=value``, without importing
    torch.
    """
    facts = {
        "host": platform.node(),
        "processor": processor_name(),
        "processors": str(processor_count()),
        "gpus": "; ".join(_gpus()),
        "python": platform.python_version(),
        "hapi": __version__,
        **{name: os.environ.get(name, "") for name in _SETTINGS},
        **{name: _version(name) for name in _PACKAGES},
    }
    return tuple(f"{name}={value}" for name, value in facts.items())


def load(kind: str, key: Sequence[str]) -> Kept | None:
    """Return the content that :func:`save` stored under ``kind`` and ``key``; None when there is no valid
    one.
    """
    path = _path(kind, key)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        document = parse_document(raw) if len(raw) <= MAX_BYTES else None
        if not isinstance(document, dict) or set(document) != {"form", "key", "measured", "content"}:
            return None
        measured = document["measured"]
        age = time.time() - datetime.fromisoformat(measured).timestamp()
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    fresh = -_FUTURE_SECONDS <= age <= MAX_AGE_SECONDS
    if document["form"] != FORM or document["key"] != list(key) or not fresh:
        return None
    return Kept(document["content"], measured, path)


def save(kind: str, key: Sequence[str], content: Any) -> str:
    """Store ``content``, measured now; return an empty text, or one line with the reason why that failed.

    Args:
        kind: of the measurement.
        key: facts that it depends on.
        content: plain JSON.
    """
    path = _path(kind, key)
    if path is None:
        return "nothing is kept for the next time: this user has no home folder"
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"form": FORM, "key": list(key), "measured": measured, "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document).encode())
    except OSError as error:
        return f"nothing is kept for the next time: {path.parent}: {error.strerror or error}"
    _remove_outdated(path.parent)
    return ""


def _path(kind: str, key: Sequence[str]) -> Path | None:
    home = user_cache_folder()
    digest = xxhash.xxh3_64_hexdigest(json.dumps([FORM, *key]).encode())
    return None if home is None else home / f"{kind}-{digest}.json"


def _remove_outdated(home: Path) -> None:
    limit = time.time() - MAX_AGE_SECONDS
    with contextlib.suppress(OSError):
        for path in home.glob("*-*.json"):
            if path.stat().st_mtime < limit:
                path.unlink(missing_ok=True)


def processor_name() -> str:
    """The processor's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs, as the driver lists them."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for path in sorted(_GPUS.glob("*/information")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
