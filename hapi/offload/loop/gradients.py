"""The ``grad`` of a parameter whose gradient was handed over: its form, and notes of what a loop does to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

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
    "clamp": lambda gradient, values: gradient.clamp_(values[0], values[1]),
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


class OffloadedGradient(torch.Tensor):
    """A gradient without bytes: norms and elementwise changes are answered from notes, anything else reads it back.

    ``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_``, ``torch.amp.GradScaler`` and further backward passes work
    on it as on any gradient.
    """

    source: GradientSource
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, source: GradientSource) -> OffloadedGradient:
        """Make the gradient of ``parameter``."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.source = source
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return its form; the bytes may be on a disk."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer an operator of torch."""
        answer = _ANSWERS.get(func)
        if answer is not None:
            found = answer(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return _on_values(func, args, kwargs or {})


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
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the gradients' values, and take over those that it changed."""
    read: list[tuple[OffloadedGradient, torch.Tensor]] = []

    def plain(value: Any) -> Any:
        """Return a gradient's values in its place, in lists too."""
        if isinstance(value, OffloadedGradient):
            found = next((found for gradient, found in read if gradient is value), None)
            if found is None:
                found = value.source.value()
                read.append((value, found))
            return found
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        return value

    result = func(*(plain(value) for value in args), **{name: plain(value) for name, value in kwargs.items()})
    for gradient in _written(func, args, kwargs):
        found = plain(gradient)
        gradient.source.replace(found)
        if result is found:
            result = gradient
    return result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[OffloadedGradient]:
    """Gradients among the arguments that an operator changes in place, by its schema."""
    written = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(value)
    for argument in func._schema.arguments[len(args) :]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name))
    flat = [one for value in written for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, OffloadedGradient)]
