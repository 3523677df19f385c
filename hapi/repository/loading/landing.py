"""Where loaded bytes land: in the tensors' own memory on the host, or in staging buffers on their way to a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from hapi.models.tensors import tensor_bytes
from hapi.repository.loading.plan import ContentSlice, ReadPlan
from hapi.repository.loading.pool import LoadingPool
from hapi.repository.loading.staging import StageBuffer


class Conversion(NamedTuple):
    """Change of a content's element type."""

    old: torch.dtype
    new: torch.dtype


NO_CONVERSIONS: Mapping[int, Conversion] = {}


class Edge:
    """One element whose bytes come with two ranges or more."""

    def __init__(self, size: int) -> None:
        """Begin without any of its ``size`` bytes."""
        self.memory = torch.empty(size, dtype=torch.uint8)
        self._missing = size

    def add(self, start: int, source: torch.Tensor) -> bool:
        """Add bytes from ``start`` on; return whether it is whole."""
        self.memory[start : start + source.numel()] = source
        self._missing -= source.numel()
        return not self._missing


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
    """Contents on a device, or of another type, each slice copied once from a staging buffer while the next range is
    read.
    """

    is_staged = True

    def __init__(
        self,
        plan: ReadPlan,
        pool: LoadingPool,
        device: torch.device,
        converted: Mapping[int, Conversion] = NO_CONVERSIONS,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._converted = converted
        self._edges: dict[tuple[int, int], Edge] = {}
        """Elements of converted contents that lie in two ranges, by their first byte."""
        self._expected = sum(map(self._final_bytes, range(len(plan.contents))))
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
        start, copies = 0, list[tuple[torch.Tensor, torch.Tensor]]()
        with self._lock:
            for part in slices:
                source = buffer.memory[start : start + part.nbytes]
                start += part.nbytes
                copies += self._copies_of(part, source)
            if self._is_cuda:
                buffer.copied = self._begin_copies(copies)
                self._copied.update({part.content: buffer.copied for part in slices})
                return
        for target, source in copies:  # other readers copy meanwhile
            target.copy_(source)

    def _begin_copies(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Begin copies (target, source) to a GPU; return the event after the last one."""
        with torch.cuda.stream(self._copies):
            for target, source in copies:
                # Bytes cross as they are: the device converts faster than the host.
                moved = source.to(self._device, non_blocking=True) if source.dtype != target.dtype else source
                target.copy_(moved, non_blocking=True)
            done: torch.cuda.Event = self._copies.record_event()
        return done

    def _copies_of(
        self, part: ContentSlice, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where the bytes of a slice go, and what is copied there; the lock is held."""
        content, conversion = self._content(part.content), self._converted.get(part.content)
        if conversion is None:
            yield content[part.start : part.start + part.nbytes], source
            return
        size, target = conversion.old.itemsize, content.view(conversion.new)
        first = min(-part.start % size, part.nbytes)
        whole = (part.nbytes - first) // size * size
        if whole:
            number = (part.start + first) // size
            found = source[first : first + whole]
            if found.data_ptr() % size:
                found = found.clone()
            yield target[number : number + whole // size], found.view(conversion.old)
        for begin, stop in ((0, first), (first + whole, part.nbytes)):
            if begin == stop:
                continue
            at = part.start + begin
            key = (part.content, at // size * size)
            edge = self._edges.setdefault(key, Edge(size))
            if edge.add(at % size, source[begin:stop]):
                del self._edges[key]
                yield target[key[1] // size : key[1] // size + 1], edge.memory.view(conversion.old)

    def _final_bytes(self, number: int) -> int:
        """Bytes of a content where it stays."""
        nbytes, conversion = self._plan.contents[number].nbytes, self._converted.get(number)
        return nbytes if conversion is None else nbytes // conversion.old.itemsize * conversion.new.itemsize

    def _content(self, number: int) -> torch.Tensor:
        content = self._contents.get(number)
        if content is None:
            nbytes = self._final_bytes(number)
            if self._device.type == "cpu":
                content = self._pool.take(nbytes, self._expected)
                self._expected -= nbytes
            elif self._is_cuda:
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


def landing(
    plan: ReadPlan,
    pool: LoadingPool,
    device: torch.device,
    converted: Mapping[int, Conversion] = NO_CONVERSIONS,
) -> Landing:
    """Return the destination of a load to ``device``; contents are ``converted`` on their way, by number."""
    if device.type == "cpu" and not converted:
        return HostLanding(plan, pool)
    return DeviceLanding(plan, pool, device, converted)
