"""Any ``nn.Module`` as an ordered list of layers, and its slices."""

from __future__ import annotations

import copy
import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Self

import torch
from torch import fx, nn

from hapi.errors import ModelError
from hapi.models.graph.analysis import analyse, references
from hapi.models.graph.architecture import Architecture, LayerIdentity, architecture_of, layer_identities
from hapi.models.graph.blocks import select_layers, trace_or_chain
from hapi.models.graph.cuts import Crossings, Cut, find_cuts
from hapi.models.graph.digest import DIGEST_DIGITS, FORMAT, TensorDigests, plain_tensors, structure_text
from hapi.models.graph.numbering import Numbering, element_count
from hapi.models.graph.rounding import Rounding
from hapi.models.graph.segment import Segment, compile_slice, slice_nodes
from hapi.models.graph.tensor_table import TensorTable
from hapi.models.graph.tracing import Traced
from hapi.models.graph.views import build_tree, shadow
from hapi.models.paper_families import PAPER_FREEZE

_INDEX = re.compile(r"\+?[0-9]{1,9}")


class LayeredModel:
    """A module with its layers; made by :func:`layered`.

    Move it (:meth:`to`) and load it before cutting segments. Segments share its parameters and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        traced: Traced,
        input_shape: tuple[int, ...],
        architecture: str | None = None,
        blocks: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.traced = traced
        self.input_shape = tuple(input_shape)
        self.architecture = architecture
        self.blocks = tuple(blocks)
        self.fresh: frozenset[str] = frozenset()
        """Tensors of a head made anew for another number of classes: not to be loaded from a file."""
        self.expected_digests: Mapping[str, str] = {}
        """Digests of tensors that are known before they are loaded (from a pushed model's manifest)."""
        self.rounding: Rounding | None = None
        """Types of layers in fewer bits (:mod:`hapi.models.graph.precision`); None for a model in its own types."""
        eval_facts, train_facts = analyse(module, traced, self.input_shape)
        self._eval = Crossings(traced.eval_graph, eval_facts)
        self._train = Crossings(traced.train_graph, train_facts)
        if not self._eval.facts[self._eval.result].batched:
            raise ModelError("the model's output does not keep the batch as its first dimension")
        self.cuts: list[Cut] = find_cuts(self._eval, self._train)
        """All cut points, whether a layer of the list ends there or not."""
        self.tensors = TensorTable(module, self._title())
        self._digests = TensorDigests()
        self._structure: list[str] | None = None
        self._plain: list[list[str]] | None = None
        self._architecture: Architecture | None = None
        self._constants: list[list[str]] | None = None
        self._number(select_layers(module, self.cuts, architecture, blocks))

    # -- structure -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.layers)

    def resolve(self, which: int | str) -> int:
        """Return the index of a layer given by index (0 to L) or by name; :class:`ModelError` names near
        misses.
        """
        if isinstance(which, str) and _INDEX.fullmatch(which.strip()):
            which = int(which)
        if isinstance(which, int):
            if not 0 <= which <= len(self):
                raise ModelError(
                    f"layer {which} is out of range: {self._title()} has layers 1 to {len(self)}"
                )
            return which
        for layer in self.layers:
            if layer.name == which:
                return layer.index
        names = [layer.name for layer in self.layers]
        inside = [n for n in names if n.startswith(which + ".")]
        matches = difflib.get_close_matches(which, names, n=3) or inside[-1:] or names[-3:]
        raise ModelError(
            f"{self._title()} has no layer {which!r}; did you mean {' or '.join(map(repr, matches))}?"
        )

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one sample: ``[0]`` of the input, ``[i]`` after layer i."""
        return [self.input_shape, *(layer.output_shape for layer in self.layers)]

    def output_dtypes(self) -> list[torch.dtype]:
        """Element types: ``[0]`` of the input (float32), ``[i]`` after layer i."""
        return [torch.float32, *(layer.dtype for layer in self.layers)]

    def output_bytes(self) -> list[int]:
        """Bytes of one sample: ``[0]`` of the input as float32, ``[i]`` after layer i."""
        return [element_count(self.input_shape) * 4, *(layer.output_bytes for layer in self.layers)]

    def candidate_splits(self, freeze: int) -> range:
        """Return the splits at which the server computes only layers that never change in training.

        These are 0 to ``freeze``, and splits past it over layers without parameters, buffers and randomness
        (pooling, ReLU, flatten) that treat each sample alone: they need no gradient when nothing trainable
        lies before them.
        """
        return range(self.last_split(freeze) + 1)

    def last_split(self, freeze: int) -> int:
        """The largest of the :meth:`candidate_splits`: layers after it are trained."""
        last = self.resolve(freeze)
        for layer in self.layers[last:]:
            if layer.tensors or layer.random or layer.mixes:
                break
            last = layer.index
        return last

    def tensor_names(self, start: int, stop: int) -> list[str]:
        """Parameters and buffers that layers ``start + 1`` to ``stop`` read, in layer order, each once."""
        self._check_span(start, stop)
        return list(dict.fromkeys(name for layer in self.layers[start:stop] for name in layer.tensors))

    def constant_names(self, start: int, stop: int) -> list[str]:
        """Names in ``traced.constants`` that layers ``start + 1`` to ``stop`` read, in layer order, each once."""
        self._check_span(start, stop)
        return list(dict.fromkeys(n for i in range(start + 1, stop + 1) for n in self._constants_of(i)))

    def executed_modules(self) -> list[str]:
        """Paths of the modules that run, in order: those called, and those whose parameters are read."""
        called = [n for n in self._eval.nodes if n.op in ("call_module", "get_attr")]
        owners = [
            str(n.target) if n.op == "call_module" else str(n.target).rpartition(".")[0] for n in called
        ]
        return [path for path in owners if path]

    # -- slices ----------------------------------------------------------------------------------------

    def segment(self, start: int, stop: int, frozen: bool = False, *, own_input: bool = False) -> Segment:
        """Return layers ``start + 1`` to ``stop`` as a module that shares this model's parameters.

        Args:
            start: number of layers before the first one.
            stop: the last layer.
            frozen: eval mode and no gradient, always. Otherwise an ordinary module in train mode.
            own_input: in-place operations may change the caller's tensor, which saves a copy.
        """
        self._check_span(start, stop)
        runs = []
        paths: list[str] = []
        names: list[str] = []
        for graph_slice, ends in zip(
            self._numbering.graph_slices(start, stop), self._numbering.ends(), strict=True
        ):
            casts = None if self.rounding is None else self.rounding.casts(start, stop, ends)
            constants = self.traced.constants
            runs.append(compile_slice(self.module, constants, *graph_slice, own_input=own_input, casts=casts))
            called, read = references(slice_nodes(*graph_slice))
            paths += called
            names += read
        memo: dict[int, nn.Module] = {}
        tree = build_tree(
            self.module, paths, names, self.traced.constants, lambda m: shadow(m, memo) if frozen else m
        )
        shape = self.output_shapes()[start]
        return Segment(tree, (runs[0], runs[1]), (start, stop), shape, frozen, self.traced.always_eval)

    def layer_nodes(self) -> list[list[fx.Node]]:
        """Nodes of the eval graph of :attr:`traced`, for each layer.

        Values computed from parameters alone appear in every layer that reads them.
        """
        return [self._numbering.nodes(layer.index)[0] for layer in self.layers]

    def check_freeze(self, freeze: int) -> None:
        """Raise :class:`ModelError` when layers 1..freeze mix samples or use a parameter of the trained
        layers.
        """
        mixing = next((layer for layer in self.layers[: self.resolve(freeze)] if layer.mixes), None)
        if mixing is not None:
            raise ModelError(
                f"layer {mixing.index} ({mixing.name}) normalises by the batch at hand (BatchNorm without running"
                " statistics), so what it gives depends on the size of batches; choose a freeze before it, or"
                " build it with track_running_stats=True"
            )
        frozen = set(self.tensor_names(0, self.resolve(freeze)))
        shared = [n for n in self.tensor_names(freeze, len(self)) if n in frozen and self._is_parameter(n)]
        if shared:
            raise ModelError(
                f"parameter {shared[0]!r} is used on both sides of layer {freeze}, so it cannot be frozen"
                " and trained at once; choose a freeze before its first or after its last use"
            )

    def with_all_cuts(self) -> LayeredModel:
        """The same model with one layer for every cut point, instead of the paper's list or ``blocks``."""
        twin = copy.copy(self)
        twin.blocks = tuple(cut.name for cut in self.cuts)
        twin._number([(cut.name, cut) for cut in self.cuts])
        return twin

    def over(self, module: nn.Module) -> LayeredModel:
        """The same layers over another ``module`` of the same structure; costs no tracing."""
        twin = copy.copy(self)
        twin.module = module
        twin.tensors = TensorTable(module, self._title())
        twin.traced = self.traced.over(module)
        twin._digests = TensorDigests()
        return twin

    # -- content ---------------------------------------------------------------------------------------

    def prefix_digest(self, split: int) -> str:
        """Return the digest (32 hex digits) of structure and tensor content of layers 1..``split``.

        It does not depend on the layers after the split (head, number of classes) or the device. It differs
        for another input shape, layer list or weight. Digests of tensors are kept, so all splits cost one
        pass.
        """
        return self.prefix_digests(self.resolve(split))[-1]

    def prefix_digests(self, stop: int | None = None) -> list[str]:
        """The digests of splits 0 to ``stop`` (default: all layers)."""
        stop = len(self) if stop is None else self.resolve(stop)
        if self._structure is None:
            numbering = self._numbering
            self._structure = structure_text(self.module, self._eval, numbering.cut_points(), numbering.names)
        state = hashlib.sha256(f"{FORMAT} {list(self.input_shape)}".encode())
        digests = [state.hexdigest()[:DIGEST_DIGITS]]
        for layer, text in zip(self.layers[:stop], self._structure, strict=False):
            state.update(f"\n{text}".encode())
            for name in (*layer.tensors, *self._constants_of(layer.index)):
                constant = self.traced.constants.get(name)
                tensor = self.tensors.get(name) if constant is None else constant
                state.update(_tensor_text(name, tensor, self.digest_of(name)))
            for name, tensor in self._plain_tensors(layer.index).items():
                state.update(_tensor_text(name, tensor, self._digests.of(name, tensor)))
            digests.append(state.hexdigest()[:DIGEST_DIGITS])
        return digests

    def identities(self) -> list[LayerIdentity]:
        """Return the identity of splits 0 to L, whatever the names in the model (DStore, Algorithm 1)."""
        return layer_identities(self.leaf_layers(), self._numbering.ends()[0], self._digest_of_any)

    def leaf_layers(self) -> Architecture:
        """Return the leaf layers and their connections; computed once."""
        if self._architecture is None:
            self._architecture = architecture_of(self.module, self._eval, self.traced.constants)
        return self._architecture

    def remember_digest(self, name: str, digest: str) -> None:
        """Note that tensor ``name``'s present content has ``digest``, so that it is not computed again."""
        self._digests.remember(self.tensors.get(name), digest)

    def digest_of(self, name: str) -> str:
        """Content digest of a parameter, buffer or constant, also of one that is expected and not loaded."""
        constant = self.traced.constants.get(name)
        tensor = self.tensors.get(name) if constant is None else constant
        first = self.tensors.first_name(name) if constant is None else name
        if tensor.is_meta and first in self.expected_digests:
            return self.expected_digests[first]
        return self._digests.of(name, tensor)

    def _digest_of_any(self, name: str) -> str:
        """:meth:`digest_of`, also of a tensor that is a plain attribute."""
        if name in self.traced.constants or name in self.tensors:
            return self.digest_of(name)
        return self._digests.of(name, attrgetter(name)(self.module))

    def assign(self, name: str, tensor: torch.Tensor, digest: str | None = None) -> None:
        """Put ``tensor`` in the place of parameter or buffer ``name``.

        Args:
            name: any of its names.
            tensor: the new content.
            digest: its content digest, when that is known.

        Raises:
            ModelError: ``tensor`` has another shape or dtype.
        """
        placed = self.tensors.assign(name, tensor)
        if digest is not None:
            self._digests.remember(placed, digest)

    def release(self, start: int, stop: int) -> None:
        """Give up the memory of tensors that layers ``start + 1`` to ``stop`` do not read."""
        self.tensors.release(self.tensor_names(start, stop))

    def unregistered(self) -> list[torch.Tensor]:
        """Tensors that are neither parameters nor buffers, so in no file: the model's code makes them."""
        plain = [self._plain_tensors(layer.index).values() for layer in self.layers]
        return [*self.traced.constants.values(), *(tensor for found in plain for tensor in found)]

    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and constants that are in memory (on any device)."""
        constants = sum(t.numel() * t.itemsize for t in self.traced.constants.values() if not t.is_meta)
        return constants + self.tensors.resident_bytes()

    def to(self, device: torch.device | str, start: int = 0, stop: int | None = None) -> Self:
        """Move the loaded tensors that layers ``start + 1`` to ``stop`` (default: all) read to ``device``.

        Segments made before must not be used any more, unless all their tensors were there already.
        """
        names = self.tensors.names() if stop is None else self.tensor_names(start, stop)
        self.tensors.to(torch.device(device), names)
        for name, tensor in self.traced.constants.items():
            self.traced.constants[name] = tensor.to(device)
        return self

    # -- inside ----------------------------------------------------------------------------------------

    def _title(self) -> str:
        return self.architecture or type(self.module).__name__

    def _check_span(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise ModelError(
                f"layers {start}..{stop} are out of range: {self._title()} has layers 1 to {len(self)}"
            )

    def _is_parameter(self, name: str) -> bool:
        return isinstance(self.tensors.get(name), nn.Parameter)

    def _constants_of(self, index: int) -> list[str]:
        if self._constants is None:
            indices = (layer.index for layer in self.layers)
            self._constants = [
                self._numbering.read(i, self.tensors, self.traced.constants)[1] for i in indices
            ]
        return self._constants[index - 1]

    def _plain_tensors(self, index: int) -> dict[str, torch.Tensor]:
        """Tensors that are attributes of the modules which layer ``index`` calls as a whole, by name."""
        if self._plain is None:
            self._plain = [self._plain_names(layer.index) for layer in self.layers]
        found = {name: attrgetter(name)(self.module) for name in self._plain[index - 1]}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def _plain_names(self, index: int) -> list[str]:
        in_eval, in_train = self._numbering.nodes(index)
        called, _ = references([*in_eval, *in_train])
        modules = [(self.module.get_submodule(path), path) for path in dict.fromkeys(called)]
        return [name for module, path in modules for name in plain_tensors(module, path)]

    def _number(self, chosen: Sequence[tuple[str, Cut]]) -> None:
        self._numbering = Numbering(self._eval, self._train, chosen)
        self._structure = self._plain = self._constants = None
        self.layers = self._numbering.layers(self.tensors, self.traced.constants)
        self.default_freeze = self._default_freeze()

    def _default_freeze(self) -> int | None:
        """The paper's freeze for its seven models, else all layers with parameters but the last such one."""
        if self.architecture in PAPER_FREEZE and not self.blocks:
            return PAPER_FREEZE[self.architecture]
        trainable = [layer.index for layer in self.layers if layer.parameter_count]
        return trainable[-2] if len(trainable) > 1 else None


def _tensor_text(name: str, tensor: torch.Tensor, digest: str) -> bytes:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"\n{name} {tensor.dtype} {list(tensor.shape)}{layout} {digest}".encode()


def layered(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    architecture: str | None = None,
    blocks: Sequence[str] = (),
    leaf_types: Sequence[type] = (),
    functions: Sequence[Any] = (),
) -> LayeredModel:
    """Return ``module`` as a list of layers.

    Args:
        module: the model.
        input_shape: shape of one sample (C, H, W).
        architecture: its torchvision name, if it has one; the paper's seven families get the paper's
            numbering.
        blocks: names at which layers end (module paths or cut names), instead of all cut points. For a module
            that cannot be traced they are run in sequence.
        leaf_types: module classes that are never traced into.
        functions: Python functions that the graph calls as they are.

    Raises:
        ModelError: the model cannot be traced or cut.
    """
    shape = tuple(input_shape)
    traced = trace_or_chain(module, shape, blocks, leaf_types, functions)
    return LayeredModel(module, traced, shape, architecture, blocks)
