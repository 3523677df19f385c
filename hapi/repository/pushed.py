"""A pushed model as its manifest describes it: layers without weights, and tensors from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from hapi.errors import (
    ConflictError,
    DataError,
)
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.numbering import Layer
from hapi.models.zoo.architectures import ImportRule
from hapi.models.zoo.build import ModelSpec, architecture_of, build, layers_of, skeleton
from hapi.models.zoo.head import find_head, resize_head, retarget
from hapi.repository.entries import TensorEntry
from hapi.repository.loading.load import Loaded
from hapi.repository.manifest import ModelManifest
from hapi.repository.packs.lost import REMEDY

Fetch = Callable[[Sequence[TensorEntry]], Iterable[Loaded]]
"""Reads tensors: yields each entry with its tensor, verified."""


class PushedModel:
    """A pushed model as its manifest describes it, wherever the weights are read from."""

    def __init__(self, manifest: ModelManifest) -> None:
        self.manifest = manifest

    @property
    def name(self) -> str:
        """Name of the model in its store."""
        return self.manifest.name

    @property
    def reference(self) -> str:
        """Name with the version, which stays when another version is pushed."""
        return self.manifest.reference

    @property
    def digest(self) -> str:
        """Digest of the whole model."""
        return self.manifest.digest

    @property
    def spec(self) -> ModelSpec:
        """Build from which the model was pushed; :class:`ConflictError` for a model of tensors only."""
        return self.manifest.build_spec()

    def layered(
        self,
        *,
        num_classes: int | None = None,
        head_seed: int = 0,
        input_shape: tuple[int, ...] | None = None,
        allow_import: ImportRule = False,
    ) -> LayeredModel:
        """Return the model's layers without weights (:meth:`load` brings them); digests are known all the
        same.

        Args:
            num_classes: outputs of a new head, freshly seeded and never loaded; None keeps the pushed one.
            head_seed: seed of the new head.
            input_shape: shape of one sample (C, H, W), if other than pushed.
            allow_import: whether the model's factory may be imported.

        Raises:
            ModelError: the code that is installed here makes another model than was pushed.
        """
        spec = self.spec if input_shape is None else replace(self.spec, input_shape=tuple(input_shape))
        model = self._skeleton(spec, allow_import)
        if self.manifest.classes is not None and model.output_shapes()[-1] != (self.manifest.classes,):
            head = find_head(model)
            self._check_head(model.tensors.inside(head), self.manifest.classes)
            resize_head(model.module, head, self.manifest.classes, 0)
            model = layers_of(architecture_of(spec, allow_import), spec, model.module)
        model = retarget(
            model, num_classes, head_seed, lambda m: layers_of(architecture_of(spec, allow_import), spec, m)
        )
        return self._without_weights(model)

    def prefix_structure(self, input_shape: tuple[int, ...], allow_import: ImportRule) -> LayeredModel:
        """Return the layers as :meth:`layered` does, with the architecture's own head, for use below the head
        only.
        """
        return self._without_weights(
            self._skeleton(replace(self.spec, input_shape=input_shape), allow_import)
        )

    def _skeleton(self, spec: ModelSpec, allow_import: ImportRule) -> LayeredModel:
        """:class:`ConflictError` unless its layers are those that were pushed."""
        model = skeleton(spec, allow_import)
        pushed = [layer.name for layer in self.manifest.layers]
        if [layer.name for layer in model.layers] != pushed:
            raise ConflictError(
                f"model {self.name!r} was pushed with {len(pushed)} layers, but {self.spec.architecture} has"
                f" {len(model)} (or others) here; push it again with the installed version of its library"
            )
        return model

    def _check_head(self, names: Sequence[str], classes: int) -> None:
        """:class:`ConflictError` unless tensors ``names`` were pushed for ``classes``."""
        for name in names:
            rows = self._pushed(name).shape[:1]
            if rows != (classes,):
                raise ConflictError(
                    f"model {self.name!r} says that it has {classes} classes, but tensor {name!r} of its head has "
                    f"{rows[0] if rows else 1}; push it again"
                )

    def _pushed(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise ConflictError(f"model {self.name!r} was pushed without tensor {name!r}; push it again")
        return entry

    def _without_weights(self, model: LayeredModel) -> LayeredModel:
        # Also what the constructor did fill (BatchNorm's statistics) waits for its stored content.
        model.tensors.release(model.fresh)
        model.expected_digests = {
            n: e.digest for n, e in self.manifest.tensors.items() if n not in model.fresh
        }
        if model.input_shape == self.spec.input_shape:
            self._check_digests(model)
        return model

    def _check_digests(self, model: LayeredModel) -> None:
        """:class:`ConflictError` when layers below the head are others than those that were pushed."""
        stop = next((la.index - 1 for la in model.layers if not self._holds(model, la)), len(model))
        digests = model.prefix_digests(stop)
        for layer, (now, pushed) in enumerate(zip(digests, self.manifest.digests, strict=False)):
            if now != pushed:
                name = model.layers[layer - 1].name if layer else "input"
                raise ConflictError(
                    f"model {self.name!r}: {self.spec.architecture} no longer makes layer {layer} ({name}) as it was"
                    " pushed: its code or a library has changed, or one of its plain tensors is random (register it"
                    " as a buffer); push it again"
                )

    def _holds(self, model: LayeredModel, layer: Layer) -> bool:
        """True when the store has all tensors of ``layer`` in the form that they have in ``model``."""
        for name in layer.tensors:
            entry, tensor = self.manifest.tensors.get(name), model.tensors.get(name)
            if name in model.fresh or entry is None or entry.shape != tuple(tensor.shape):
                return False
        return True

    def entries(self, model: LayeredModel, start: int, stop: int) -> list[TensorEntry]:
        """Return the stored tensors of layers ``start + 1`` to ``stop`` that are not loaded yet.

        Args:
            model: from :meth:`layered`.
            start: number of layers before the first one.
            stop: the last layer.
        """
        wanted = [n for n in model.tensor_names(start, stop) if n not in model.fresh]
        entries = {name: self._pushed(name) for name in wanted}
        return [entry for name, entry in entries.items() if model.tensors.get(name).is_meta]

    def load_from(self, fetch: Fetch, model: LayeredModel, start: int, stop: int) -> int:
        """Load the weights of layers ``start + 1`` to ``stop`` with ``fetch``: all of them, or none after an error.

        Args:
            fetch: reads the tensors.
            model: from :meth:`layered`; its tensors are replaced.
            start: number of layers before the first one to load.
            stop: last layer to load.

        Returns:
            Bytes of the tensors that were loaded.

        Raises:
            DataError: a tensor is damaged; the message names it.
        """
        entries = self.entries(model, start, stop)
        for entry, tensor in self._whole(fetch, entries):
            model.assign(entry.name, tensor, entry.digest)
        return sum(entry.nbytes for entry in entries)

    def state(
        self, fetch: Fetch, model: LayeredModel, names: Sequence[str], allow_import: ImportRule = False
    ) -> dict[str, torch.Tensor]:
        """Return tensors by name, fetched and verified, on the CPU.

        No layer reads some of a module's tensors (an auxiliary head, BatchNorm's count of batches), so they were not
        pushed; these have the architecture's first values.

        Args:
            fetch: reads the tensors.
            model: from :meth:`layered`.
            names: names in the module's state dict, none of them of a fresh head.
            allow_import: whether the model's factory may be imported.
        """
        stored = {name: model.tensors.first_name(name) for name in names}
        held = self.manifest.tensors.keys() - model.fresh
        wanted = [self.manifest.tensors[n] for n in dict.fromkeys(stored.values()) if n in held]
        found = {entry.name: tensor for entry, tensor in self._whole(fetch, wanted)}
        if len(found) < len(set(stored.values())):
            spec = replace(self.spec, num_classes=model.output_shapes()[-1][0], input_shape=model.input_shape)
            first = build(replace(spec, weights="random:0"), allow_import=allow_import).tensors
            found = {n: first.get(n).detach() for n in stored.values() if n not in held} | found
        return {name: found[stored[name]] for name in names}

    def _whole(self, fetch: Fetch, entries: Sequence[TensorEntry]) -> list[Loaded]:
        """All tensors of ``entries``: a part of a model is no model."""
        found = list(fetch(entries))
        missing = {entry.name for entry in entries} - {entry.name for entry, _ in found}
        if missing:
            raise DataError(f"model {self.name!r}: tensor {min(missing)!r} did not come")
        return found

    def damaged(self, entry: TensorEntry) -> DataError:
        """Return the error for stored bytes that are not the content of ``entry``."""
        return DataError(
            f"model {self.name!r}: the stored bytes of tensor {entry.name!r} (from byte {entry.start} of"
            f" {entry.pack}) are damaged; {REMEDY}"
        )
