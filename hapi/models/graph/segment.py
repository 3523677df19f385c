"""A slice of a model's layers as an ordinary module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import fx, nn

from hapi.errors import ModelError
from hapi.models.graph.cuts import Crossings, CutPoint
from hapi.models.graph.tracing import NO_GRAD
from hapi.models.graph.views import Substitute, Tree, shadow

# What may return its argument or a view of it, depending on strides or mode: counted as the argument's memory, so
# that a segment never changes its caller's tensor, in whatever memory format that one is.
_MAY_ALIAS = {"contiguous", "reshape", "flatten", "to", "type_as", "float", "expand_as"}
_MAY_ALIAS_MODULES = (nn.Flatten, nn.modules.dropout._DropoutNd)


class Segment(nn.Module):
    """Layers ``start + 1`` to ``stop`` of a model: ``forward`` takes and returns one tensor [n, ...].

    Parameters and buffers are the model's own, under their original names, and only those of these layers.
    A segment that is ``frozen`` stays in eval mode and computes without gradients and autocast, always. Modules that
    the model itself keeps in eval mode while it trains stay in it, too. The caller's tensor is never changed, whatever
    in-place operations the layers do.
    """

    start: int
    stop: int
    frozen: bool
    input_shape: tuple[int, ...]
    """Shape of one sample that goes in; a batch of another shape is refused."""

    def __init__(
        self,
        tree: Tree,
        run: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]],
        bounds: tuple[int, int],
        input_shape: tuple[int, ...],
        frozen: bool,
        always_eval: frozenset[str],
    ) -> None:
        super().__init__()
        # The tree is this module under another class: a model may have a child called "start" or "frozen".
        self.__dict__["_tree"] = tree
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = tree.__dict__[kind]
        self.__dict__["_run_eval"], self.__dict__["_run_train"] = run
        inner = tuple(m for m in self.modules() if m is not self) if frozen else ()
        self.__dict__.update(
            start=bounds[0], stop=bounds[1], frozen=frozen, input_shape=input_shape, _inner=inner
        )
        self.__dict__["_always_eval"] = always_eval
        self.train(not frozen)

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode as ``nn.Module.train`` does, but keep a frozen segment, and modules that the
        model keeps, in eval mode.
        """
        super().train(mode and not self.frozen)
        for path, module in self.named_modules():
            if path in self.__dict__["_always_eval"]:
                module.training = False
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run layers ``start + 1`` to ``stop`` on ``x`` [n, *input_shape]; :class:`ModelError` on another
        shape.
        """
        if x.shape[1:] != self.input_shape or x.dim() == 0:
            raise ModelError(
                f"layers {self.start + 1} to {self.stop} take samples of shape {list(self.input_shape)},"
                f" but got a batch of shape {list(x.shape)}"
            )
        if not self.frozen:
            run = self.__dict__["_run_train" if self.training else "_run_eval"]
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # as before, also after a layer that failed
                result: torch.Tensor = run(self.__dict__["_tree"], x)
            return result
        for module in self.__dict__["_inner"]:
            # A child reached from outside (for m in segment.modules(): m.train()) must not thaw the front.
            module.training = False
        # A loop of batches may stand in a caller's autocast; frozen layers give the same numbers on both sides.
        with torch.no_grad(), nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            frozen_result: torch.Tensor = self.__dict__["_run_eval"](self.__dict__["_tree"], x)
            return frozen_result

    def over(self, substitute: Substitute) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of these layers, in the mode that they are in now, with other tensors in place of theirs.

        What it changes is not seen in the layers.

        Args:
            substitute: makes another tensor for each parameter and buffer.
        """
        tree, run = self.__dict__["_tree"], self.__dict__["_run_train" if self.training else "_run_eval"]
        twin = shadow(tree, {}, substitute)
        for copied, own in zip(twin.modules(), tree.modules(), strict=True):
            copied.training = own.training
        return partial(run, twin)

    def extra_repr(self) -> str:
        """Return the layers' range and the mode, for ``repr``."""
        return f"layers {self.start + 1}..{self.stop}{', frozen' if self.frozen else ''}"


def slice_nodes(crossings: Crossings, before: CutPoint | None, after: CutPoint) -> list[fx.Node]:
    """Nodes between two cuts, and the portable ones (parameters and what is made of them) that they use.

    A parameter that is only read further on belongs there, wherever the graph mentions it first.
    """
    low = before.position if before is not None else 0
    used = {
        n for n in crossings.nodes[low : after.position] if n not in crossings.portable or n is after.node
    }
    pending = list(used)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in crossings.portable and source not in used:
                used.add(source)
                pending.append(source)
    return [n for n in crossings.nodes if n in used]


