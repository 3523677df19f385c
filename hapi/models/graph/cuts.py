"""Cut points: the places in a graph where exactly one tensor crosses to what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from torch import fx

from hapi.models.graph.analysis import Derived, NodeFacts, derive
from hapi.wire.frames import DTYPE_BYTES

Facts = Mapping[fx.Node, NodeFacts]


@dataclass(frozen=True)
class CutPoint:
    """A cut in one graph: after ``position`` nodes only ``node``'s tensor is needed by the rest."""

    node: fx.Node
    position: int


@dataclass(frozen=True)
class Cut:
    """A place where the model can be cut, in both of its graphs. ``name`` is unique in the model."""

    name: str
    path: str
    """Module path in which the cut's node was recorded; empty for the model's own forward."""
    eval_point: CutPoint
    train_point: CutPoint


class Crossings:
    """A graph with the values that may cross a cut beside the one tensor, since the far side can make them
    again.
    """

    def __init__(self, graph: fx.Graph, facts: Facts) -> None:
        self.nodes: list[fx.Node] = [n for n in graph.nodes if n.op != "output"]
        self.facts = facts
        self.result: fx.Node = graph.output_node().args[0]  # type: ignore[assignment]
        self.derived: dict[fx.Node, Derived] = {}
        self.portable: set[fx.Node] = set()
        written = frozenset().union(*(facts[n].writes for n in self.nodes))
        for node in self.nodes:
            if self._is_portable(node, written):
                self.portable.add(node)
                continue
            how = derive(facts[node])
            if how is not None and not facts[node].writes:
                self.derived[node] = how

    def _is_portable(self, node: fx.Node, written: frozenset[int]) -> bool:
        """True for what depends on parameters and plain values only: computed again where it is needed."""
        facts = self.facts[node]
        if node.op == "placeholder" or facts.random or facts.storages & written or facts.writes:
            return False
        return all(n in self.portable or n in self.derived for n in node.all_input_nodes)

    def cut_points(self) -> list[CutPoint]:
        """All cuts in order; the last one is the model's output, after all nodes."""
        index = {node: i for i, node in enumerate(self.nodes)}
        end = len(self.nodes)
        # A use for a plain value (x.size(0)) holds nothing: the value is made again from what crosses.
        uses = {n: [index.get(user, end) for user in n.users if user not in self.derived] for n in self.nodes}
        last_use = {n: max(uses[n], default=-1) for n in self.nodes}
        expiring: dict[int, list[fx.Node]] = {}
        for node, last in last_use.items():
            expiring.setdefault(last, []).append(node)
        live: set[fx.Node] = set()
        found: dict[fx.Node, CutPoint] = {}
        for i, node in enumerate(self.nodes):
            live.difference_update(expiring.get(i, ()))
            if last_use[node] > i and node not in self.derived and node not in self.portable:
                live.add(node)
            if len(live) == 1:
                (crossing,) = live
                if crossing.op != "placeholder" and crossing not in found and self._may_cross(crossing):
                    found[crossing] = CutPoint(crossing, i + 1)
        points = [p for n, p in found.items() if n is not self.result]
        return [*points, CutPoint(self.result, end)]

    def _may_cross(self, node: fx.Node) -> bool:
        facts = self.facts[node]
        return facts.batched and str(facts.dtype).removeprefix("torch.") in DTYPE_BYTES


def find_cuts(evaluation: Crossings, training: Crossings) -> list[Cut]:
    """The cuts that exist in both graphs, in order, named after the node whose tensor crosses."""
    partner = _align(evaluation.nodes, training.nodes)
    train_points = {p.node: p for p in training.cut_points()}
    cuts: list[Cut] = []
    taken: set[str] = set()
    for point in evaluation.cut_points():
        twin = train_points.get(partner.get(point.node, point.node))
        if point.node is evaluation.result:
            twin = train_points[training.result]
        if twin is None or (twin.node is training.result and point.node is not evaluation.result):
            continue
        name = unique_name(node_name(point.node), taken)
        cuts.append(Cut(name, node_path(point.node), point, twin))
    return cuts


def _align(first: list[fx.Node], second: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Pair the nodes of the eval graph with those of the train graph, which may have some more or less."""
    a, b = [_signature(n) for n in first], [_signature(n) for n in second]
    if a == b:
        return dict(zip(first, second, strict=True))
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return {
        first[block.a + k]: second[block.b + k]
        for block in matcher.get_matching_blocks()
        for k in range(block.size)
    }


def _signature(node: fx.Node) -> tuple[object, ...]:
    # One level of inputs tells an addition of a residual from an addition of noise.
    return (node.op, node_name(node), *(node_name(n) for n in node.all_input_nodes))


def node_path(node: fx.Node) -> str:
    """Path of the innermost module in whose forward ``node`` was recorded ('' for the model itself)."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def node_name(node: fx.Node) -> str:
    """Module path, and for a function or method its name: ``layer1.0.add``, ``flatten``."""
    path = node_path(node)
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    if node.op == "placeholder":
        return "input"
    own = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
    own = own.strip("_")
    return f"{path}.{own}" if path else own


def unique_name(name: str, taken: set[str]) -> str:
    """``name``, or ``name_1``, ``name_2`` ... when it is in ``taken``; the result is added to it."""
    candidate, n = name, 0
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    taken.add(candidate)
    return candidate
