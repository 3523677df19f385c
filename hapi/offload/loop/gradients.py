"""The ``grad`` of a parameter whose gradient was handed over: its form, and notes of what a loop does to it.

A view of it, ``detach()`` and ``.data`` included, stands for a part of the same gradient: whatever changes the view
changes the gradient, as in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hapi.offload.failures import GradientGoneError

_aten = torch.ops.aten
_Tensors = Sequence[torch.Tensor]


class GradientChange(NamedTuple):
    """An elementwise change in place, to be applied when the gradient is used: ``value * gradient`` and the like."""

    name: str
    operands: tuple[float | None, ...]
    """Numbers, as float64 of what was given."""

    def apply(self, gradient: torch.Tensor) -> None:
        """Change ``gradient`` as the loop would have."""
        _CHANGES[self.name](gradient, self.operands)


_CHANGES: Mapping[str, Callable[[torch.Tensor, Any], object]] = {
    "mul": lambda gradient, values: gradient.mul_(values[0]),
    "mul_tensor": lambda gradient, values: gradient.mul_(_scalar(values[0], gradient)),
    "div": lambda gradient, values: gradient.div_(values[0]),
    "div_tensor": lambda gradient, values: gradient.div_(_scalar(values[0], gradient)),
    "clamp": lambda gradient, values: gradient.clamp_(*values),
}


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A tensor of no dimension: it does not widen ``like``, and its arithmetic is that of the loop's own."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


class GradientSource(Protocol):
    """A parameter's gradient, wherever it is."""

    def norm(self) -> torch.Tensor:
        """Return the 2-norm before the changes that were noted, a tensor of no dimension in the gradient's type."""

    def value(self) -> torch.Tensor:
        """Return the gradient with its changes, as a tensor of its own."""

    def replace(self, gradient: torch.Tensor) -> None:
        """Take a gradient in the place of the one that was handed over."""

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the gradient of a further backward pass."""

    def note(self, change: GradientChange) -> None:
        """Remember a change."""

    @property
    def changes(self) -> Sequence[GradientChange]:
        """Changes so far."""

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of it in memory."""


class DroppedGradient:
    """Source of a gradient whose place another one has taken: anything that is asked of it is refused."""

    def __init__(self, name: str) -> None:
        """``name`` is the parameter's."""
        self._name = name

    def __getattr__(self, asked: str) -> Any:
        """Refuse."""
        raise GradientGoneError(
            f"this gradient of {self._name} was dropped when zero_grad() or another gradient took its place: copy "
            "what is used longer, parameter.grad.clone()"
        )


