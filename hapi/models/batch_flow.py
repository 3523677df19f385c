"""Samples of a batch that are combined, found by the operators of two runs of one code with batches of two sizes.

A tensor whose shape does not follow the batch, although it was made from one that does (the mean over a batch, its
largest value), holds something of every sample. An operator that computes samples with such a tensor combines them. Of
tensors whose shapes depend on their values nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

_MAKERS = ("new_", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "scalar_tensor")
"""Beginnings of the names of operators that take no values, if their names do not end in ``_like``."""


class _Operand(NamedTuple):
    number: int
    """The tensor's, in the order in which a run met them."""
    shape: tuple[int, ...]


class Operation(NamedTuple):
    """One operator of a run."""

    name: str
    combines: bool
    """True for one that combines the samples whatever their shapes are."""
    valued: bool
    """True where the values of the results follow from the operands'."""
    operands: tuple[_Operand, ...]
    results: tuple[_Operand, ...]


class OperatorLog:
    """Operators of one run."""

    def __init__(self) -> None:
        self._numbers: Any = WeakIdKeyDictionary()
        self._next = count()
        self._operations: list[Operation] = []

    def add(self, func: Any, operands: Any, results: Any) -> None:
        """Note that ``func`` of torch was called."""
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        made = name.startswith(_MAKERS) or name.endswith("_like")
        self._operations.append(
            Operation(
                name,
                space == "quantized" and "dynamic" in name,  # which takes its scale from the batch
                not made and torch.Tag.dynamic_output_shape not in func.tags,
                tuple(map(self._operand, _tensors_in(operands))),
                tuple(map(self._operand, _tensors_in(results))),
            )
        )

    def _operand(self, tensor: torch.Tensor) -> _Operand:
        number = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = next(self._next)
        return _Operand(number, () if tensor.is_nested else tuple(tensor.shape))

    def taken(self) -> tuple[Operation, ...]:
        """Return the operators since the last call."""
        found, self._operations = tuple(self._operations), []
        return found


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


class BatchFlow:
    """Follows tensors that hold something of all samples through two runs, from their beginning."""

    def __init__(self) -> None:
        self._of_all: set[int] = set()
        """Numbers of these tensors."""

    def combines(self, small: Sequence[Operation], large: Sequence[Operation]) -> bool:
        """Return whether some of the next operators of both runs combine the samples of a batch."""
        if [one.name for one in small] != [one.name for one in large]:
            return False  # code that looks at its data went two ways
        combined = [self._follow(one, two) for one, two in zip(small, large, strict=True)]
        return any(combined)

    def _follow(self, small: Operation, large: Operation) -> bool:
        if not small.valued:
            return False
        of_batch = _follows(small.operands, large.operands)
        takes = any(operand.number in self._of_all for operand in small.operands)
        result_of_batch = _follows(small.results, large.results)
        for one, two in zip(small.results, large.results, strict=False):
            if one.shape == two.shape and (any(of_batch) or takes):
                self._of_all.add(one.number)
        return small.combines or (takes and any(result_of_batch))


def _follows(small: Sequence[_Operand], large: Sequence[_Operand]) -> list[bool]:
    return [one.shape != two.shape for one, two in zip(small, large, strict=False)]