def compile_slice(
    module: nn.Module,
    constants: Collection[str],
    crossings: Crossings,
    before: CutPoint | None,
    after: CutPoint,
    *,
    own_input: bool = False,
    casts: Mapping[fx.Node, Sequence[torch.dtype]] | None = None,
) -> Callable[..., torch.Tensor]:
    """Return a function ``f(tree, x)`` that runs the nodes of ``module`` between two cuts.

    Args:
        module: the traced module.
        constants: names of tensors that are the same in every call.
        crossings: the graph, with the values that may cross a cut.
        before: the cut before the first node; None: the input.
        after: the cut after the last node.
        own_input: in-place operations may change ``x``.
        casts: types that results of nodes, and ``x`` for the input's, go through one after the other.
    """
    nodes = slice_nodes(crossings, before, after)
    source = crossings.nodes[0] if before is None else before.node
    graph = fx.Graph()
    value = graph.placeholder("x")
    if not own_input and _changes_input(module, crossings, nodes, source):
        value = graph.call_method("clone", (value,))
    made: dict[fx.Node, Any] = {source: _cast(graph, value, casts, source)}
    value = made[source]
    written = frozenset().union(*(crossings.facts[n].writes for n in nodes))
    copies: dict[str, fx.Node] = {}

    def argument(node: fx.Node) -> Any:
        """Return the argument for ``node`` in the new graph."""
        if node not in made:
            # A plain value from before the cut (a batch size, a device), made again from the tensor here.
            made[node] = crossings.derived[node].build(graph, value)
        return made[node]

    gradients = _GradientModes(graph)
    for node in nodes:
        if node is source or (node in crossings.derived and not _available(node, made, crossings)):
            continue
        gradients.follow(node)
        if node.op == "get_attr" and node.target in constants and crossings.facts[node].storages & written:
            name = str(node.target)
            if name not in copies:
                copies[name] = graph.call_method("clone", (graph.get_attr(name),))
            made[node] = copies[name]
            continue
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda a: _resolve(a, argument))
        made[node] = _cast(graph, graph.create_node(node.op, node.target, args, kwargs), casts, node)
    gradients.leave()
    graph.output(argument(after.node))
    return _compiled(graph)


class _GradientModes:
    """Turns gradients off in a graph where the model's code has them off, and on again as they were."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._outside: fx.Node | None = None
        """Value of the mode before it was turned off; None while it is as the caller has it."""

    def follow(self, node: fx.Node) -> None:
        """Switch for ``node``, which is put into the graph next."""
        if NO_GRAD not in node.meta:
            self.leave()
        elif self._outside is None:
            self._outside = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(torch.set_grad_enabled, (False,))

    def leave(self) -> None:
        """Switch back."""
        if self._outside is not None:
            self._graph.call_function(torch.set_grad_enabled, (self._outside,))
            self._outside = None


def _cast(
    graph: fx.Graph, value: fx.Node, casts: Mapping[fx.Node, Sequence[torch.dtype]] | None, node: fx.Node
) -> fx.Node:
    for dtype in (casts or {}).get(node, ()):
        value = graph.call_method("to", (value, dtype))
    return value


def _available(node: fx.Node, made: dict[fx.Node, Any], crossings: Crossings) -> bool:
    """False for a plain value read from a tensor that stayed before the cut."""
    return all(n in made or n in crossings.derived for n in node.all_input_nodes)


def _resolve(value: Any, argument: Callable[[fx.Node], Any]) -> Any:
    return argument(value) if isinstance(value, fx.Node) else value


def _compiled(graph: fx.Graph) -> Callable[..., torch.Tensor]:
    code = graph.python_code(root_module="self")
    scope = dict(code.globals)
    exec(compile(code.src, "<hapi segment>", "exec"), scope)  # fx's own generated code, as in fx.GraphModule
    function: Callable[..., torch.Tensor] = scope["forward"]
    return function


def _changes_input(
    module: nn.Module, crossings: Crossings, nodes: Iterable[fx.Node], source: fx.Node
) -> bool:
    """True when a node writes in place into the memory of ``source``, the segment's input."""
    memory = set(crossings.facts[source].storages)
    for node in nodes:
        if node is source:
            continue
        facts = crossings.facts[node]
        if facts.writes & memory:
            return True
        inputs = set().union(*(crossings.facts[n].storages for n in node.all_input_nodes))
        if inputs & memory and _may_alias(module, node):
            memory |= facts.storages
    return False


def _may_alias(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _MAY_ALIAS_MODULES)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _MAY_ALIAS
