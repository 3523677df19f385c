"""Parameters that tell when somebody reads or changes them, while the memory has values of a step that is not taken.

Such a parameter has a subclass of its class meanwhile, whose ``__torch_function__`` sees each use in Python. It costs
nothing at other times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

_ATTRIBUTES = (
    "grad", "_grad", "requires_grad", "is_leaf", "grad_fn", "grad_dtype", "shape", "dtype", "device", "layout", "ndim",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xpu",
    "is_mps", "itemsize", "nbytes", "names", "output_nr", "name", "retains_grad", "_backward_hooks",
    "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "is_same_size", "element_size", "get_device", "register_hook", "requires_grad_",
    "register_post_accumulate_grad_hook", "new_zeros", "new_ones", "new_empty", "new_full", "__len__",
)  # fmt: skip
_FUNCTIONS = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "is_floating_point", "is_complex",
    "is_tensor", "numel", "is_same_size",
)  # fmt: skip


@cache
def _without_values() -> frozenset[Any]:
    """Functions of torch that need no value of a tensor, and change none."""
    found: list[Any] = []
    for name in _ATTRIBUTES:
        attribute = getattr(torch.Tensor, name, None)
        wanted = ("__get__", "__set__", "__delete__")
        found += [getattr(attribute, one) for one in wanted if hasattr(attribute, one)]
    found += [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    return frozenset([*found, *(getattr(torch, name) for name in _FUNCTIONS)])


class _Watched:
    """Base of the classes that parameters have while they are watched."""

    __slots__ = ()

    _before_use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call before values are read or changed; all parameters have their own class again then."""
        if func in _without_values():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, _Watched):
                kind._before_use()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy a parameter of its own class."""
        self._before_use()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a parameter of its own class."""
        self._before_use()
        return self.__reduce_ex__(protocol)


class ReadWatch:
    """Watches the parameters whose values in memory are ahead of the loop."""

    def __init__(self, before_use: Callable[[], None]) -> None:
        """``before_use`` is called once before a watched parameter is used; none is watched any more then."""
        self._before_use = before_use
        self._kinds: dict[type, type] = {}
        self._watched: list[tuple[torch.Tensor, type]] = []

    def begin(self, parameter: torch.Tensor) -> None:
        """Watch a parameter from now on."""
        kind = type(parameter)
        if issubclass(kind, _Watched):
            return
        self._watched.append((parameter, kind))
        parameter.__class__ = self._kinds.get(kind) or self._kind_for(kind)

    def end(self) -> None:
        """Watch none any more."""
        for parameter, kind in self._watched:
            parameter.__class__ = kind
        self._watched.clear()

    def _used(self) -> None:
        self.end()
        self._before_use()

    def _kind_for(self, kind: type) -> type:
        made = type(kind)(kind.__name__, (_Watched, kind), {"_before_use": staticmethod(self._used)})
        self._kinds[kind] = made
        return made
