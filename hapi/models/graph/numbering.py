"""Layers 1 to L as the stretches between chosen cuts: operations, tensors and randomness of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from hapi.models.graph.cuts import Crossings, Cut, CutPoint
from hapi.models.graph.segment import slice_nodes
from hapi.models.graph.tensor_table import TensorTable

GraphSlice = tuple[Crossings, CutPoint | None, CutPoint]
"""A graph, where a stretch of it begins (None: at its input) and where it ends."""


@dataclass(frozen=True)
class Layer:
    """One layer: the operations between the cut before it and its own."""

    index: int
    """1 for the first."""
    name: str
    output_shape: tuple[int, ...]
    """Shape of one sample of its output."""
    dtype: torch.dtype
    tensors: tuple[str, ...]
    """Parameters and buffers that it reads, by path, in order of use; the first name of a shared one."""
    parameter_count: int
    parameter_bytes: int
    """Bytes of parameters and buffers that no earlier layer reads."""
    random: bool
    """True when it draws random numbers in train mode (dropout, stochastic depth)."""
    mixes: bool
    """True when in eval mode a sample's result depends on its batch (BatchNorm without running statistics)."""
    always_random: bool = False
    """True when it draws random numbers in eval mode, too."""
    combines: bool = False
    """True when in eval mode it computes with all samples of a batch together, as with their mean."""

    @property
    def output_bytes(self) -> int:
        """Bytes of one sample of its output."""
        return element_count(self.output_shape) * self.dtype.itemsize


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of ``shape``."""
    count = 1
    for side in shape:
        count *= side
    return count


class Numbering:
    """The cuts that end layers 1 to L, in the graphs of both modes."""

    def __init__(self, in_eval: Crossings, in_train: Crossings, chosen: Sequence[tuple[str, Cut]]) -> None:
        """Number the layers ``chosen``: name and end of each."""
        self._eval, self._train = in_eval, in_train
        self.names = [name for name, _ in chosen]
        self._ends = [cut for _, cut in chosen]

    def cut_points(self) -> list[CutPoint | None]:
        """Begins of the layers in the eval graph, and the end of the last one; [L + 1]."""
        return [None, *(cut.eval_point for cut in self._ends)]

    def graph_slices(self, start: int, stop: int) -> tuple[GraphSlice, GraphSlice]:
        """Layers ``start + 1`` to ``stop`` in eval and in train mode."""
        before = self._ends[start - 1] if start else None
        after = self._ends[stop - 1] if stop else None
        return (
            (
                self._eval,
                before.eval_point if before else None,
                after.eval_point if after else CutPoint(self._eval.nodes[0], 0),
            ),
            (
                self._train,
                before.train_point if before else None,
                after.train_point if after else CutPoint(self._train.nodes[0], 0),
            ),
        )

    def ends(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the input and the last node of each layer, in eval and in train mode; [L + 1] each."""
        return (
            [self._eval.nodes[0], *(cut.eval_point.node for cut in self._ends)],
            [self._train.nodes[0], *(cut.train_point.node for cut in self._ends)],
        )

    def nodes(self, index: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes that layer ``index`` (from 1) runs in eval and in train mode."""
        in_eval, in_train = self.graph_slices(index - 1, index)
        return slice_nodes(*in_eval), slice_nodes(*in_train)

    def read(
        self, index: int, tensors: TensorTable, constants: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Return those of ``tensors`` and ``constants`` that layer ``index`` (from 1) reads, in order of use."""
        in_eval, in_train = self.nodes(index)
        return _read([*in_eval, *in_train], tensors, constants)

    def layers(self, tensors: TensorTable, constants: Collection[str]) -> tuple[Layer, ...]:
        """Return the description of each layer."""
        layers: list[Layer] = []
        seen: set[str] = set()
        for index, (name, end) in enumerate(zip(self.names, self._ends, strict=True), start=1):
            in_eval, in_train = self.nodes(index)
            read, _ = _read([*in_eval, *in_train], tensors, constants)
            new = [tensors.get(n) for n in read if n not in seen]
            seen.update(read)
            facts = self._eval.facts[end.eval_point.node]
            layers.append(
                Layer(
                    index=index,
                    name=name,
                    output_shape=tuple(facts.values[0][1:]),
                    dtype=facts.dtype or torch.float32,
                    tensors=tuple(read),
                    parameter_count=sum(t.numel() for t in new if isinstance(t, nn.Parameter)),
                    parameter_bytes=sum(t.numel() * t.itemsize for t in new),
                    random=any(self._train.facts[n].random for n in in_train),
                    mixes=any(self._eval.facts[n].mixes for n in in_eval),
                    always_random=any(self._eval.facts[n].random for n in in_eval),
                    combines=any(self._eval.facts[n].combines for n in in_eval),
                )
            )
        return tuple(layers)


def _read(
    nodes: Sequence[fx.Node], tensors: TensorTable, constants: Collection[str]
) -> tuple[list[str], list[str]]:
    named: list[str] = []
    plain: list[str] = []
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module":
            named += tensors.inside(target)
        elif node.op == "get_attr" and target in constants:
            plain.append(target)
        elif node.op == "get_attr":
            named.append(tensors.first_name(target))
    return list(dict.fromkeys(named)), list(dict.fromkeys(plain))
