"""Where loaded bytes land: in the tensors' own memory on the host, or in staging buffers on their way to a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from hapi.models.tensors import tensor_bytes
from hapi.repository.loading.plan import ContentSlice, ReadPlan
from hapi.repository.loading.pool import LoadingPool
from hapi.repository.loading.staging import StageBuffer


class Room(Protocol):
    """Memory for one range, held by a reader."""

    def outs(self, slices: Sequence[ContentSlice]) -> list[memoryview]:
        """Return the memory to read each slice into."""

    def land(self, slices: Sequence[ContentSlice]) -> None:
        """Send the slices, which were read, on to where they stay."""


class Landing(Protocol):
    """Destination of one load, used by several readers at once."""

    is_staged: bool
    """Whether a range's memory is used again as soon as its reader leaves the room."""

    def room(self) -> AbstractContextManager[Room]:
        """Hold memory for one range during the block, after waiting for it."""

    def content(self, number: int) -> torch.Tensor:
        """Return the bytes of a content that has landed whole, uint8."""

    def close(self) -> None:
        """Return when nothing writes to any content any more."""


class HostLanding:
    """Contents in host memory, read once into the place where they stay."""

    is_staged = False

    def __init__(self, plan: ReadPlan, pool: LoadingPool) -> None:
        self._plan = plan
        self._pool = pool
        self._expected = plan.needed
        self._lock = threading.Lock()
        self._contents: dict[int, tuple[torch.Tensor, memoryview]] = {}

    def room(self) -> AbstractContextManager[Room]:
        """Hold nothing: each content has memory of its own."""
        return nullcontext(self)

    def outs(self, slices: Sequence[ContentSlice]) -> list[memoryview]:
        """Return the slices' places in their tensors."""
        views = []
        for part in slices:
            with self._lock:
                held = self._contents.get(part.content)
                if held is None:
                    held = self._contents[part.content] = self._take(part.content)
            views.append(held[1][part.start : part.start + part.nbytes])
        return views

    def _take(self, number: int) -> tuple[torch.Tensor, memoryview]:
        nbytes = self._plan.contents[number].nbytes
        memory = self._pool.take(nbytes, self._expected)
        self._expected -= nbytes
        return memory, tensor_bytes(memory)

    def land(self, slices: Sequence[ContentSlice]) -> None:
        """Do nothing: the bytes are where they stay."""

    def content(self, number: int) -> torch.Tensor:
        """Return the bytes of a content, uint8, and forget it."""
        with self._lock:
            return self._contents.pop(number)[0]

    def close(self) -> None:
        """Do nothing: readers that still write hold the memory."""


class DeviceLanding:
    """Contents on a device, each slice copied once from a staging buffer while the next range is read."""

    is_staged = True

    def __init__(self, plan: ReadPlan, pool: LoadingPool, device: torch.device) -> None:
        self._plan = plan
        self._area = pool.staging(device)
        self._device = device
        self._lock = threading.Lock()
        self._contents: dict[int, torch.Tensor] = {}
        self._copied: dict[int, torch.cuda.Event] = {}
        """The last copy to each content."""
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._user = torch.cuda.current_stream(device)
            """Stream of the caller, whose memory the contents are: it is freed in that stream's order."""
            self._copies = torch.cuda.Stream(device)

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Hold a staging buffer."""
        with self._area.buffer() as buffer:
            yield _StagedRoom(self, buffer)

    def copy(self, slices: Sequence[ContentSlice], buffer: StageBuffer) -> None:
        """Copy slices, which lie one after another in ``buffer``, to the device."""
        start = 0
        with self._lock:
            for part in slices:
                target = self._content(part.content)[part.start : part.start + part.nbytes]
                source = buffer.memory[start : start + part.nbytes]
                start += part.nbytes
                if not self._is_cuda:
                    target.copy_(source)
                    continue
                with torch.cuda.stream(self._copies):
                    target.copy_(source, non_blocking=True)
            if self._is_cuda:
                buffer.copied = self._copies.record_event()
                self._copied.update({part.content: buffer.copied for part in slices})

    def _content(self, number: int) -> torch.Tensor:
        content = self._contents.get(number)
        if content is None:
            nbytes = self._plan.contents[number].nbytes
            if self._is_cuda:
                with torch.cuda.stream(self._user):
                    content = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                self._copies.wait_stream(self._user)  # work on this memory's last tensor may be under way
            else:
                content = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._contents[number] = content
        return content

    def content(self, number: int) -> torch.Tensor:
        """Return the bytes of a content, uint8, once they are copied, and forget it."""
        with self._lock:
            content, copied = self._contents.pop(number), self._copied.pop(number, None)
        if copied is not None:
            copied.synchronize()
        return content

    def close(self) -> None:
        """Wait for all copies."""
        if self._is_cuda:
            self._copies.synchronize()


class _StagedRoom:
    """A staging buffer and the landing whose range is in it."""

    def __init__(self, landing: DeviceLanding, buffer: StageBuffer) -> None:
        self._landing = landing
        self._buffer = buffer

    def outs(self, slices: Sequence[ContentSlice]) -> list[memoryview]:
        views, start = [], 0
        for part in slices:
            views.append(self._buffer.view[start : start + part.nbytes])
            start += part.nbytes
        return views

    def land(self, slices: Sequence[ContentSlice]) -> None:
        self._landing.copy(slices, self._buffer)


def landing(plan: ReadPlan, pool: LoadingPool, device: torch.device) -> Landing:
    """Return the destination of a load to ``device``."""
    return HostLanding(plan, pool) if device.type == "cpu" else DeviceLanding(plan, pool, device)
