"""Movement of saved bytes: out during the forward pass, back in the reverse order ahead of the backward pass."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hapi.offload.activations.counters import Counters, LayerRoom
from hapi.offload.activations.device_link import DeviceLink
from hapi.offload.activations.saved import (
    Key,
    Lies,
    LiveNumbers,
    SavedTensor,
    StoredBytes,
    aligned_buffer,
    extent_of,
)
from hapi.offload.activations.spill import Part, SpillFiles
from hapi.offload.failures import ActivationError

SMALL_BYTES = 4096
"""Tensors below this stay: moving one costs more than it frees."""


class Swapper:
    """Stores what layers save. Thread-safe: backward runs in the device's own thread on CUDA."""

    def __init__(self, files: SpillFiles | None, buffer_bytes: int) -> None:
        """Store on the drives of ``files``; at most ``buffer_bytes`` are on their way in each direction."""
        self.counters = Counters()
        self.exempt: Collection[int] = ()
        """Addresses of the storages of parameters, buffers and the model's input, which are never stored."""
        self.most_bytes: float = math.inf
        """Bytes that :attr:`Counters.live_bytes` stays within, as far as waiting and reading later can help."""
        self._files = files
        self.buffer_bytes = buffer_bytes
        self._lock = threading.Condition(threading.Lock())  # not reentrant: the collector may call in
        self._live = LiveNumbers()
        self._leaving = self._back = 0
        self._ahead = self._oldest = 0
        """Numbers of the next bytes to read ahead, and of the oldest that may be alive."""
        self._kept_before: deque[tuple[int, int]] = deque()
        """Numbers and bytes of kept ones between those that backward needs now and those to read ahead."""
        self._dead: deque[tuple[Lies, list[Part], int, int, LayerRoom]] = deque()
        self._used: list[tuple[StorageWeakRef, int, int]] = []
        """Storages on the device that a running operator, or the model, still uses: their bytes, their number."""
        self.on_death: Callable[[int], None] = lambda number: None
        """Called with the number of stored bytes that are not needed any more."""
        self._link: DeviceLink | None = None
        self._sending: deque[tuple[torch.cuda.Event, StorageWeakRef, int, int]] = deque()
        """Copies from a GPU that were begun: their end, the storage on the device, its bytes, their number."""
        self._error: OSError | None = None

    def save(
        self, tensor: torch.Tensor, layer: int, name: str, room: LayerRoom
    ) -> tuple[SavedTensor, Key | None]:
        """Take a tensor from autograd.

        Args:
            tensor: as the hook gets it.
            layer: number of the layer that saves it.
            name: that layer's name, for messages.
            room: that layer's.

        Returns:
            The object for autograd, and the bytes that are stored for it, if they were not stored before.

        Raises:
            ActivationError: a disk failed.
        """
        key = self.key_of(tensor)
        if key is None:
            return SavedTensor(tensor, name, None), None
        with self._lock:
            self._check()
            self._note_sent()
            self._bury()
            stored = self._live.find(key)
            while stored is not None and not stored.is_of(tensor):
                key = key._replace(part=key.part + 1)
                stored = self._live.find(key)
            if stored is not None:
                self.counters.shared_tensors += 1
                if stored.lies is not Lies.KEPT:
                    stored.waiting += 1
                return SavedTensor(tensor, name, stored), None
            number = self._live.next
            stored = StoredBytes(
                tensor, key.extent, number, layer, lambda *facts: self._died(room, number, *facts)
            )
            if not len(self._live):
                self._oldest = stored.number
            self._live.add(key, stored)
            self._ahead = stored.number
            self._kept_before.clear()
            self.counters.stored_tensors += 1
            self._place(stored, room)
            return SavedTensor(tensor, name, stored), key

    def key_of(self, tensor: torch.Tensor) -> Key | None:
        """Return what identifies the tensor's bytes; None for a tensor that is never stored."""
        if self._stays(tensor):
            return None
        return Key(tensor.untyped_storage()._cdata, tensor._version, extent_of(tensor))

    def saver_of(self, key: Key) -> int | None:
        """Return the number of the layer that stored these bytes; None if nothing did."""
        with self._lock:
            stored = self._live.find(key)
            return None if stored is None else stored.layer

    def fetch(self, saved: SavedTensor) -> torch.Tensor:
        """Give a tensor back to autograd, and begin to read those before it.

        Raises:
            RuntimeError: it was changed in place since it was saved.
            ActivationError: a disk failed.
        """
        saved.check_unchanged()
        self.counters.asked += 1
        stored = saved.stored
        with self._lock:
            self._note_sent()
            self._bury()
            if stored is not None:
                self._read_ahead(stored.number)
            if saved.kept is not None:
                return saved.kept
            if stored is None:
                raise RuntimeError("a tensor was neither kept nor stored")
            data = self._on_device(stored)
            if not saved.fetched:
                saved.fetched = True
                stored.waiting -= 1
            if stored.waiting <= 0 and stored.lies is Lies.BACK:
                self._back -= stored.extent.nbytes
                self._used.append(
                    (StorageWeakRef(data.untyped_storage()), stored.extent.nbytes, stored.number)
                )
                stored.data, stored.lies = None, Lies.AWAY
        return saved.rebuilt(data, stored.extent)

    def with_bytes(self, measure: Callable[[int], None]) -> None:
        """Call ``measure`` with the saved bytes on the device, while no drive changes them."""
        with self._lock:
            self._bury()
            measure(self.counters.live_bytes)

    def let_leave(self, until: int) -> None:
        """Wait until at most ``until`` bytes are on the device, or none are on their way out: the loss comes now."""
        with self._lock:
            self._wait_to_leave(lambda: self.counters.live_bytes <= until)

    def settle(self) -> int:
        """Take note of what died; return the number of stored tensors that are alive."""
        with self._lock:
            self._bury()
            return len(self._live)

    def close(self) -> None:
        """Wait for what is under way. Tensors that are away cannot come back after the files are closed."""
        with self._lock:
            while self._leaving and self._error is None:
                if self._sending:
                    self._finish_oldest()
                else:
                    self._lock.wait(1.0)
            self._files = None

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a parameter, small, or of a kind whose bytes are more than a strided storage."""
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return True
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_inference()
            or tensor.device.type not in ("cpu", "cuda")
        ):
            return True
        if tensor.nbytes < SMALL_BYTES or tensor.is_conj() or tensor.is_neg():
            return True
        return tensor.untyped_storage()._cdata in self.exempt

    def _place(self, stored: StoredBytes, room: LayerRoom) -> None:
        """Choose the tier of new bytes and send them there."""
        nbytes = stored.extent.nbytes
        tiers_below = self._files is not None or room.host_limit > 0
        if room.kept + nbytes <= room.kept_limit or not tiers_below:
            self._wait_to_leave(lambda: self.counters.live_bytes + nbytes <= self.most_bytes)
            room.kept += nbytes
            self._count(nbytes)
            stored.data = None  # the saved tensors hold the storage themselves
        elif stored.device.type == "cuda" and (room.host + nbytes <= room.host_limit or self._files is None):
            room.host += nbytes
            self._send_to_host(stored)
        elif self._files is not None:
            self._send(stored, self._files)

    def _send_to_host(self, stored: StoredBytes) -> None:
        """Begin to copy bytes from a GPU to pinned memory, where they stay."""
        nbytes = stored.extent.nbytes
        self._wait_for_room_to_leave(nbytes)
        if stored.data is None:
            raise RuntimeError("bytes were sent twice")
        stored.host, stored.copied = self._link_of(stored.device).send(stored.data)
        stored.data, stored.lies, stored.waiting = None, Lies.AWAY, 1
        self._sending.append((stored.copied, stored.owner, nbytes, stored.number))
        self._leaving += nbytes
        self._count(nbytes)
        self.counters.host_bytes += nbytes

    def _link_of(self, device: torch.device) -> DeviceLink:
        if self._link is None:
            self._link = DeviceLink(device)
        return self._link

    def _note_sent(self) -> None:
        """Take note of the copies from a GPU that have ended."""
        while self._sending and self._sending[0][0].query():
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest copy from a GPU."""
        ended, owner, nbytes, number = self._sending.popleft()
        ended.synchronize()
        self._leaving -= nbytes
        self._used.append((owner, nbytes, number))

    def _send(self, stored: StoredBytes, files: SpillFiles) -> None:
        nbytes = stored.extent.nbytes
        self._wait_for_room_to_leave(nbytes)
        if stored.device.type == "cuda" and stored.data is not None:
            stored.data, ended = self._link_of(stored.device).send(stored.data)
            ended.synchronize()
        self._leaving += nbytes
        self._count(nbytes)
        self.counters.written_bytes += nbytes
        stored.parts = files.take(nbytes)
        stored.lies, stored.waiting, stored.under_way = Lies.LEAVING, 1, len(stored.parts)
        if stored.data is None:
            raise RuntimeError("bytes were sent twice")
        array = stored.data.numpy()
        for drive, at, start, end in stored.parts:
            drive.write(at, array[start:end], lambda error: self._sent(stored, error))

    def _wait_for_room_to_leave(self, nbytes: int) -> None:
        self._wait_to_leave(
            lambda: (
                self._leaving + nbytes <= self.buffer_bytes
                and self.counters.live_bytes + nbytes <= self.most_bytes
            )
        )

    def _wait_to_leave(self, has_room: Callable[[], bool]) -> None:
        """Wait until there is room, or nothing is on its way that would make some."""
        started = time.monotonic()
        while self._leaving and not has_room():
            if self._sending:
                self._finish_oldest()
            else:
                self._lock.wait()
            self._check()
            self._bury()
        self.counters.waited_seconds += time.monotonic() - started

    def _sent(self, stored: StoredBytes, error: OSError | None) -> None:
        """Free the memory of bytes that are on the drives; called in a drive's thread."""
        with self._lock:
            self._error = self._error or error
            stored.under_way -= 1
            if not stored.under_way:
                self._leaving -= stored.extent.nbytes
                self._used.append((stored.owner, stored.extent.nbytes, stored.number))
                if self._error is None:
                    stored.data, stored.lies = None, Lies.AWAY
            self._lock.notify_all()

    def _on_device(self, stored: StoredBytes) -> torch.Tensor:
        """Bring bytes back if they are away, and wait for them."""
        if stored.lies is Lies.AWAY:
            self._begin_read(stored)
        started = time.monotonic()
        while stored.lies is Lies.COMING:
            self._lock.wait()
            self._check()
        self.counters.waited_seconds += time.monotonic() - started
        if stored.data is None:
            raise ActivationError(
                "activations were asked for after their files were closed; close after backward"
            )
        if stored.host is not None and stored.copied is not None:
            self._link_of(stored.device).wait(stored.copied)
        elif stored.device.type == "cuda":
            return stored.data[: stored.extent.nbytes].to(stored.device, non_blocking=True)
        return stored.data

    def _begin_read(self, stored: StoredBytes) -> None:
        nbytes = stored.extent.nbytes
        if stored.host is not None and stored.copied is not None:
            stored.data, stored.copied = self._link_of(stored.device).bring(stored.host, stored.copied)
            stored.lies = Lies.BACK
            self._back += nbytes
            self._count(nbytes)
            return
        if self._files is None:
            return
        buffer = aligned_buffer(nbytes, stored.device.type == "cuda")
        stored.data, stored.lies, stored.under_way = buffer, Lies.COMING, len(stored.parts)
        self._back += nbytes
        self._count(nbytes)
        self.counters.read_bytes += nbytes
        array = buffer.numpy()
        for drive, at, start, end in stored.parts:
            until = len(array) if end == nbytes else end
            drive.read(at, array[start:until], lambda error: self._came(stored, error))

    def _came(self, stored: StoredBytes, error: OSError | None) -> None:
        with self._lock:
            self._error = self._error or error
            stored.under_way -= 1
            if not stored.under_way and self._error is None:
                stored.lies = Lies.BACK
            self._lock.notify_all()

    def _read_ahead(self, number: int) -> None:
        """Begin to read what was saved before, newest first, while there is room in the buffers.

        What is needed only after more kept bytes than the buffers hold stays away: it would take memory early.
        """
        self._ahead = min(self._ahead, number - 1)
        while self._kept_before and self._kept_before[0][0] >= number:
            self._kept_before.popleft()
        between = sum(nbytes for _, nbytes in self._kept_before)
        while self._ahead >= self._oldest and between <= self.buffer_bytes:
            stored = self._live.at(self._ahead)
            if stored is not None and stored.lies is Lies.LEAVING:
                return
            if stored is not None and stored.lies is Lies.AWAY and stored.waiting:
                if self._back + self._leaving + stored.extent.nbytes > self.buffer_bytes:
                    return
                if self.counters.live_bytes + stored.extent.nbytes > self.most_bytes:
                    return
                self._begin_read(stored)
            if stored is not None and stored.lies is Lies.KEPT:
                self._kept_before.append((self._ahead, stored.extent.nbytes))
                between += stored.extent.nbytes
            self._ahead -= 1

    def _died(
        self, room: LayerRoom, number: int, lies: Lies, parts: list[Part], nbytes: int, layer: int
    ) -> None:
        """Note that bytes are not needed any more; called by the garbage collector, at any moment."""
        self._dead.append((lies, parts, nbytes, number, room))
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        dead: set[int] = set()
        while self._dead:
            lies, parts, nbytes, number, room = self._dead.popleft()
            dead.add(number)
            self.on_death(number)
            if lies is Lies.KEPT:
                room.kept -= nbytes
                self._count(-nbytes)
            elif not parts:
                room.host -= nbytes
            if lies is Lies.BACK:
                self._back -= nbytes
                self._count(-nbytes)
            if parts and self._files is not None:
                self._files.give(parts)
        free = [used for used in self._used if used[2] in dead or used[0].expired()]
        if free:
            self._count(-sum(nbytes for _, nbytes, _ in free))
            self._used = [used for used in self._used if used not in free]

    def _count(self, nbytes: int) -> None:
        self.counters.live_bytes += nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.counters.live_bytes)

    def _check(self) -> None:
        if self._error is not None:
            where = self._error.filename or "its folder"
            raise ActivationError(
                f"swapping activations to {where} failed: {self._error.strerror}; free some of its room, or name "
                "another folder"
            )
