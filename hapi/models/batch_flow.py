"""Samples of a batch that are combined, found by the operators of two runs of one code with batches of two sizes.

A tensor whose shape does not follow the batch, although it was made from one that does (the mean over a batch, its
largest value), holds something of every sample. An operator that computes samples with such a tensor combines them. So
does one that computes along a dimension that follows the batch: a softmax over it, a product of matrices that adds it
up, attention to it. Sorting and choosing by indices does not: experts take samples in another order, and put them back.
Of tensors whose shapes depend on their values nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

_MAKERS = ("new_", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "scalar_tensor")
"""Beginnings of the names of operators that take no values, if their names do not end in ``_like``."""

_ALONG_DIMENSIONS = {
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin", "_cummax_helper",
    "_cummin_helper", "logcumsumexp", "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax",
    "argmin", "var", "std", "var_mean", "std_mean", "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian",
    "mode", "kthvalue", "topk", "flip", "roll",
}  # fmt: skip
"""Operators that compute each value from others along the dimensions that they are given."""
_ALONG = {
    "mm": ((0, 1),), "bmm": ((0, 2),), "mv": ((0, 1),),
    "addmm": ((1, 1),), "addmv": ((1, 1),), "baddbmm": ((1, 2),),
    "_native_multi_head_attention": ((0, 1),), "_transformer_encoder_layer_fwd": ((0, 1),),
}  # fmt: skip
"""Operands of others, with the dimensions that they compute along."""
_ATTENTION, _KEYS = "_scaled_dot_product", ((1, -2),)


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
    along: tuple[tuple[int, int], ...]
    """Places of operands, and their dimensions along which values are computed together."""
    operands: tuple[_Operand, ...]
    results: tuple[_Operand, ...]


class OperatorLog:
    """Operators of one run."""

    def __init__(self) -> None:
        self._numbers: Any = WeakIdKeyDictionary()
        self._next = count()
        self._operations: list[Operation] = []

    def add(self, func: Any, given: Mapping[str, Any], results: Any) -> None:
        """Note that ``func`` of torch was called with the arguments ``given``, in the order of its schema."""
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        made = name.startswith(_MAKERS) or name.endswith("_like")
        self._operations.append(
            Operation(
                name,
                space == "quantized" and "dynamic" in name,  # which takes its scale from the batch
                not made and torch.Tag.dynamic_output_shape not in func.tags,
                _along(name, given) if space == "aten" else (),
                tuple(map(self._operand, _tensors_in(given))),
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


def _along(name: str, given: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Places of operands of an operator, and dimensions along which it computes."""
    if name.startswith(_ATTENTION):
        return _KEYS
    dimensions = given.get("dim", given.get("dims")) if name in _ALONG_DIMENSIONS else None
    if dimensions is None:
        return _ALONG.get(name, ())
    return tuple((0, one) for one in (dimensions if isinstance(dimensions, list | tuple) else [dimensions]))


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
        along = any(of_batch) and _follows_along(small, large)
        return small.combines or ((takes or along) and any(result_of_batch))


def _follows(small: Sequence[_Operand], large: Sequence[_Operand]) -> list[bool]:
    return [one.shape != two.shape for one, two in zip(small, large, strict=False)]


def _follows_along(small: Operation, large: Operation) -> bool:
    """Whether a dimension follows the batch along which an operator computes."""
    pairs = ((small.operands[place].shape, large.operands[place].shape, at) for place, at in small.along)
    return any(len(one) > 0 and one[at] != two[at] for one, two, at in pairs)
