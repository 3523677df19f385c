"""A pushed model in its store: the needed tensors, read by ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash

from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
)
from hapi.models.graph.digest import content_key
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.architectures import ImportRule
from hapi.paths import user_path
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import DTYPES, TensorEntry
from hapi.repository.loading.load import CHECKSUM, Loaded, load
from hapi.repository.manifest import ModelManifest
from hapi.repository.packs.lost import REMEDY
from hapi.repository.pushed import PushedModel
from hapi.store.base import ObjectStore
from hapi.wire.frames import TensorSpec


class StoredModel(PushedModel):
    """A pushed model and the store that holds it."""

    def __init__(self, store: ObjectStore, manifest: ModelManifest) -> None:
        super().__init__(manifest)
        self.store = store

    def load(self, model: LayeredModel, start: int, stop: int, device: str | torch.device = "cpu") -> int:
        """Load the weights of some layers, and no others.

        Args:
            model: from :meth:`layered`; its tensors are replaced.
            start: number of layers before the first one to load.
            stop: last layer to load.
            device: torch device of the loaded tensors.

        Returns:
            Bytes of the tensors that were loaded.
        """
        return self.load_from(lambda entries: self.tensors(entries, device), model, start, stop)

    def read(
        self, names: Iterable[str], verify: str = CHECKSUM, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors ``names`` in their order, each verified and in memory of its own.

        Args:
            names: of the tensors.
            verify: "checksum" or "identity" (:func:`hapi.repository.loading.load.load`).
            dtype: type of floating tensors; None: as they are stored.
        """
        entries = [self._entry(name) for name in names]
        for entry, tensor in self.tensors(entries, verify=verify, dtype=dtype):
            yield entry.name, tensor

    def tensors(
        self,
        entries: Sequence[TensorEntry],
        device: str | torch.device = "cpu",
        *,
        verify: str = CHECKSUM,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Loaded]:
        """Yield the tensors of ``entries`` in their order; what was packed anew meanwhile is read from there.

        Args:
            entries: of the manifest.
            device: torch device of the tensors.
            verify: "checksum" or "identity" (:func:`hapi.repository.loading.load.load`).
            dtype: type of floating tensors; None: as they are stored.
        """
        missing, moved = list(reversed(entries)), False
        while True:
            wanted, suspects = missing[::-1], list[TensorEntry]()
            try:
                for loaded in self._loaded(wanted, device, verify, dtype, suspects):
                    missing.pop()
                    yield loaded
                return
            except StoreUnavailableError:
                raise
            except (NotFoundError, StoreError) as error:
                if moved:
                    raise
                missing, moved = self._moved(error, wanted)[::-1], True
            except DataError:
                if not any(list(map(self._distrust, suspects))):
                    raise

    def _loaded(
        self,
        entries: Sequence[TensorEntry],
        device: str | torch.device,
        verify: str,
        dtype: torch.dtype | None,
        suspects: list[TensorEntry],
    ) -> Iterator[Loaded]:
        """The tensors of ``entries``; those that are damaged are added to ``suspects``."""

        def damaged(entry: TensorEntry) -> DataError:
            suspects.append(entry)
            return self.damaged(entry)

        return load(self.store, entries, device, verify=verify, damaged=damaged, dtype=dtype)

    def _distrust(self, entry: TensorEntry) -> bool:
        """Whether the damaged bytes came from elsewhere than the store, so that reading them once more may help."""
        return self.store.distrust(entry.pack, entry.start, entry.stop)

    def save(self, output: str | Path, *, allow_import: ImportRule = False) -> None:
        """Write the model as ``hapi pull`` does: every byte is checked, and what is there is whole.

        Args:
            output: a ``.safetensors`` file, which is a model file and a plain state dict; or a folder, which is filled
                as Hugging Face's libraries do.
            allow_import: whether the model's factory may be imported: yes, no, or which.

        Raises:
            ModelError: the network cannot be built here.
            DataError: a tensor is damaged in the store.
            HapiError: the files cannot be written.
        """
        from hapi.repository.pulling.files import write  # they read what is stored, so they import this
        from hapi.repository.pulling.selection import whole

        write(self, whole(self, allow_import), user_path(output, "output"))

    def key(self, name: str) -> str:
        """Key of stored tensor ``name``'s content."""
        entry = self._entry(name)
        form = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        return content_key(entry.digest, form)

    def tensor_spec(self, name: str) -> TensorSpec:
        """Return the form of one stored tensor; :class:`NotFoundError` for an unknown name."""
        entry = self._entry(name)
        return TensorSpec(name, entry.dtype, entry.shape)

    def read_tensor(self, name: str) -> memoryview:
        """Return the bytes of one stored tensor, verified."""
        ((_, tensor),) = self.tensors([self._entry(name)])
        return tensor_bytes(tensor)

    def read_part(self, name: str, start: int, out: memoryview) -> None:
        """Read the bytes of tensor ``name`` from ``start`` on into ``out``; the caller checks them
        (:meth:`checked`).
        """
        entry = self._entry(name)
        try:
            self.store.read_into(entry.pack, entry.start + start, out)
            return
        except StoreUnavailableError:
            raise
        except (NotFoundError, StoreError) as error:
            now = self._moved(error, [entry])[0]
        self.store.read_into(now.pack, now.start + start, out)

    def checked(self, name: str, piece_bytes: int, step: Callable[[], None]) -> int:
        """Verify one stored tensor with no more than a piece of it in memory.

        Args:
            name: the tensor.
            step: called before each piece; may raise.

        Returns:
            xxh3-64 of its bytes in one chain, as a second pass computes it.
        """
        entry = self._entry(name)
        buffer = memoryview(bytearray(min(piece_bytes, entry.nbytes)))
        while True:
            found, chain = TensorChecksum(), xxhash.xxh3_64()
            for start in range(0, entry.nbytes, piece_bytes):
                step()
                part = buffer[: min(piece_bytes, entry.nbytes - start)]
                self.read_part(name, start, part)
                found.update(part)
                chain.update(part)
            if found.hexdigest() == entry.checksum:
                return chain.intdigest()
            if not self._distrust(entry):
                raise self.damaged(entry)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise NotFoundError(f"model {self.name!r} has no tensor {name[:80]!r}")
        return entry

    def _moved(self, error: HapiError, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Where the tensors are now, after ``error`` of reading them: a collection may have packed them anew.

        :class:`ConflictError` when the version was removed, :class:`DataError` when the pack is damaged; else
        ``error``.
        """
        try:
            now = self._manifest_now()
        except NotFoundError:
            raise ConflictError(
                f"model {self.reference!r} was removed while it was read; push it again"
            ) from error
        if now.digest != self.digest:
            raise ConflictError(
                f"model {self.reference!r} was removed and pushed anew while it was read"
            ) from error
        found = [now.tensors[entry.name] for entry in entries]
        if [(e.pack, e.start) for e in found] != [(e.pack, e.start) for e in entries]:
            self.manifest = now
            return found
        for key in dict.fromkeys(entry.pack for entry in entries):
            size = self._size(key)
            lost = [entry for entry in entries if entry.pack == key and entry.stop > size]
            if lost:
                first, stop = min(lost, key=lambda entry: entry.start), max(entry.stop for entry in lost)
                raise DataError(
                    f"model {self.reference!r}: {self.store.url}/{key} has {size} bytes, {stop} or more are needed: "
                    f"it lost {len(lost)} tensors from {first.name!r} on; {REMEDY}"
                ) from error
        raise error

    def _size(self, key: str) -> int:
        try:
            return self.store.size(key)
        except NotFoundError:
            return 0

    def _manifest_now(self) -> ModelManifest:
        key = self.manifest.key
        return ModelManifest.from_bytes(
            self.store.get(key), self.manifest.structure, f"{self.store.url}/{key}"
        )
