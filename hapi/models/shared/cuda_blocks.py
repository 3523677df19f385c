"""Memory of a CUDA device that several processes map, by the driver's virtual memory management.

Unlike an IPC handle of ``cudaMalloc``, a block is counted by the driver: it is freed when the last process has unmapped
it and closed its file, whichever of them made it, and however they end.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import weakref
from typing import Any

import torch

log = logging.getLogger("hapi.weights")


class CudaMemory:
    """A :class:`~hapi.models.shared.device_weights.BlockMemory` of one GPU."""

    def __init__(self, device: torch.device, driver: Any) -> None:
        """Use ``device``; ``driver`` is the module of that name of ``cuda.bindings``."""
        known = torch.cuda.get_device_properties(device)
        self.name = f"gpu-{known.uuid}"
        self.total_bytes = known.total_memory
        self._device, self._driver = device, driver
        torch.empty(1, device=device)  # the device's context is this thread's
        self._form = driver.CUmemAllocationProp()
        self._form.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._form.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._form.location.id = device.index or 0
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._form.requestedHandleTypes = self._kind
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._unit = int(self.call("cuMemGetAllocationGranularity", self._form, smallest))

    def make(self, nbytes: int) -> CudaBlock:
        """See :meth:`BlockMemory.make`; what torch keeps unused is given back first where it has to be."""
        size = self._whole(nbytes)
        try:
            handle = self.call("cuMemCreate", size, self._form, 0)
        except OSError:
            torch.cuda.empty_cache()
            handle = self.call("cuMemCreate", size, self._form, 0)
        try:
            file = int(self.call("cuMemExportToShareableHandle", handle, self._kind, 0))
        except OSError:
            self.call("cuMemRelease", handle)
            raise
        return CudaBlock(self, self._device, handle, size, file)

    def open(self, file: int, nbytes: int) -> CudaBlock:
        """See :meth:`BlockMemory.open`."""
        try:
            handle = self.call("cuMemImportFromShareableHandle", file, self._kind)
        except OSError:
            os.close(file)
            raise
        return CudaBlock(self, self._device, handle, self._whole(nbytes), file)

    def map(self, handle: Any, size: int) -> int:
        """Return the address of a new mapping."""
        address = self.call("cuMemAddressReserve", size, 0, 0, 0)
        try:
            self.call("cuMemMap", address, size, 0, handle, 0)
            try:
                access = self._driver.CUmemAccessDesc()
                access.location = self._form.location
                access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                self.call("cuMemSetAccess", address, size, [access], 1)
            except OSError:
                self.call("cuMemUnmap", address, size)
                raise
        except OSError:
            self.call("cuMemAddressFree", address, size)
            raise
        return int(address)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; return its result, if it has one. Raises OSError."""
        with torch.cuda.device(self._device):
            code, *results = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise OSError(errno.ENOMEM, f"{name} of the CUDA driver says {code.name}")
        return results[0] if results else None

    def _whole(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit


class CudaBlock:
    """A :class:`~hapi.models.shared.device_weights.Block` of one GPU."""

    def __init__(self, memory: CudaMemory, device: torch.device, handle: Any, size: int, file: int) -> None:
        """Map ``size`` bytes of the driver's ``handle``; it and ``file`` are this object's from now on. Raises OSError.

        The file is kept, because the driver makes none of memory that another process has made.
        """
        self.lock: mmap.mmap | None = None
        self._memory, self._device, self._file = memory, device, file
        try:
            self._address = memory.map(handle, size)
        except OSError:
            os.close(file)
            memory.call("cuMemRelease", handle)
            raise
        weakref.finalize(self, _unmap, memory, device, handle, self._address, size, file).atexit = False

    def file(self) -> int:
        """See :meth:`Block.file`."""
        return os.dup(self._file)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """See :meth:`Block.tensor`."""
        return torch.as_tensor(_Bytes(self, self._address + start, nbytes), device=self._device)

    def written(self) -> None:
        """See :meth:`Block.written`."""
        torch.cuda.current_stream(self._device).synchronize()


class _Bytes:
    """Bytes of a block, in the form in which libraries of GPUs hand memory to each other; a tensor keeps it."""

    def __init__(self, block: CudaBlock, address: int, nbytes: int) -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def _unmap(memory: CudaMemory, device: torch.device, handle: Any, address: int, size: int, file: int) -> None:
    """Give a block up, once what was begun on the device is done with it."""
    os.close(file)
    try:
        torch.cuda.synchronize(device)
        memory.call("cuMemUnmap", address, size)
        memory.call("cuMemAddressFree", address, size)
        memory.call("cuMemRelease", handle)
    except (OSError, RuntimeError) as error:  # the device is lost, and with it the memory
        log.warning("shared weights on %s could not be given back: %s", device, error)


def cuda_memory(device: torch.device) -> CudaMemory | None:
    """Return the memory of a GPU that processes share; None where the machine cannot share it."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        return CudaMemory(device, driver)
    except (OSError, RuntimeError) as error:  # the latter where the driver's library is not found
        log.warning("frozen weights on %s are not shared with other processes: %s", device, error)
        return None
