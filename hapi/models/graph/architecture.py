"""The compact architecture graph of a model, and the identity of its layers.

After DStore (section 3, "Compact representation of the DL model architecture graph", and section 4, Algorithm 1): the
identity of a leaf layer is the hash of its configuration and of its inputs' identities, as in a Merkle tree. It does
not depend on labels (module paths, names of nodes) or on the order in which branches were built. The structure says
that two networks have the same shape. The content, which hashes the tensors as well, says that they are the same
frozen backbone.

Two things are added to the printed algorithm. Every input is folded in, also one that was visited before. An operation
that changes memory in place counts as an input of whatever reads that memory later, although no edge says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import fx, nn

from hapi.errors import BadRequestError
from hapi.models.graph.cuts import Crossings
from hapi.models.graph.digest import module_settings, name_with_code, plain_tensors, value_text
from hapi.wire.documents import check_int, strict_fields

FORMAT = 2
"""Version of the configurations below; it changes whenever an unchanged layer would get another identity."""
_HASH_BYTES = 16
_STRUCTURE, _CONTENT = b"hapi structure", b"hapi content"
_MOST_NODES = 1 << 20


class LayerIdentity(NamedTuple):
    """Identity of everything up to the end of a layer."""

    structure: str
    """32 hex digits: operations, settings, connections, shapes and types of tensors."""
    content: str
    """32 hex digits: the same with the tensors' content."""


@dataclass(frozen=True)
class ArchitectureGraph:
    """Leaf layers and their connections. Models of one structure share it: it holds no label and no content."""

    configs: tuple[str, ...]
    """Distinct configurations, as text."""
    nodes: tuple[tuple[int, ...], ...]
    """Leaf layers: the place of the configuration in ``configs``, then those of the inputs in ``nodes``, in the order
    of the arguments, all before its own."""

    def structure(self) -> list[bytes]:
        """Return the identity of each leaf layer's structure, 16 bytes each; O(V + E), one hash for each."""
        own = _hashes(_STRUCTURE, map(str.encode, self.configs))
        return self._identities(_STRUCTURE, [own[node[0]] for node in self.nodes])

    def content(self, tensors: Sequence[Sequence[str]]) -> list[bytes]:
        """Return the identity of each leaf layer with its tensors' content, 16 bytes each.

        Args:
            tensors: digests of each leaf layer's tensors, in the order of its configuration.
        """
        configs = _hashes(_CONTENT, map(str.encode, self.configs))
        held = _hashes(_CONTENT, map(_listed, tensors))
        own = [configs[node[0]] + digest for node, digest in zip(self.nodes, held, strict=True)]
        return self._identities(_CONTENT, own)

    def _identities(self, kind: bytes, own: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        fresh = _fresh(kind).copy
        for node, data in zip(self.nodes, own, strict=True):
            # Everything has a fixed length, so no two lists of inputs give the same bytes.
            state = fresh()
            if len(node) == 2:  # as of most layers: one call is less time than two
                state.update(data + found[node[1]])
            else:
                state.update(data)
                for place in node[1:]:
                    state.update(found[place])
            found.append(state.digest())
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the document that :meth:`from_json` reads."""
        return {"format": FORMAT, "configs": list(self.configs), "nodes": [list(node) for node in self.nodes]}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse a graph; :class:`BadRequestError` on anything unexpected."""
        d = strict_fields(document, dict.fromkeys(("format", "configs", "nodes"), True), "architecture")
        if d["format"] != FORMAT:
            raise BadRequestError(f"architecture: format {d['format']!r:.20} is not {FORMAT}")
        configs, nodes = d["configs"], d["nodes"]
        if not isinstance(configs, list) or not all(isinstance(config, str) for config in configs):
            raise BadRequestError("architecture: configs is no list of texts")
        if not isinstance(nodes, list) or len(nodes) > _MOST_NODES:
            raise BadRequestError(f"architecture: nodes is no list of at most {_MOST_NODES}")
        return cls(tuple(configs), tuple(_node(node, i, len(configs)) for i, node in enumerate(nodes)))


def _node(document: Any, place: int, configs: int) -> tuple[int, ...]:
    if not isinstance(document, list) or not document:
        raise BadRequestError(f"architecture: node {place} is no list of a configuration and inputs")
    config, *inputs = document
    what = f"architecture: node {place}"
    return (check_int(config, 0, configs - 1, what), *(check_int(i, 0, place - 1, what) for i in inputs))


def _hashes(kind: bytes, texts: Iterable[bytes]) -> list[bytes]:
    """The hash of each text, 16 bytes."""
    found, fresh = [], _fresh(kind).copy
    for text in texts:
        state = fresh()
        state.update(text)
        found.append(state.digest())
    return found


def _listed(digests: Sequence[str]) -> bytes:
    """JSON of a list of digests; the writer of JSON takes eight times as long to find that none needs an escape."""
    return ('["' + '", "'.join(digests) + '"]').encode() if digests else b"[]"


def _fresh(kind: bytes) -> hashlib.blake2b:
    """A state without any bytes: copies of it take half as long as states that are made anew."""
    return hashlib.blake2b(digest_size=_HASH_BYTES, person=kind)


@dataclass(frozen=True)
class Architecture:
    """The graph of one model, with what belongs to this model alone."""

    graph: ArchitectureGraph
    tensors: tuple[tuple[str, ...], ...]
    """Names of each leaf layer's tensors, in the order of its configuration."""
    places: Mapping[fx.Node, int]
    """The leaf layer of each node of the model's eval graph."""


@dataclass
class _Builder:
    """The leaf layers found so far."""

    module: nn.Module
    constants: Mapping[str, torch.Tensor]
    configs: dict[str, int] = field(default_factory=dict)
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    tensors: list[tuple[str, ...]] = field(default_factory=list)
    places: dict[fx.Node, int] = field(default_factory=dict)
    writers: dict[int, fx.Node] = field(default_factory=dict)
    """The last node that changed a memory in place."""

    def add(self, node: fx.Node, crossings: Crossings) -> None:
        """Add ``node``, all of whose inputs were added."""
        facts, inputs = crossings.facts, list(dict.fromkeys(node.all_input_nodes))
        order = {source: place for place, source in enumerate(inputs)}
        operation, tensors = self._operation(node)
        arguments = [value_text(value, order) for value in node.args]
        keywords = [[key, value_text(value, order)] for key, value in sorted(node.kwargs.items())]
        config = json.dumps([*operation, arguments, keywords], ensure_ascii=True)
        memory = [storage for source in inputs for storage in facts[source].storages]
        changed = [self.writers[storage] for storage in memory if storage in self.writers]
        before = [source for source in dict.fromkeys(changed) if source not in order]
        self.places[node] = len(self.nodes)
        place = self.configs.setdefault(config, len(self.configs))
        self.nodes.append((place, *(self.places[source] for source in [*inputs, *before])))
        self.tensors.append(tensors)
        self.writers |= dict.fromkeys(facts[node].writes, node)

    def _operation(self, node: fx.Node) -> tuple[list[Any], tuple[str, ...]]:
        """(kind, name and settings, tensors' names) of what ``node`` computes."""
        if node.op == "call_module":
            path = str(node.target)
            inside = self.module.get_submodule(path)
            named = {
                **dict(inside.named_parameters(prefix=path, remove_duplicate=False)),
                **dict(inside.named_buffers(prefix=path, remove_duplicate=False)),
                **{name: _attribute(self.module, name) for name in plain_tensors(inside, path)},
            }
            forms = [
                [name.removeprefix(f"{path}."), *_form(tensor)] for name, tensor in sorted(named.items())
            ]
            return [node.op, module_settings(inside), forms], tuple(sorted(named))
        if node.op == "get_attr":
            name = str(node.target)
            tensor = self.constants[name] if name in self.constants else _attribute(self.module, name)
            return [node.op, "", [_form(tensor)]], (name,)
        target = "" if node.op == "placeholder" else node.target
        return [node.op, target if isinstance(target, str) else name_with_code(target), []], ()


def _attribute(module: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), leaf)
    return found


