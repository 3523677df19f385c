"""One compute device of a server with its memory, its resident layers and its own scheduler.

Each device has its own queue and its own adaptation (HAPI, earlier text, section 4.5).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hapi.cache.code_version import libraries_text
from hapi.errors import DrainingError, UsageError
from hapi.models.devices import arithmetic_name, free_bytes, resolve_device
from hapi.server.device.device import Device
from hapi.server.device.host_memory import UNKNOWN_BYTES
from hapi.server.device.memory_budget import DeviceMemory
from hapi.server.device.model_cache import ModelCache
from hapi.server.device.prefix_loader import PrefixLoader
from hapi.server.device.sizing import Sizing
from hapi.server.settings import ServiceSettings
from hapi.server.status import DeviceStatus
from hapi.store.base import ObjectStore

GPU_SHARE, CPU_SHARE = 0.9, 0.5
"""Default budget as a share of the free memory: a GPU is the server's own, but allocators lose some; the
host's memory also holds data that is read, decoded and sent, and often other programs.
"""
RELOAD = 2
"""Requests by which a device that has the layers may be busier than another one before the other loads them too."""


@dataclass
class DeviceWorker:
    """A device with everything that belongs to it."""

    name: str
    """The device's, and different from those of all others."""
    device: Device
    cache: ModelCache
    memory: DeviceMemory
    prefixes: PrefixLoader
    running: int = 0
    """Requests that were given to it and are not over."""
    cos_batch: int | None = None
    """The one chosen last."""

    def status(self) -> DeviceStatus:
        """Return the present state of the device."""
        device, memory, cache = self.device, self.memory, self.cache
        return DeviceStatus(
            name=self.name,
            requests=self.running,
            forwards=device.running,
            forwards_waiting=device.waiting,
            memory=memory.kinds(),
            budget_bytes=memory.budget if memory.budget < UNKNOWN_BYTES else None,
            allocated_bytes=device.memory_bytes() if device.device.type == "cuda" else None,
            memory_waiting=memory.waiting,
            out_of_memory=device.out_of_memory_caught,
            merged=device.merged,
            adaptations=memory.adaptations,
            adapt_seconds=memory.adapt_seconds,
            resident_bytes=cache.resident_bytes,
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            cos_batch=self.cos_batch,
        )


@dataclass
class Workers:
    """All devices of a server; requests are spread over them. Thread-safe."""

    all: Sequence[DeviceWorker]
    sizing: Sizing
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self, identity: str) -> Iterator[DeviceWorker]:
        """Return the device for a request of this prefix: one that has it, otherwise the one with the least
        to do.

        A broken one is not chosen; :class:`DrainingError` when all are.
        """
        with self._lock:
            working = [w for w in self.all if not w.device.health.broken]
            if not working:
                raise DrainingError("no device of the server works any more; ask another one")
            chosen = min(working, key=lambda w: w.running + (0 if w.cache.has(identity) else RELOAD))
            chosen.running += 1
        try:
            yield chosen
        except RuntimeError as error:  # also while layers are loaded, or their outputs are waited for
            found = chosen.device.health.diagnosed(error)
            if found is error:
                raise
            raise found from error
        finally:
            with self._lock:
                chosen.running -= 1

    @property
    def host_bytes(self) -> int:
        """Return the budgets of devices that are the machine itself: their memory is the host's."""
        return sum(w.memory.budget for w in self.all if w.device.device.type == "cpu")

    @property
    def arithmetic(self) -> str:
        """Return what computes here, for people: GPUs or a processor's instructions, and the libraries."""
        devices = sorted({arithmetic_name(worker.device.device) for worker in self.all})
        return f"{' and '.join(devices)}, {libraries_text()}"

    @property
    def usable(self) -> bool:
        """True when any device works."""
        return not all(worker.device.health.broken for worker in self.all)

    def pressed(self, name: str) -> bool:
        """Return whether somebody waits for the memory of the device of this name, if there is one."""
        return any(worker.memory.pressed() for worker in self.all if worker.name == name)

    def close(self) -> None:
        """Stop the devices' threads."""
        for worker in self.all:
            worker.device.close()


def make_workers(settings: ServiceSettings, store: ObjectStore) -> Workers:
    """Return the workers of ``settings.device``, a comma-separated list; :class:`UsageError` for absent
    devices.
    """
    names = [name.strip() for name in settings.device.split(",")]
    devices = [resolve_device(name) for name in names]
    gpus = [d for d in devices if d.type == "cuda"]
    if len(set(gpus)) < len(gpus) or (gpus and len(gpus) < len(devices)):
        raise UsageError(f"device {settings.device!r}: give each GPU once, and not beside the CPU")
    # The CPU may be given several times.
    shown = [str(d) if devices.count(d) == 1 else f"{d}#{i}" for i, d in enumerate(devices)]
    return Workers(
        [_worker(name, d, len(devices), settings, store) for name, d in zip(shown, devices, strict=True)],
        Sizing(store, settings.allow_model, devices[0]),
    )


def _worker(
    name: str, device: torch.device, count: int, settings: ServiceSettings, store: ObjectStore
) -> DeviceWorker:
    cache = ModelCache(settings.model_cache, reuse=settings.model_reuse)
    memory = DeviceMemory(_budget(device, count, settings), settings.policy, cache)
    return DeviceWorker(
        name=name,
        device=Device(device, cache.drop_idle, memory=memory, merge=settings.merge, tf32=settings.tf32),
        cache=cache,
        memory=memory,
        prefixes=PrefixLoader(settings, store, device, cache),
    )


def _budget(device: torch.device, count: int, settings: ServiceSettings) -> int:
    if settings.device_memory is not None:
        return settings.device_memory
    free = free_bytes(device)
    if free is None:
        return UNKNOWN_BYTES
    return int(free * GPU_SHARE) if device.type == "cuda" else int(free * CPU_SHARE / count)
