"""Results of common operations on the meta device: shape, dtype and strides, without torch's own rules.

Torch's rules for these are written in Python. They take 0.3 to 5 ms a call, most of the time of analysing a
model, and the first of them imports torch's compiler, which takes more than a second. Operations that are not
covered here, or not in this plain form, are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Rule = Callable[..., Any]
"""Takes an operation's arguments and gives its result, or None for a form that torch has to judge."""

aten = torch.ops.aten


def meta_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of the operation ``func`` (an ``OpOverload``) on the meta device, or None when it is unknown here."""
    rule = _RULES.get(func)
    if rule is None or not _plain(args[:1] if rule in _FLOAT_FIRST else args):
        return None
    return rule(*args, **kwargs)


def _plain(args: Sequence[Any]) -> bool:
    """Ordinary meta tensors of one floating-point type only: no promotion, no second device."""
    tensors = list(_tensors(args))
    return bool(tensors) and all(
        t.is_meta
        and type(t) in (torch.Tensor, nn.Parameter)
        and t.dtype == tensors[0].dtype
        and t.is_floating_point()
        for t in tensors
    )


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _contiguous(*tensors: torch.Tensor) -> bool:
    return all(t.is_contiguous() for t in tensors)


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _pointwise(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    kind = dtype or x.dtype
    if _contiguous(x):
        return torch.empty(x.shape, dtype=kind, device="meta")
    order = _memory_order(x.shape, [x.stride()])
    return torch.empty_permuted(x.shape, order, dtype=kind, device="meta")


def _like(x: torch.Tensor, **options: Any) -> torch.Tensor | None:
    plain = options.pop("memory_format", None) in (None, torch.preserve_format) and not any(options.values())
    return _pointwise(x) if plain else None


def _looked_up(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Rows of a table."""
    (index, *more) = indices
    if more or index is None or not index.is_meta or index.dtype != torch.int64 or x.dim() == 0:
        return None
    return _empty(x, (*index.shape, *x.shape[1:])) if _contiguous(x, index) else None


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor | None:
    return _empty(x, x.shape) if _contiguous(x) else None


