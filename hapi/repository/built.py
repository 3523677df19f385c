"""Models that are built instead of read: weights from a seed or a library, and the facts kept of each build."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from hapi.errors import ConflictError, ModelError, TooLargeError
from hapi.models.graph.digest import content_digest, content_key
from hapi.models.graph.layers import LayeredModel
from hapi.models.keyed_locks import KeyedLocks
from hapi.models.tensors import copied, tensor_bytes
from hapi.models.zoo.architectures import build_module
from hapi.models.zoo.build import ModelSpec, architecture_of, common_skeleton
from hapi.models.zoo.names import is_file, random_seed
from hapi.models.zoo.weights import library_state, load_state
from hapi.wire.references import ModelReference

_KEPT = 16
"""Builds that are remembered, as many as skeletons."""


class BuiltModels:
    """Builds models of the zoo, and keeps all but the weights of the latest ones; thread-safe.

    It keeps the module with empty tensors and the digest of each tensor's content. Digests need a build.
    After one, the prefix of any split can be described, and assembled from weights that are resident. The
    module itself is kept because tensors that are plain attributes may depend on the seed.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._shells: OrderedDict[ModelSpec, LayeredModel] = OrderedDict()
        self.builds = 0
        """Number of builds so far."""
        self.building = KeyedLocks()
        """Locks by spec, to hold between :meth:`find` and :meth:`build`, so that two requests build once."""

    def find(self, spec: ModelSpec) -> LayeredModel | None:
        """Return the model of ``spec`` without weights, with their digests; None when no recent build is
        known.
        """
        with self._lock:
            shell = self._shells.get(spec)
            if shell is None:
                return None
            self._shells.move_to_end(spec)
        return shell.over(copied(shell.module))

    def build(
        self, spec: ModelSpec, allow_imports: Collection[str]
    ) -> tuple[LayeredModel, dict[str, torch.Tensor]]:
        """Build ``spec``; return the model without weights, as :meth:`find` does, and all weights by name."""
        kept = common_skeleton(spec, allow_imports)
        architecture = architecture_of(spec, allow_imports)
        module = build_module(architecture, random_seed(spec.weights) or 0)
        if spec.pretrained:
            load_state(module, library_state(architecture, spec.weights, module), f"weights {spec.weights}")
        model = kept.over(module)
        model.expected_digests = {name: model.digest_of(name) for name in model.tensors.names()}
        weights = {name: model.tensors.get(name).detach() for name in model.tensors.names()}
        model.tensors.release(())
        with self._lock:
            self.builds += 1
            self._shells[spec] = model.over(copied(module)) if self._kept else model
            self._shells.move_to_end(spec)
            while len(self._shells) > self._kept:
                self._shells.popitem(last=False)
        return model, weights


class BuiltPrefix:
    """A model from the zoo as a source of weights. ``model`` has none, but knows their digests."""

    def __init__(
        self,
        builds: BuiltModels,
        spec: ModelSpec,
        allow_imports: Collection[str],
        model: LayeredModel,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        self._builds = builds
        self._spec = spec
        self._allow_imports = allow_imports
        self._weights = weights

    def key(self, name: str) -> str:
        """Key of tensor ``name``'s content."""
        return content_key(self.model.digest_of(name), self.model.tensors.get(name))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors ``names`` from a known or a new build; :class:`ConflictError` if the digests differ."""
        weights = self._weights
        if weights is None:
            _, weights = self._builds.build(self._spec, self._allow_imports)
            for name in names:
                if content_digest(tensor_bytes(weights[name])) != self.model.expected_digests[name]:
                    raise ConflictError(
                        f"tensor {name!r} of {self._spec.architecture} differs from that of an earlier build "
                        f"with weights {self._spec.weights}; push the model into the store instead"
                    )
        for name in names:
            yield name, weights[name]


def spec_of(reference: ModelReference) -> ModelSpec:
    """Return the build that a reference to the zoo asks for; :class:`ModelError` for weights in a file."""
    if is_file(reference.weights):
        raise ModelError(
            f"weights {reference.weights[:80]!r}: a file cannot be named in a request; push the model"
        )
    return ModelSpec(
        architecture=reference.name,
        weights=reference.weights,
        input_shape=reference.input_shape,
        blocks=reference.blocks,
    )


def check_size(spec: ModelSpec, allow_imports: Collection[str], max_bytes: int) -> None:
    """Check that the weights of ``spec`` have at most ``max_bytes`` bytes.

    Raises:
        TooLargeError: they have more.
    """
    kept = common_skeleton(spec, allow_imports)
    nbytes = prefix_bytes(kept, len(kept))
    if nbytes > max_bytes:
        raise TooLargeError(
            f"model {spec.architecture} has {nbytes} bytes of weights, at most {max_bytes} are built here "
            "(--max-model-bytes of hapi-server); push it into the store, from which only the layers that are needed "
            "are read"
        )


def prefix_bytes(model: LayeredModel, split: int) -> int:
    """Return the bytes of the parameters, buffers and constants of layers 1..``split``."""
    tensors = [model.tensors.get(name) for name in model.tensor_names(0, split)]
    return sum(t.numel() * t.itemsize for t in [*tensors, *model.traced.constants.values()])
