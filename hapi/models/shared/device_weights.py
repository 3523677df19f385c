"""Frozen weights on a GPU by key of content, held there once by all processes of a user (DStore, section IV)."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Protocol

import torch

from hapi.errors import DataError
from hapi.models.shared.folder import Division, OpenPack, WeightsFolder
from hapi.models.shared.holders import Holders
from hapi.models.shared.pack import PackWriter, Ranges, TensorRange
from hapi.models.shared.place import weights_folder
from hapi.models.shared.weights import PackedWeights

DEVICE_PACK_BYTES = 256 << 20
"""Size from which on tensors go into another pack: each holds a file open in each process that uses it."""


class Block(Protocol):
    """Memory of a device that lives as long as any process has it mapped, or its file open."""

    lock: mmap.mmap | None
    """Lock on the pack in the folder; released with the block."""

    def file(self) -> int:
        """Return a new open file of the memory, by which another process maps it."""

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] over its bytes from ``start`` on; it keeps the block."""

    def written(self) -> None:
        """Wait until all that was copied into it is there."""


class BlockMemory(Protocol):
    """Memory of a device that processes share."""

    name: str
    """Unlike that of any other device of the machine, in letters, digits and "-"."""
    total_bytes: int
    """All memory of the device."""

    def make(self, nbytes: int) -> Block:
        """Take memory; OSError without it."""

    def open(self, file: int, nbytes: int) -> Block:
        """Map memory that another process has taken; ``file`` is the block's then, or closed with an OSError."""


class DeviceWeights(PackedWeights[Block]):
    """Frozen weights in the memory of a device: one copy for all processes.

    The folder holds the packs' headers and their locks alone; the bytes are in blocks, which a process gets from one
    that has them (:mod:`hapi.models.shared.holders`). With its last user a pack is gone. A write into a tensor in
    place, which nobody intends, would be seen by all.
    """

    def __init__(self, folder: Path, memory: BlockMemory) -> None:
        """Share the weights on the device of ``memory`` through ``folder``, the user's own."""
        self._memory = memory
        self._holders = Holders(folder)
        super().__init__(
            WeightsFolder(
                folder,
                memory.total_bytes,
                keeps_idle=False,
                pack_bytes=DEVICE_PACK_BYTES,
                make_writer=lambda file, head, ranges: _BlockWriter(file, head, ranges, memory),
            )
        )

    def _opened(self, division: Division) -> dict[str, tuple[Block, TensorRange]]:
        blocks: dict[str, Block | None] = {}
        found = {}
        for key, (pack, place) in division.found.items():
            if pack.token not in blocks:
                file = self._holders.get(pack.token)
                if file is None:  # its last user ended just now
                    self._folder.forget(pack)
                    blocks[pack.token] = None
                else:
                    block = self._memory.open(file, len(pack.mapping))
                    self._hold(pack.token, block, pack.mapping)
                    blocks[pack.token] = block
            known = blocks[pack.token]
            if known is not None:
                found[key] = known, place
        return found

    def _seal(self, pack: OpenPack) -> Block:
        writer = pack.writer
        if not isinstance(writer, _BlockWriter):
            raise TypeError("a pack of another folder")
        block = writer.block
        self._holders.offer(pack.token, block.file())  # before others see the pack
        block.lock = pack.seal()
        weakref.finalize(block, self._holders.withdraw, pack.token)
        return block

    def _hold(self, token: str, block: Block, lock: mmap.mmap) -> None:
        block.lock = lock
        self._holders.offer(token, block.file())
        weakref.finalize(block, self._holders.withdraw, token)

    def _tensor(self, memory: Block, place: TensorRange, form: torch.Tensor) -> torch.Tensor:
        return memory.tensor(place.start, place.nbytes).view(form.dtype).reshape(form.shape)


class _BlockWriter(PackWriter):
    """Writes a pack into a block of a device; its file has the header alone."""

    def __init__(self, descriptor: int, head: bytes, ranges: Ranges, memory: BlockMemory) -> None:
        super().__init__(descriptor, head, ranges)
        self._memory, self._missing = memory, set(ranges)
        self._block: Block | None = None

    @property
    def block(self) -> Block:
        """The memory; taken by :meth:`allocate`."""
        if self._block is None:
            raise DataError("shared weights: a pack on a device has no memory yet")
        return self._block

    def allocate(self) -> None:
        """Take the memory of the device; OSError when there is none."""
        self._block = self._memory.make(self.size)

    def write(self, key: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor; return whether it was the last one that was missing."""
        place = self.ranges[key]
        if tensor.nbytes != place.nbytes:
            raise DataError(
                f"shared weights: tensor {key[:80]} has {tensor.nbytes} bytes, not {place.nbytes}"
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.block.tensor(place.start, place.nbytes).copy_(flat)
        self._missing.discard(key)
        return not self._missing

    def check(self) -> None:
        """Raise :class:`DataError` unless all was written; wait for the copies."""
        if self._missing:
            raise DataError(f"shared weights: tensor {min(self._missing)[:80]} was not written")
        self.block.written()


def device_weights(device: torch.device) -> DeviceWeights | None:
    """Return the weights that this process shares on a GPU; None where it shares none.

    That is so on a CPU, where ``HAPI_SHARED_WEIGHTS`` says ``off``, and where the package ``cuda-bindings`` (torch
    brings it) or the device cannot. Raises as :func:`weights_folder`.
    """
    folder = weights_folder()
    if folder is None or device.type != "cuda":
        return None
    from hapi.models.shared.cuda_blocks import cuda_memory

    memory = cuda_memory(device)
    if memory is None:
        return None
    return DeviceWeights(folder.path.with_name(f"{folder.path.name}-{memory.name}"), memory)
