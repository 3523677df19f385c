"""Analysis of every node of a graph: shapes, batch dependence, aliasing, in-place writes, randomness.

The graph is run twice, with batches of 2 and 3, without memory or compute: on the meta device, which is fast,
or on fake tensors, which also allow tensors that forward makes on a device of its own choice. If an operator
can do neither (its result depends on data), a small real run takes their place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hapi.errors import ModelChoiceError
from hapi.models.batch_flow import BatchFlow, Operation, OperatorLog
from hapi.models.fake_log import without_fake_log
from hapi.models.graph.meta_rules import meta_result
from hapi.models.graph.tracing import Traced, describe_failure
from hapi.models.graph.views import Tree, build_tree, shadow
from hapi.models.random_draws import draws, python_generators

Means = Literal["meta", "fake", "real"]

_BATCHES = (2, 3)

_BATCH, _DEVICE = object(), object()


@dataclass(frozen=True)
class NodeFacts:
    """One node's result, as seen with batches of 2 and 3."""

    values: tuple[Any, Any]
    """Shape of a tensor as a tuple, or the value itself (lists as tuples), for each batch."""
    is_tensor: bool
    dtype: torch.dtype | None
    storages: frozenset[int]
    """The memory that the result lives in; results with common memory are views of each other."""
    writes: frozenset[int]
    """The memory of earlier results that this node changes in place."""
    random: bool
    mixes: bool
    """True when a sample's result depends on the other samples of its batch (BatchNorm without running statistics)."""
    combines: bool = False
    """True when it does so in another way, such as by the mean over the batch."""

    @property
    def holds_tensor(self) -> bool:
        """True when the value is a tensor or contains one."""
        return bool(self.storages)

    @property
    def batched(self) -> bool:
        """True for a tensor whose first dimension, and no other, is the batch."""
        if not self.is_tensor:
            return False
        small, large = self.values
        return bool(small) and small[0] == _BATCHES[0] and large == (_BATCHES[1], *small[1:])


