"""Tensors that autograd saved: their form, the bytes behind them, and whether they were changed since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from hapi.offload.activations.spill import Part
from hapi.process.direct_io import ALIGNMENT, aligned

_LINE = 64
"""Bytes of alignment that arithmetic may see; a copy of a part of a storage has the original's."""
_SHARE = 8
"""Storages more than so many times a tensor's own bytes are not stored whole (a batch out of a whole data set)."""


class Lies(Enum):
    """Where a storage's bytes are."""

    KEPT = "kept on the device"
    LEAVING = "on the device, on their way"
    AWAY = "away"
    COMING = "on their way back"
    BACK = "back on the device"


class Extent(NamedTuple):
    """Bytes of a storage that are stored: start and end."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.start


class Key(NamedTuple):
    """Identity of stored bytes: the storage, its version, and the part of it."""

    storage: int
    version: int
    extent: Extent
    part: int = 0
    """Number among parts of a storage that have versions of their own."""


class StoredBytes:
    """Bytes of a storage at one version, stored once for all tensors that are views of it."""

    def __init__(
        self,
        tensor: torch.Tensor,
        extent: Extent,
        number: int,
        layer: int,
        on_death: Callable[[Lies, list[Part], int, int], None],
    ) -> None:
        """Begin as bytes that are kept; the swapper moves them on.

        Args:
            tensor: any view of the storage.
            extent: bytes that are stored.
            number: place in the order of saving.
            layer: number of the layer that saves them.
            on_death: called with where they lie, their places on disk, their number of bytes and the layer when no
                saved tensor needs them any more.
        """
        storage = tensor.untyped_storage()
        self.owner = StorageWeakRef(storage)  # while it lives no other storage has this one's address
        self.extent, self.number, self.layer, self.device = extent, number, layer, tensor.device
        self.lies = Lies.KEPT
        self.data: torch.Tensor | None = bytes_of(tensor, extent)
        """uint8 [n]: the bytes on the device, or in pinned host memory while a CUDA tensor is on its way."""
        self.host: torch.Tensor | None = None
        """uint8 [n]: pinned copy of bytes that stay in host memory."""
        self.copied: torch.cuda.Event | None = None
        """After the last copy between that and the device."""
        self.parts: list[Part] = []
        self.under_way = 0
        self.waiting = 0
        """Saved tensors that backward has not asked for since the bytes came back."""
        self._on_death = on_death
        self._watched = _counter_of(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether these are a tensor's bytes too, which has the same version of the same storage.

        Parts that ``torch.unsafe_chunk`` makes, as recurrent layers do, have versions of their own: what has left may
        be from before a change of another part.
        """
        if self.lies is Lies.KEPT:
            return True
        before = tensor._version
        with _unsafe_preserve_version_counter(self._watched):
            torch.autograd.graph.increment_version(self._watched)
            return tensor._version != before

    def __del__(self) -> None:
        self._on_death(self.lies, self.parts, self.extent.nbytes, self.layer)


class SavedTensor:
    """Object that autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "_watched", "fetched", "form", "kept", "layer_name", "stored", "version")

    def __init__(self, tensor: torch.Tensor, layer_name: str, stored: StoredBytes | None) -> None:
        """Note the tensor's form and version; without ``stored`` the tensor itself is kept."""
        self.layer_name = layer_name
        self.stored = stored
        self.fetched = False
        self.version = tensor._version
        self.kept: torch.Tensor | None = None
        """The tensor itself, where its bytes stay on the device."""
        self.form = (
            (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()) if stored else None
        )
        if stored is None or stored.lies is Lies.KEPT:
            self.kept = self._watched = tensor.detach()
        else:
            self._watched = _counter_of(tensor)

    def check_unchanged(self) -> None:
        """Refuse a tensor that was changed in place since it was saved, as autograd does without hooks.

        Raises:
            RuntimeError: it was changed.
        """
        if self._watched._version != self.version:
            shape = list(self.form[2] if self.form else self._watched.size())
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {shape} that layer {self.layer_name!r} saved is at version "
                f"{self._watched._version}; expected version {self.version} instead. Copy it before it is changed "
                "(.clone()), or change it out of place"
            )

    def rebuilt(self, data: torch.Tensor, extent: Extent) -> torch.Tensor:
        """Return the tensor as it was, over the bytes ``data`` of the storage's ``extent``."""
        if self.form is None:
            raise RuntimeError(f"layer {self.layer_name!r}: the tensor was kept")
        dtype, offset, size, stride = self.form
        place = data.storage_offset() + offset * dtype.itemsize - extent.start
        tensor = torch.empty(0, dtype=dtype, device=data.device)
        return tensor.set_(data.untyped_storage(), place // dtype.itemsize, size, stride)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without bytes that has the version of another one, also after changes of that."""
    detached = tensor.detach()
    detached.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return detached


def extent_of(tensor: torch.Tensor) -> Extent:
    """Choose the bytes of the tensor's storage to store: all, or those that it spans in a much larger storage."""
    whole = tensor.untyped_storage().nbytes()
    last = sum(int(n - 1) * int(step) for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    end = start + (last + 1) * tensor.itemsize
    if whole <= _SHARE * (end - start):
        return Extent(0, whole)
    return Extent(start // _LINE * _LINE, end)


def bytes_of(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """View a part of the tensor's storage as uint8 [n]."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), extent.start, (extent.nbytes,), (1,))


def aligned_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """Make host memory that a disk can read into past the page cache: uint8 [n], n a multiple of the alignment."""
    size = aligned(nbytes)
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


class LiveNumbers:
    """Stored bytes that are alive, by their number in the order of saving."""

    def __init__(self) -> None:
        """Begin without any."""
        self._by_number: weakref.WeakValueDictionary[int, StoredBytes] = weakref.WeakValueDictionary()
        self._by_key: weakref.WeakValueDictionary[Key, StoredBytes] = weakref.WeakValueDictionary()
        self.next = 0

    def find(self, key: Key) -> StoredBytes | None:
        """Return what is stored of the same bytes, or of the whole storage that they are in."""
        return self._by_key.get(key)

    def add(self, key: Key, stored: StoredBytes) -> None:
        """Remember new bytes."""
        self._by_key[key] = self._by_number[stored.number] = stored
        self.next = stored.number + 1

    def at(self, number: int) -> StoredBytes | None:
        """Return the bytes that were stored as this number, if they are alive."""
        return self._by_number.get(number)

    def __len__(self) -> int:
        return len(self._by_number)
