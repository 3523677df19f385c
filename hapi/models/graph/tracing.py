"""The graphs of a module: one as it runs in eval mode, one as it runs in train mode.

``torch.fx`` bakes ``self.training`` into a graph (functional dropout, stochastic depth), so one graph cannot
serve both modes. A submodule that cannot be traced becomes a leaf of the graph, which merely leaves no cut
point inside it. Blocks need names only for a module whose own top ``forward`` cannot be traced.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hapi.errors import ModelError
from hapi.lazy_torchvision import vision

_MAX_ATTEMPTS = 64
"""Most submodules that are turned into leaves before tracing gives up."""

TRACE_LOCK = threading.RLock()
"""``torch.fx`` patches ``nn.Module`` while it traces: one trace at a time in a process."""


@dataclass
class Traced:
    """A module's two graphs, and the tensors they read that are neither parameters nor buffers."""

    eval_graph: fx.Graph
    train_graph: fx.Graph
    constants: dict[str, torch.Tensor]
    opaque: tuple[str, ...] = ()
    """Submodules (paths) that could not be traced and stand as leaves in the graphs."""
    sequential: bool = False
    """True when the graphs were put together from blocks, not traced."""
    always_eval: frozenset[str] = frozenset()
    """Submodules (paths) that the module's own ``train`` leaves in eval mode."""
    attributes: frozenset[str] = frozenset()
    """Tensors of ``constants`` that are attributes of the module, by path; forward makes the others."""

    def over(self, module: nn.Module) -> Traced:
        """The same graphs for another ``module`` of the same structure, with its attributes."""
        own = {name: _attribute(module, name).detach() for name in self.attributes}
        return replace(self, constants={**self.constants, **own})


NO_GRAD = "hapi_no_grad"
"""Key in the ``meta`` of nodes that run without gradients, as the model's code has them under ``torch.no_grad``."""


class TraceFailure(Exception):
    """A module's own forward cannot be traced; the message has the reason."""


class _Tracer(fx.Tracer):
    """``fx.Tracer`` that keeps out of other threads' way and out of the module's attributes."""

    proxy_buffer_attributes = True

    def __init__(self, opaque_paths: set[str], opaque_types: set[type], functions: Sequence[Any]) -> None:
        super().__init__(autowrap_functions=tuple(functions))
        self.constants: dict[str, torch.Tensor] = {}
        self.failed: str | None = None
        self._opaque_paths = opaque_paths
        self._opaque_types = tuple(opaque_types)
        self._thread = threading.get_ident()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        """Do the same as fx, but give an optional argument, which is never passed, its default value."""
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        parameters = inspect.signature(inspect.unwrap(root_fn)).parameters
        first = 2 if is_module else 1  # behind the module and its input
        for i, argument in enumerate(args[first:], first):
            if argument.node.args:
                args[i] = parameters[argument.node.target].default
                made = argument.node.all_input_nodes  # of a default that is a tensor
                for node in (argument.node, *made):
                    self.graph.erase_node(node)
        return function, args

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Do the same as fx, which loses the modes of torch that code turns on or off by ``with``.

        Raises:
            RuntimeError: the code turns autocast on.
        """
        _check_autocast()
        node: fx.Node = super().create_node(*args, **kwargs)
        if not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._opaque_paths or isinstance(m, self._opaque_types):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do the same as fx, but in the tracing thread only."""
        # fx patches nn.Module.__call__ for the whole process; what other threads compute is not ours.
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        _check_autocast()  # not a failure of the module that is called
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        # fx would store a tensor made during tracing as an attribute of the user's module.
        if isinstance(a, torch.Tensor) and a not in self.tensor_attrs and not self._is_registered(a):
            name = f"_constant{len(self.constants)}"
            self.constants[name] = a
            self.tensor_attrs[a] = name
        return super().create_arg(a)

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or any(tensor is buffer for buffer in self.root.buffers())


def _check_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError("forward turns autocast on, which its graph cannot hold")


class _NoRandomness(TorchDispatchMode):
    """Refuses random numbers drawn while tracing: they would be drawn once and become constants."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"forward draws random numbers that do not depend on its input ({func})")
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see hapi.models.graph.analysis


def trace(module: nn.Module, leaf_types: Sequence[type] = (), functions: Sequence[Any] = ()) -> Traced:
    """Trace ``module`` in eval and in train mode; its training flags are then as before.

    Args:
        module: the model.
        leaf_types: module classes that are never traced into.
        functions: Python functions that the graph calls as they are.

    Raises:
        TraceFailure: the module's own forward cannot be traced.
    """
    paths: set[str] = set()
    types: set[type] = set(leaf_types) | _standard_leaves()
    for _ in range(_MAX_ATTEMPTS):
        tracers: list[_Tracer] = []
        graphs: list[fx.Graph] = []
        failure: Exception | None = None
        for training in (False, True):
            tracer = _Tracer(paths, types, functions)
            try:
                graphs.append(_graph_of(module, tracer, training))
            except Exception as error:
                failure = error
                if not tracer.failed:
                    raise TraceFailure(describe_failure(error)) from error
                _make_opaque(module, tracer.failed, paths, types)
                break
            tracers.append(tracer)
        if failure is None:
            return _traced(module, graphs, tracers)
    raise TraceFailure(f"more than {_MAX_ATTEMPTS} of its submodules cannot be traced")


@contextmanager
def _plain_modes(module: nn.Module, training: bool) -> Iterator[None]:
    """Trace in train or eval mode; what the caller has turned on or off by ``with`` is not the model's."""
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        training_mode(module, training),
        _NoRandomness(),  # type: ignore[no-untyped-call]
    ):
        yield