class _Recorder(TorchDispatchMode):
    """Notes which operators draw random numbers or mix samples, and which memory is written."""

    def __init__(self, log: OperatorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = self.mixes = False
        self.written: set[int] = set()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _given(func, args, kwargs)
        self.random = self.random or draws(func, given)
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= storages_of(given.get(argument.name))
        if "batch_norm" in func.name():
            # Of InstanceNorm torch makes one over a single sample.
            self.mixes = self.mixes or (bool(given.get("training")) and given["input"].shape[0] > 1)
        known = meta_result(func, args, kwargs)
        result = func(*args, **kwargs) if known is None else known
        self._log.add(func, given, result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch asks. With True it imports its whole compiler, only to keep it away from this class.
        return False


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema."""
    return {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def storages_of(value: Any) -> set[int]:
    """Identities of the memory behind all tensors in ``value`` (a tensor, or lists, tuples, dicts)."""
    found: set[int] = set()
    if isinstance(value, torch.Tensor):
        found.add(value.untyped_storage()._cdata)
    elif isinstance(value, list | tuple):
        for item in value:
            found |= storages_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            found |= storages_of(item)
    return found


@dataclass
class _Observed:
    shape: Any
    is_tensor: bool
    dtype: torch.dtype | None
    storages: set[int]
    writes: set[int]
    random: bool
    draws: bool
    mixes: bool
    operations: Sequence[Operation]


Runs = tuple[dict[fx.Node, _Observed], dict[fx.Node, _Observed]]


def analyse(
    module: nn.Module, traced: Traced, input_shape: tuple[int, ...]
) -> tuple[dict[fx.Node, NodeFacts], dict[fx.Node, NodeFacts]]:
    """Return the facts about every node of the eval graph and of the train graph.

    Args:
        module: the traced module.
        traced: its graphs.
        input_shape: shape of one sample (C, H, W).

    Raises:
        ModelChoiceError: the model cannot run on such samples; the message has torch's reason.
    """
    tensors = [*module.parameters(), *module.buffers(), *traced.constants.values()]
    means: list[Means] = ["meta", "fake"] if any(t.is_meta for t in tensors) else ["meta", "fake", "real"]
    for kind in means:
        try:
            with without_fake_log(), torch.random.fork_rng(devices=[]) if kind == "real" else nullcontext():
                evaluation = _run(module, traced, traced.eval_graph, False, input_shape, kind)
                twin = _twin_runs(traced, evaluation)
                training = _run(module, traced, traced.train_graph, True, input_shape, kind, twin)
                return _facts(*evaluation), _facts(*training)
        except Exception as error:
            if kind == means[-1]:
                shape = "x".join(str(side) for side in input_shape)
                why = describe_failure(error)
                raise ModelChoiceError(f"the model cannot run on samples of shape {shape}: {why}") from error
    raise AssertionError("the last means returns or raises")


def _run(
    module: nn.Module,
    traced: Traced,
    graph: fx.Graph,
    training: bool,
    input_shape: tuple[int, ...],
    kind: Means,
    twin: Runs | None = None,
) -> Runs:
    """Values of every node with each batch.

    ``twin`` has the runs of a graph with the very same operations. If this graph gives the same with the
    small batch, it also does with the large one; that halves the slowest part (BatchNorm in train mode).
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else nullcontext()
    device = "meta" if kind == "meta" else "cpu"
    runs: list[dict[fx.Node, _Observed]] = []
    with fake, torch.no_grad():
        for batch in _BATCHES:
            if twin is not None and runs and _same_values(twin[0], runs[0]):
                runs.append(dict(zip(graph.nodes, twin[1].values(), strict=False)))
                continue
            root = _stand_in(module, traced, graph, kind)
            root.train(training)
            make = torch.rand if kind == "real" else torch.empty
            runs.append(_observe(graph, root, make((batch, *input_shape), device=device)))
    return runs[0], runs[1]


def _twin_runs(traced: Traced, runs: Runs) -> Runs | None:
    """``runs`` of the eval graph when the train graph has the same operations in the same order."""
    pairs = [[(n.op, n.target) for n in graph.nodes] for graph in (traced.eval_graph, traced.train_graph)]
    return runs if pairs[0] == pairs[1] else None


def _same_values(one: Mapping[fx.Node, _Observed], two: Mapping[fx.Node, _Observed]) -> bool:
    try:
        return all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(one.values(), two.values(), strict=True)
        )
    except (TypeError, ValueError, RuntimeError):
        return False  # values that cannot be compared: run it


def _facts(
    small: Mapping[fx.Node, _Observed], large: Mapping[fx.Node, _Observed]
) -> dict[fx.Node, NodeFacts]:
    flow = BatchFlow()
    return {
        node: NodeFacts(
            values=(seen.shape, large[node].shape),
            is_tensor=seen.is_tensor and large[node].is_tensor,
            dtype=seen.dtype,
            storages=frozenset(seen.storages),
            writes=frozenset(seen.writes),
            random=seen.random or large[node].random or (seen.draws and large[node].draws),
            mixes=seen.mixes,
            combines=flow.combines(seen.operations, large[node].operations),
        )
        for node, seen in small.items()
    }


def _stand_in(module: nn.Module, traced: Traced, graph: fx.Graph, kind: Means) -> Tree:
    """The graph's modules with other tensors: empty ones, or copies (training changes BatchNorm's)."""
    made: dict[int, torch.Tensor] = {}

    def substitute(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that stands in for a parameter or buffer; the same one each time."""
        if id(tensor) not in made:
            if kind == "real":
                made[id(tensor)] = tensor.detach().to("cpu", copy=True)
            else:
                # On one device wherever the real ones are, so that devices never disagree.
                device = "meta" if kind == "meta" else "cpu"
                size, stride = tensor.size(), tensor.stride()
                made[id(tensor)] = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        return made[id(tensor)]

    memo: dict[int, nn.Module] = {}
    leaves, tensors = references(graph)
    root = build_tree(module, leaves, tensors, traced.constants, lambda m: shadow(m, memo, substitute))
    for holder in root.modules():
        if isinstance(holder, Tree):
            registered: list[dict[str, Any]] = [holder._parameters, holder._buffers]
            for held in registered:
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = substitute(tensor)
    return root


def references(nodes: Any) -> tuple[list[str], list[str]]:
    """Paths of the modules that ``nodes`` (a graph or a list) call, and of the tensors that they read."""
    listed = list(nodes.nodes) if isinstance(nodes, fx.Graph) else list(nodes)
    leaves = [str(n.target) for n in listed if n.op == "call_module"]
    return leaves, [str(n.target) for n in listed if n.op == "get_attr"]


def _observe(graph: fx.Graph, root: Tree, x: torch.Tensor) -> dict[fx.Node, _Observed]:
    """Run the graph node by node. All results stay alive, so that memory identities are not reused."""
    results: dict[fx.Node, Any] = {}
    seen: dict[fx.Node, _Observed] = {}
    known, log = set[int](), OperatorLog()
    for node in graph.nodes:
        if node.op == "output":
            break
        before = python_generators()
        with _Recorder(log) as recorder:
            results[node] = value = x if node.op == "placeholder" else _call(node, root, results)
        storages = storages_of(value)
        seen[node] = _Observed(
            shape=_outline(value),
            is_tensor=isinstance(value, torch.Tensor),
            dtype=value.dtype if isinstance(value, torch.Tensor) else None,
            storages=storages,
            writes=recorder.written & known,
            random=recorder.random,
            draws=python_generators() != before,
            mixes=recorder.mixes,
            operations=log.taken(),
        )
        known |= storages
    return seen


def replay(
    module: nn.Module,
    traced: Traced,
    input_shape: tuple[int, ...],
    around: Callable[[fx.Node], AbstractContextManager[object]],
) -> None:
    """Run the eval graph for one sample on the meta device, node by node, each inside ``around(node)``.

    As in a real run, values that no later node reads are given up at once.

    Args:
        module: the traced module.
        traced: its graphs.
        input_shape: shape of one sample (C, H, W).
        around: returns the context for a node.
    """
    root = _stand_in(module, traced, traced.eval_graph, "meta")
    root.train(False)
    left = {node: len(node.users) for node in traced.eval_graph.nodes}
    results: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in traced.eval_graph.nodes:
            if node.op == "output":
                break
            with around(node):
                first = node.op == "placeholder"
                results[node] = (
                    torch.empty((1, *input_shape), device="meta") if first else _call(node, root, results)
                )
            for source in node.all_input_nodes:
                left[source] -= 1
                if not left[source]:
                    del results[source]
            if not node.users:
                del results[node]


def _outline(value: Any) -> Any:
    """The shape of a tensor, the outlines in a tuple or list, any other value as it is."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return tuple(_outline(item) for item in value) if isinstance(value, list | tuple) else value


def _call(node: fx.Node, root: Tree, results: Mapping[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, lambda n: results[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: results[n])
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(root)
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Derived:
    """Recipe that makes a plain value again beyond a cut, from the crossing tensor."""

    pattern: Any

    def build(self, graph: fx.Graph, crossing: fx.Node) -> Any:
        """The value as an argument of nodes in ``graph``: constants, and reads of ``crossing``."""
        return self._build(self.pattern, graph, crossing)

    def _build(self, pattern: Any, graph: fx.Graph, crossing: fx.Node) -> Any:
        if pattern is _BATCH:
            return graph.call_method("size", (crossing, 0))
        if pattern is _DEVICE:
            return graph.call_function(getattr, (crossing, "device"))
        if isinstance(pattern, tuple):
            return tuple(self._build(item, graph, crossing) for item in pattern)
        return pattern


def derive(facts: NodeFacts) -> Derived | None:
    """Return the recipe that makes a plain (tensor-free) value again beyond a cut; None when there is none."""
    if facts.holds_tensor:
        return None
    try:
        return Derived(_pattern(*facts.values))
    except ValueError:
        return None


def _pattern(small: Any, large: Any) -> Any:
    if isinstance(small, torch.device):
        return _DEVICE
    if isinstance(small, tuple | list) and isinstance(large, tuple | list) and len(small) == len(large):
        return tuple(_pattern(a, b) for a, b in zip(small, large, strict=True))
    if type(small) is not type(large) or not isinstance(
        small, int | float | str | bool | torch.dtype | torch.memory_format | None
    ):
        raise ValueError("not a plain value")
    if small == large:
        return small
    if (small, large) == _BATCHES:
        return _BATCH
    raise ValueError("depends on the batch in another way")
