"""A module's parameters and buffers by name; a shared tensor is one entry with several names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hapi.errors import ModelError


class TensorTable:
    """Reads and replaces a module's tensors. A shared tensor is known by its first name."""

    def __init__(self, module: nn.Module, title: str) -> None:
        self._module = module
        self._title = title
        self._first: dict[str, str] = {}
        by_identity: dict[int, str] = {}
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            self._first[name] = by_identity.setdefault(id(tensor), name)
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._names: dict[str, list[str]] = {}
        self._inside: dict[str, list[str]] = {}
        for name, first in self._first.items():
            self._names.setdefault(first, []).append(name)
            path = name
            while path:
                path = path.rpartition(".")[0]
                self._inside.setdefault(path, []).append(first)

    def names(self) -> list[str]:
        """First name of every parameter and buffer."""
        return list(self._names)

    def first_name(self, name: str) -> str:
        """The name under which ``name``'s tensor is known. :class:`ModelError` for an unknown one."""
        try:
            return self._first[name]
        except KeyError:
            raise ModelError(f"{self._title} has no tensor {name!r}") from None

    def get(self, name: str) -> torch.Tensor:
        """A parameter or buffer by any of its names."""
        self.first_name(name)
        owner, leaf = self._owner(name)
        found: torch.Tensor | None = owner._parameters.get(leaf)
        if found is None:
            found = owner._buffers.get(leaf)
        if found is None:
            raise ModelError(f"{self._title} has no tensor {name!r} any more")
        return found

    def inside(self, path: str) -> list[str]:
        """First names of all parameters and buffers of submodule ``path``."""
        return list(dict.fromkeys(self._inside.get(path, ())))

    def __contains__(self, name: object) -> bool:
        return name in self._first

    def assign(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put ``tensor`` in ``name``'s place, under all its names; return the tensor that is there now.

        A parameter stays a parameter. Raises :class:`ModelError` on another shape or dtype.
        """
        old = self.get(name)
        if old.shape != tensor.shape or old.dtype != tensor.dtype:
            raise ModelError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {self._title} expects"
                f" {old.dtype} {list(old.shape)}"
            )
        return self.change(name, tensor)

    def change(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put ``tensor``, which may have another form, in ``name``'s place; return what is there now."""
        old = self.get(name)
        new = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
        for alias in self._names[self._first[name]]:
            owner, leaf = self._owner(alias)
            setattr(owner, leaf, new)
        return new

    def release(self, keep: Iterable[str]) -> None:
        """Give up the memory of all tensors but ``keep``: they become meta tensors."""
        kept = {self.first_name(name) for name in keep}
        for name in self.names():
            tensor = self.get(name)
            if name not in kept and not tensor.is_meta:
                self.assign(name, torch.empty_like(tensor, device="meta"))

    def to(self, device: torch.device, names: Iterable[str]) -> None:
        """Move those of these tensors that are in memory."""
        for name in names:
            tensor = self.get(name)
            if not tensor.is_meta and tensor.device != device:
                self.assign(name, tensor.detach().to(device))

    def resident_bytes(self) -> int:
        """Bytes of all tensors that are in memory, on any device."""
        tensors = [self.get(name) for name in self.names()]
        return sum(t.numel() * t.itemsize for t in tensors if not t.is_meta)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._modules[path], leaf