def _form(tensor: torch.Tensor) -> list[Any]:
    return [type(tensor).__name__, str(tensor.dtype), str(tensor.layout), list(tensor.shape)]


def architecture_of(
    module: nn.Module, crossings: Crossings, constants: Mapping[str, torch.Tensor]
) -> Architecture:
    """Return the leaf layers of a traced model.

    Args:
        module: the model; its tensors may be on the meta device.
        crossings: its eval graph.
        constants: tensors that the graph reads and that are neither parameters nor buffers.
    """
    builder = _Builder(module, constants)
    for node in crossings.nodes:
        builder.add(node, crossings)
    graph = ArchitectureGraph(tuple(builder.configs), tuple(builder.nodes))
    return Architecture(graph, tuple(builder.tensors), builder.places)


def layer_identities(
    architecture: Architecture, ends: Sequence[fx.Node], digest_of: Callable[[str], str]
) -> list[LayerIdentity]:
    """Return the identity of everything up to each of ``ends``.

    Args:
        architecture: the model's leaf layers.
        ends: the input's node and the last node of each layer; [L + 1].
        digest_of: digest of a tensor's content by its name.
    """
    structure = architecture.graph.structure()
    content = architecture.graph.content(
        [[digest_of(name) for name in names] for names in architecture.tensors]
    )
    places = [architecture.places[node] for node in ends]
    return [LayerIdentity(structure[place].hex(), content[place].hex()) for place in places]


def shared_layers(identities: Sequence[str], others: Sequence[str]) -> int:
    """Return the longest common prefix of two models: how many layers of the first the second has, too.

    Args:
        identities: of the first model's layers, 0 to L, by structure or by content.
        others: those of the second; it may be cut into other layers.
    """
    known = set(others)
    return max((layer for layer, identity in enumerate(identities) if identity in known), default=0)