class OffloadedGradient(torch.Tensor):
    """A gradient without bytes: norms and elementwise changes are answered from notes, anything else reads it back.

    ``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_``, ``torch.amp.GradScaler`` and further backward passes work
    on it as on any gradient.
    """

    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """Lead from the whole gradient to the part that this one stands for; empty for the whole."""
    _source: GradientSource
    _whole: OffloadedGradient | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, source: GradientSource) -> OffloadedGradient:
        """Make the gradient of ``parameter``."""
        made = _without_bytes(cls, parameter, parameter.device)
        made.views, made._source, made._whole = (), source, None
        return made

    def view_of(
        self, form: torch.Tensor, *views: Callable[[torch.Tensor], torch.Tensor]
    ) -> OffloadedGradient:
        """Return what stands for a view of it, which has ``form``."""
        made = _without_bytes(type(self), form, self.device)
        made.views, made._whole = (*self.views, *views), self.whole
        return made

    @property
    def whole(self) -> OffloadedGradient:
        """The gradient that it is a part of."""
        return self if self._whole is None else self._whole

    @property
    def source(self) -> GradientSource:
        """The parameter's gradient."""
        return self.whole._source

    def drop(self, name: str) -> None:
        """Stand for no gradient any more, nor do its views."""
        self._source = DroppedGradient(name)

    @property
    def data(self) -> OffloadedGradient:
        """Itself, without autograd."""
        return self.view_of(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Take other values."""
        if not (isinstance(values, OffloadedGradient) and values.stands_for(self)):
            self.copy_(values)

    def stands_for(self, other: OffloadedGradient) -> bool:
        """Return whether both are the same part of one gradient."""
        return self.source is other.source and not self.views and not other.views

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, which cannot be written: changes of it would not reach the gradient."""
        found = self.clone().numpy(force=force)
        found.setflags(write=False)
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return its form; the bytes may be on a disk."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer an operator of torch."""
        first = args[0] if args and isinstance(args[0], OffloadedGradient) else None
        answer = _ANSWERS.get(func)
        if answer is not None and not (first is not None and first.views):
            found = answer(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        if func.is_view and first is not None:
            return _viewed(func, first, args[1:], kwargs or {})
        return _on_values(func, args, kwargs or {})


def _without_bytes(cls: Any, form: torch.Tensor, device: torch.device) -> OffloadedGradient:
    made: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
        cls,
        form.shape,
        strides=form.stride(),
        storage_offset=form.storage_offset(),
        dtype=form.dtype,
        device=device,
    )
    return made


def _viewed(func: Any, gradient: OffloadedGradient, more: Any, kwargs: dict[str, Any]) -> Any:
    """Return what stands for a view of a gradient, or for each of several."""
    whole = gradient.whole
    form = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
    for view in gradient.views:
        form = view(form)
    found = func(form, *more, **kwargs)
    if isinstance(found, torch.Tensor):
        return gradient.view_of(found, lambda values: func(values, *more, **kwargs))
    return [
        gradient.view_of(one, lambda values, at=at: func(values, *more, **kwargs)[at])  # type: ignore[misc]
        for at, one in enumerate(found)
    ]


def own_gradient(parameter: torch.Tensor, offloaded: OffloadedGradient | None) -> torch.Tensor | None:
    """Return ``parameter.grad``, for which nothing but its own gradient stands without bytes.

    Args:
        parameter: whose ``grad`` a loop may have set.
        offloaded: its gradient that was handed over, if there is one.
    """
    found = parameter.grad
    if isinstance(found, OffloadedGradient) and found is not offloaded:
        is_same = offloaded is not None and found.stands_for(offloaded)
        parameter.grad = offloaded if is_same else found.clone()
    return parameter.grad


def _norm(
    gradient: OffloadedGradient, order: float = 2, dim: Any = None, keepdim: bool = False, **more: Any
) -> Any:
    if order != 2 or dim is not None or keepdim or more or gradient.source.changes:
        return NotImplemented
    return gradient.source.norm()


def _accumulated(gradient: Any, other: Any, *, alpha: float = 1) -> Any:
    if isinstance(other, OffloadedGradient) or not isinstance(other, torch.Tensor) or alpha != 1:
        return NotImplemented
    if other.shape != gradient.shape or other.dtype != gradient.dtype:
        return NotImplemented
    gradient.source.accumulate(other)
    return gradient


def _noting(name: str) -> Callable[..., Any]:
    def answer(gradient: Any, *operands: Any) -> Any:
        """Note the change; anything but numbers is for the gradient's values."""
        if not isinstance(gradient, OffloadedGradient):
            return NotImplemented
        values = []
        kind = name
        for operand in operands:
            if isinstance(operand, torch.Tensor):
                if operand.dim() or isinstance(operand, OffloadedGradient) or operand.dtype == torch.float64:
                    return NotImplemented
                kind = f"{name}_tensor"
                operand = operand.item()
            if operand is not None and not isinstance(operand, int | float):
                return NotImplemented
            values.append(operand)
        gradient.source.note(GradientChange(kind, tuple(values)))
        return gradient

    return answer


def _zeroed(gradient: OffloadedGradient) -> OffloadedGradient:
    gradient.source.replace(_zeros(gradient))
    return gradient


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def _unscaled(gradients: _Tensors, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """``torch.amp.GradScaler``'s check and unscaling."""
    plain = [gradient for gradient in gradients if not isinstance(gradient, OffloadedGradient)]
    if plain:
        _aten._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    scale = inverse_scale.item()
    for gradient in gradients:
        if not isinstance(gradient, OffloadedGradient):
            continue
        if not bool(gradient.source.norm().isfinite()) and not bool(gradient.source.value().isfinite().all()):
            found_inf.fill_(1.0)
        if scale != 1.0:
            gradient.source.note(GradientChange("mul_tensor", (scale,)))


_ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten.add_.Tensor: _accumulated,
    _aten.mul_.Tensor: _noting("mul"),
    _aten.mul_.Scalar: _noting("mul"),
    _aten.div_.Tensor: _noting("div"),
    _aten.div_.Scalar: _noting("div"),
    _aten.clamp_.default: _noting("clamp"),
    _aten.zero_.default: _zeroed,
    _aten.detach.default: lambda gradient: gradient.view_of(gradient),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the gradients' values, and take over those that it changed."""
    read: list[tuple[GradientSource, torch.Tensor]] = []
    parts: list[tuple[OffloadedGradient, torch.Tensor]] = []

    def whole(source: GradientSource) -> torch.Tensor:
        found = next((found for known, found in read if known is source), None)
        if found is None:
            found = source.value()
            read.append((source, found))
        return found

    def plain(value: Any) -> Any:
        """Return a gradient's values in its place, in lists too."""
        if isinstance(value, OffloadedGradient):
            found = next((found for gradient, found in parts if gradient is value), None)
            if found is None:
                found = whole(value.source)
                for view in value.views:
                    found = view(found)
                parts.append((value, found))
            return found
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        return value

    result = func(*(plain(value) for value in args), **{name: plain(value) for name, value in kwargs.items()})
    for gradient in _written(func, args, kwargs, result):
        if result is plain(gradient):
            result = gradient
        gradient.source.replace(whole(gradient.source))
    return result


def _written(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[OffloadedGradient]:
    """Gradients among the arguments that an operator changes in place, by its schema.

    Schemas of torch.distributed do not tell: all are taken for changed, once the transfer has ended.
    """
    if func.namespace == "c10d":
        torch._C._distributed_c10d.Work.unbox(result[-1]).wait()
        written = [*args, *kwargs.values()]
    else:
        known = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)
        changed = (one for one in func._schema.arguments if one.alias_info and one.alias_info.is_write)
        written = [known.get(one.name) for one in changed]
    flat = [one for value in written for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, OffloadedGradient)]
