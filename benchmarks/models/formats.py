"""Files of other ways, each used as its documentation says, with every byte put into tensors that are there already.

A package is imported when its format is used: most are not installed everywhere.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.models.content import Tensors

Source = Path | io.BytesIO
"""A file, or what was downloaded of one."""


class Format(ABC):
    """One way of keeping tensors in a file."""

    suffix: str

    def save(self, tensors: Tensors, path: Path) -> None:
        """Write ``tensors`` to ``path``, through to the disk."""
        self.write(tensors, path)
        for place in (path, path.parent):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @abstractmethod
    def write(self, tensors: Tensors, path: Path) -> None:
        """Write ``tensors`` to ``path``."""

    def encode(self, tensors: Tensors) -> memoryview:
        """Return the content of a file, for an object store."""
        raise NotImplementedError

    @abstractmethod
    def load(self, source: Source, into: Tensors) -> None:
        """Fill the tensors ``into``, some or all of those in ``source``."""


class TorchFile(Format):
    """``torch.save``; there is no loading of a part without ``mmap``."""

    suffix = ".pth"

    def __init__(self, mmap: bool = False) -> None:
        self._mmap = mmap

    def write(self, tensors: Tensors, path: Path) -> None:
        """Write a state dictionary."""
        torch.save(dict(tensors), path)

    def encode(self, tensors: Tensors) -> memoryview:
        """Return the file."""
        stream = io.BytesIO()
        torch.save(dict(tensors), stream)
        return stream.getbuffer()

    def load(self, source: Source, into: Tensors) -> None:
        """Load the whole file and copy what was asked for."""
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=self._mmap)
        for name, tensor in into.items():
            tensor.copy_(found[name])


class SafeTensors(Format):
    """The safetensors package, which maps the file."""

    suffix = ".safetensors"

    def write(self, tensors: Tensors, path: Path) -> None:
        """Write the file."""
        from safetensors.torch import save_file

        save_file(dict(tensors), path)

    def encode(self, tensors: Tensors) -> memoryview:
        """Return the file."""
        from safetensors.torch import save

        return memoryview(save(dict(tensors)))

    def load(self, source: Source, into: Tensors) -> None:
        """Copy the tensors from the mapped file, or from the bytes."""
        import safetensors
        import safetensors.torch

        if isinstance(source, io.BytesIO):
            found = safetensors.torch.load(source.getvalue())
            for name, tensor in into.items():
                tensor.copy_(found[name])
            return
        with safetensors.safe_open(source, framework="pt", device="cpu") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))


class Pread(SafeTensors):
    """safetensors 0.9 with its reader by ``pread``."""

    def load(self, source: Source, into: Tensors) -> None:
        """Read each tensor and copy it."""
        import safetensors

        with safetensors.safe_open(source, framework="pt", device="cpu", backend="pread") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))


class Hdf5(Format):
    """A data set for each tensor."""

    suffix = ".h5"

    def write(self, tensors: Tensors, path: Path) -> None:
        """Write the file."""
        import h5py

        with h5py.File(path, "w") as file:
            for name, tensor in tensors.items():
                file.create_dataset(name, data=tensor.numpy())

    def load(self, source: Source, into: Tensors) -> None:
        """Read each tensor where it belongs."""
        import h5py

        with h5py.File(source, "r") as file:
            for name, tensor in into.items():
                file[name].read_direct(tensor.numpy())


class RunAi(SafeTensors):
    """The Run:ai streamer, which yields all tensors of a file."""

    def load(self, source: Source, into: Tensors) -> None:
        """Read the whole file and copy what was asked for."""
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(source))
            for name, found in streamer.get_tensors():
                if name in into:
                    into[name].copy_(found)


class FastSafeTensors(SafeTensors):
    """The fastsafetensors package without GPUDirect."""

    def load(self, source: Source, into: Tensors) -> None:
        """Read what was asked for into memory of its own, and copy from there."""
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        try:
            loader.set_tensor_filter(into.__contains__)
            loader.add_filenames({0: [str(source)]})
            files = loader.copy_files_to_device()
            try:
                for name, tensor in into.items():
                    tensor.copy_(files.get_tensor(name))
            finally:
                files.close()
        finally:
            loader.close()


_FORMATS: dict[str, Callable[[], Format]] = {
    "torch": TorchFile,
    "torch-mmap": lambda: TorchFile(mmap=True),
    "safetensors": SafeTensors,
    "safetensors-pread": Pread,
    "h5py": Hdf5,
    "fastsafetensors": FastSafeTensors,
    "runai": RunAi,
}


def format_of(way: str) -> Format:
    """Return the format of a way that is not Hapi's."""
    return _FORMATS[way]()