def _graph_of(module: nn.Module, tracer: _Tracer, training: bool) -> fx.Graph:
    """The graph in train or eval mode, without a change of the module.

    Raises:
        RuntimeError: forward assigned a buffer anew, so that a value of the trace would be in its place; its module, if
            it is not the whole, becomes the tracer's ``failed``.
    """
    before = [(path, inner, dict(inner._buffers)) for path, inner in module.named_modules()]
    assigned: list[tuple[str, str]] = []
    try:
        with TRACE_LOCK, _plain_modes(module, training):
            graph: fx.Graph = tracer.trace(module)
    finally:
        for path, inner, buffers in before:
            for name, buffer in buffers.items():
                if inner._buffers.get(name) is not buffer:
                    inner._buffers[name] = buffer
                    assigned.append((path, name))
    if assigned:
        path, name = assigned[0]
        tracer.failed = tracer.failed or path or None
        raise RuntimeError(
            f"forward assigns its buffer {name!r} anew; change it in place, as in self.{name}.copy_(value)"
        )
    return graph


def _make_opaque(module: nn.Module, path: str, paths: set[str], types: set[type]) -> None:
    failed = module.get_submodule(path)
    # All blocks of one user class fail alike; torch's containers (Sequential) only by path.
    if type(failed).__module__.split(".")[0] == "torch" or isinstance(module, type(failed)):
        paths.add(path)
    else:
        types.add(type(failed))


def _traced(module: nn.Module, graphs: list[fx.Graph], tracers: list[_Tracer]) -> Traced:
    for graph, mode in zip(graphs, ("eval", "train"), strict=True):
        _check_form(graph, mode)
    constants: dict[str, torch.Tensor] = {}
    attributes: set[str] = set()
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for graph, tracer, mode in zip(graphs, tracers, ("eval", "train"), strict=True):
        for node in graph.nodes:
            if node.op != "get_attr" or node.target in known:
                continue
            name = str(node.target)
            value = tracer.constants.get(name)
            if value is None:
                value = _attribute(module, name)
                attributes.add(name)
            else:
                # The two traces number their constants independently.
                name = node.target = f"{name}_{mode}"
            constants[name] = value.detach()
    leaves = {str(n.target) for n in graphs[0].nodes if n.op == "call_module"}
    opaque = [p for p in sorted(leaves) if not _is_library_leaf(module.get_submodule(p))]
    return Traced(
        graphs[0],
        graphs[1],
        constants,
        tuple(opaque),
        always_eval=_always_eval(module),
        attributes=frozenset(attributes),
    )


def _always_eval(module: nn.Module) -> frozenset[str]:
    with training_mode(module, True):
        named = module.named_modules(remove_duplicate=False)
        return frozenset(path for path, inner in named if path and not inner.training)


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise TraceFailure(f"forward uses the attribute {path!r}, which is not a tensor, as a value")
    return value


def _check_form(graph: fx.Graph, mode: str) -> None:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    required = [n for n in inputs if not n.args]
    if len(required) != 1 or inputs[0] is not required[0]:
        raise ModelError(
            f"the model's forward takes {len(required)} inputs; Hapi splits models of one tensor"
        )
    result = graph.output_node().args[0]
    if not isinstance(result, fx.Node):
        made = type(result).__name__.removeprefix("immutable_")  # fx's own lists and dicts
        raise ModelError(
            f"in {mode} mode the model returns a {made}, not one tensor; wrap it in a module that returns"
            " the tensor to train on (for auxiliary heads: build it without them)"
        )


def chain(module: nn.Module, blocks: Sequence[str]) -> Traced:
    """Return the graphs of running the submodules ``blocks`` one after the other, for a module that cannot be
    traced.
    """
    graphs = []
    for _ in range(2):
        graph = fx.Graph()
        value = graph.placeholder("x")
        for path in blocks:
            value = graph.create_node("call_module", path, (value,))
            value.meta["nn_module_stack"] = {path: (path, type(module.get_submodule(path)))}
        graph.output(value)
        graphs.append(graph)
    return Traced(graphs[0], graphs[1], {}, sequential=True, always_eval=_always_eval(module))


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set every submodule to train or eval mode, and restore each one's own mode afterwards."""
    before = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for submodule, flag in before:
            submodule.training = flag


def _standard_leaves() -> set[type]:
    return {vision("torchvision.ops").StochasticDepth}


def _is_library_leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.", "torchvision.ops"))


def describe_failure(error: BaseException) -> str:
    """Describe an error in one line, with the innermost line of code outside torch that led to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_internal(f.filename)]
    where = (
        f" at {frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})" if frames else ""
    )
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def _is_internal(filename: str) -> bool:
    internal = ("/torch/", "\\torch\\", "/hapi/models/", "\\hapi\\models\\")
    return filename.startswith("<") or any(part in filename for part in internal)