def _filled(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor | None:
    wider = mask.dim() > x.dim() or any(
        a not in (b, 1) for a, b in zip(mask.shape[::-1], x.shape[::-1], strict=False)
    )
    return None if wider else _same(x)


def _changed(x: torch.Tensor, *others: Any) -> torch.Tensor | None:
    """``x`` itself, which an in-place operation changes, unless the result is larger."""
    fits = all(t.dim() == 0 or t.shape == x.shape for t in others if isinstance(t, torch.Tensor))
    return x if fits else None


def _compared(x: torch.Tensor, other: Any) -> torch.Tensor | None:
    return _pointwise(x, dtype=torch.bool)


def _broadcast(x: torch.Tensor, other: Any, **options: Any) -> torch.Tensor | None:
    if isinstance(other, int | float) and not options:
        return _pointwise(x)
    if options or not isinstance(other, torch.Tensor):
        return None
    if x.shape == other.shape and x.stride() == other.stride():
        return _pointwise(x)
    sides = max(x.dim(), other.dim())
    padded = [(1,) * (sides - t.dim()) + tuple(t.shape) for t in (x, other)]
    if any(a != b and 1 not in (a, b) for a, b in zip(*padded, strict=True)):
        return None  # torch says what is wrong
    shape = [b if a == 1 else a for a, b in zip(*padded, strict=True)]
    order = _memory_order(shape, [t.expand(shape).stride() for t in (x, other)])
    return torch.empty_permuted(shape, order, dtype=x.dtype, device="meta")


def _memory_order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The result's dimensions, outermost first, as torch's TensorIterator orders them: by the first operand that
    tells two dimensions apart (0 is a side that was broadcast)."""

    def inner_first(one: int, two: int) -> int:
        """Compare how far inside in memory two dimensions lie: negative for ``one``, positive for ``two``."""
        for stride in strides:
            if stride[one] == 0 or stride[two] == 0:
                continue
            if stride[one] != stride[two]:
                return -1 if stride[one] < stride[two] else 1
            if shape[one] > shape[two]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        moved = i
        for j in reversed(range(i)):
            verdict = inner_first(order[j], order[moved])
            if verdict > 0:
                order[j], order[moved] = order[moved], order[j]
                moved = j
            elif verdict < 0:
                break
    return order[::-1]


def _reduced(
    x: torch.Tensor, dims: Sequence[int] | None, keep: bool, dtype: object = None
) -> torch.Tensor | None:
    if dtype is not None or any(not -x.dim() <= d < x.dim() for d in dims or ()):
        return None
    gone = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    sides = enumerate(x.shape)
    return _empty(x, [1 if i in gone else n for i, n in sides if keep or i not in gone])


def _mean(x: torch.Tensor, dims: Any, keep: bool = False, **options: Any) -> torch.Tensor | None:
    return _reduced(x, dims, keep, options.get("dtype"))


def _norm(x: torch.Tensor, order: Any = 2, dims: Any = None, keep: bool = False, **options: Any) -> Any:
    return _reduced(x, dims, keep, options.get("dtype"))


def _concatenated(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first = parts[0]
    if not -first.dim() <= dim < first.dim() or any(part.dim() != first.dim() for part in parts):
        return None
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(first.dim())
    if last is not None and any(part.is_contiguous(memory_format=last) for part in parts):
        return None  # the result may be so too
    shape, dim = list(first.shape), dim % first.dim()
    for part in parts[1:]:
        if any(i != dim and a != b for i, (a, b) in enumerate(zip(shape, part.shape, strict=True))):
            return None
        shape[dim] += part.shape[dim]
    return _empty(first, shape)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor | None:
    if (
        a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != b.shape[0]
        or bias.shape not in ((b.shape[1],), (1,), ())
    ):
        return None
    return _empty(a, (a.shape[0], b.shape[1]))


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor | None:
    sides, kernel = x.shape[2:], weight.shape[2:]
    if transposed or len(sides) != 2 or len(kernel) != 2 or not _contiguous(weight):
        return None
    if (
        x.shape[1] != weight.shape[1] * groups
        or weight.shape[0] % groups
        or {len(stride), len(padding)} != {2}
    ):
        return None
    if len(dilation) != 2 or min(*stride, *dilation, 1 + padding[0], 1 + padding[1]) < 1:
        return None
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(sides, padding, dilation, kernel, stride, strict=True)
    ]
    if min(out) < 1 or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
        return None
    return _empty(x, (x.shape[0], weight.shape[0], *out))


def _max_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    out = _pooled_sides(x, (kernel, stride or kernel, padding, dilation), ceil_mode)
    if out is None:
        return None
    shape = (*x.shape[:2], *out)
    return _empty(x, shape), torch.empty(shape, dtype=torch.int64, device="meta")


def _average_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor | None:
    out = _pooled_sides(x, (kernel, stride or kernel, padding, (1,)), ceil_mode)
    return None if out is None or divisor_override == 0 else _empty(x, (*x.shape[:2], *out))


def _adaptive_pool(x: torch.Tensor, sides: Sequence[int]) -> torch.Tensor | None:
    if x.dim() != 4 or not _contiguous(x) or len(sides) != 2 or min(*sides, *x.shape) < 1:
        return None
    return _empty(x, (*x.shape[:2], *sides))


def _pooled_sides(x: torch.Tensor, geometry: Sequence[Sequence[int]], ceil_mode: bool) -> list[int] | None:
    """Height and width after a pooling of (kernel, stride, padding, dilation)."""
    if x.dim() != 4 or not _contiguous(x):
        return None
    values = [list(v) * 2 if len(v) == 1 else list(v) for v in geometry]
    if any(len(v) != 2 for v in values) or min(values[0] + values[1] + values[3]) < 1:
        return None
    out: list[int] = []
    for side, k, s, p, d in zip(x.shape[2:], *values, strict=True):
        if p < 0 or 2 * p > k:
            return None
        room = side + 2 * p - d * (k - 1) - 1
        count = -(-room // s) + 1 if ceil_mode else room // s + 1
        if ceil_mode and (count - 1) * s >= side + p:
            count -= 1  # the last window must begin inside the input or its left padding
        out.append(count)
    return out if min(out) > 0 else None


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[1]):
        return None
    return _empty(a, (a.shape[0], a.shape[1], b.shape[2]))


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return None
    return _empty(a, (a.shape[0], b.shape[1]))


def _layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    inner = len(shape)
    if tuple(x.shape[x.dim() - inner :]) != tuple(shape):
        return None
    statistics = [*x.shape[: x.dim() - inner], *[1] * inner]
    return _empty(x, x.shape), _empty(x, statistics), _empty(x, statistics)


def _batch_norm(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    channels = x.shape[1] if x.dim() > 1 else -1
    if any(t is not None and tuple(t.shape) != (channels,) for t in (weight, bias, mean, variance)):
        return None
    if not _contiguous(x) or (training and math.prod(x.shape) <= channels):
        return None
    saved = (channels,)
    return _empty(x, x.shape), _empty(x, saved), _empty(x, saved)


_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(
        (
            aten.gelu.default,
            aten.relu.default,
            aten.silu.default,
            aten.sigmoid.default,
            aten.hardswish.default,
            aten.hardsigmoid.default,
            aten.hardtanh.default,
            aten.clamp.default,
            aten.clamp_min.default,
            aten.exp.default,
            aten.tanh.default,
            aten.mul.Scalar,
        ),
        _pointwise,
    ),
    **dict.fromkeys((aten.roll.default, aten._softmax.default, aten._safe_softmax.default), _same),
    aten.masked_fill.Scalar: _filled,
    **dict.fromkeys(
        (
            aten.hardswish_.default,
            aten.hardtanh_.default,
            aten.silu_.default,
            aten.relu_.default,
            aten.add_.Tensor,
            aten.mul_.Tensor,
            aten.div_.Tensor,
            aten.div_.Scalar,
        ),
        _changed,
    ),
    **dict.fromkeys((aten.eq.Scalar, aten.ne.Scalar), _compared),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _broadcast),
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _norm,
    aten.cat.default: _concatenated,
    aten.addmm.default: _addmm,
    aten.index.Tensor: _looked_up,
    aten.empty_like.default: _like,
    aten.avg_pool2d.default: _average_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_pool,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_batch_norm.default: _batch_norm,
}

_FLOAT_FIRST = (_filled, _looked_up)
"""Rules that take a mask or an index beside one floating-point tensor."""
