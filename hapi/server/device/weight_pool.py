"""Frozen weights on one device: one resident copy for each distinct content, however many use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from hapi.waiting import wait

Load = Callable[[Collection[str]], Iterable[tuple[str, torch.Tensor]]]
"""Gives the tensors of these keys, on the device, each in memory of its own; in any order."""


@dataclass
class _Resident:
    tensor: torch.Tensor
    nbytes: int
    holders: int


class WeightPool:
    """Resident tensors by key of content (:func:`hapi.models.graph.digest.content_key`), counted;
    thread-safe.

    They are never written to. A key is absent, loading (one caller of :meth:`take` brings it), or resident
    with at least one holder; with its last holder the tensor goes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._resident: dict[str, _Resident] = {}
        self._loading: dict[str, int] = {}

    def take(self, wanted: Mapping[str, int], load: Load) -> dict[str, torch.Tensor]:
        """Hold each tensor of ``wanted`` (key to bytes) once more, until :meth:`release`; return the tensors.

        Missing ones are requested from ``load`` in one call. Those that another caller is loading are waited
        for, and loaded here after all if that fails. When ``load`` raises, nothing is held.
        """
        held: dict[str, torch.Tensor] = {}
        try:
            while len(held) < len(wanted):
                # Nobody waits with keys claimed and not loaded, so that two callers cannot wait for each other.
                mine = self._reserve(wanted, held)
                try:
                    if mine:
                        self._fill(mine, load, held)
                finally:
                    self._forget(mine)
            return held
        except BaseException:
            self.release(held)
            raise

    def _reserve(self, wanted: Mapping[str, int], held: dict[str, torch.Tensor]) -> dict[str, int]:
        """Hold what is resident; what nobody is loading is the caller's to load. Waits if there is neither."""
        with self._changed:
            while True:
                before = len(held)
                for key in wanted:
                    found = self._resident.get(key)
                    if found is not None and key not in held:
                        found.holders += 1
                        held[key] = found.tensor
                mine = {k: n for k, n in wanted.items() if k not in held and k not in self._loading}
                self._loading.update(mine)
                if mine or len(held) > before:
                    return mine
                wait(self._changed)

    def _fill(self, mine: Mapping[str, int], load: Load, held: dict[str, torch.Tensor]) -> None:
        for key, tensor in load(mine):
            if key not in mine or key in held:
                raise KeyError(f"{key} was loaded without being asked for")
            with self._changed:
                held[key] = tensor
                self._resident[key] = _Resident(tensor, tensor.nbytes, 1)
                del self._loading[key]
        missing = mine.keys() - held.keys()
        if missing:
            raise KeyError(f"{len(missing)} tensors were not loaded, such as {min(missing)}")

    def _forget(self, mine: Mapping[str, int]) -> None:
        with self._changed:
            for key in mine:
                self._loading.pop(key, None)
            self._changed.notify_all()

    def release(self, keys: Iterable[str]) -> int:
        """Hold each of ``keys`` once less; return the bytes of the tensors that are not held any more."""
        freed = 0
        with self._changed:
            for key in keys:
                found = self._resident[key]
                found.holders -= 1
                if not found.holders:
                    del self._resident[key]
                    freed += found.nbytes
        return freed

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident tensors."""
        with self._changed:
            return sum(r.nbytes for r in self._resident.values())

    @property
    def loading_bytes(self) -> int:
        """Bytes of tensors that are being loaded and not resident yet."""
        with self._changed:
            return sum(self._loading.values())
