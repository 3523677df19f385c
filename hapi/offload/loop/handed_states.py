"""States that a loop was given, as ``optimizer.state`` or in ``state_dict()``, and its changes of them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash

from hapi.errors import UsageError
from hapi.offload.loop.values import bytes_of, flat_view

StateTable = defaultdict[torch.Tensor, Any]
"""States by parameter, as torch's optimisers keep them."""


class _Given(NamedTuple):
    """A tensor as it was given."""

    tensor: torch.Tensor
    version: int
    digest: int | None


class HandedStates:
    """In memory they would be the optimiser's own, so that whatever changes them changes the next step.

    They lie on the disk, where they were read to. A step writes them back if they were changed since.
    """

    def __init__(self) -> None:
        """Begin with nothing given."""
        self.table: StateTable | None = None
        """States that the loop has, and may change, until the next step."""
        self._form: list[Any] = []
        self._given: list[_Given] = []
        self._is_changed = False
        self._before: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Tensors that were given before the last step, with their versions."""

    def give(self, table: Mapping[torch.Tensor, dict[str, Any]]) -> StateTable:
        """Note what a loop is given."""
        self.table = defaultdict(dict, table)
        self._form = _form_of(self.table)
        self._given = [_Given(tensor, tensor._version, None) for tensor in _tensors_in(self.table)]
        return self.table

    def replace(self, table: StateTable) -> None:
        """Take what the loop set in the place of the states."""
        self.table, self._is_changed = table, True

    def watch_values(self) -> None:
        """Notice changes that no version tells, too: those through ``.data``."""
        self._given = [
            one if one.digest is not None else one._replace(digest=_digest(one.tensor)) for one in self._given
        ]

    def is_changed(self) -> bool:
        """Return whether the loop changed what it was given; forgets it otherwise, and refuses changes from then on."""
        if self.table is None:
            return False
        self._is_changed = (
            self._is_changed or _form_of(self.table) != self._form or any(map(_differs, self._given))
        )
        if not self._is_changed:
            self.drop()
        return self._is_changed

    def drop(self) -> None:
        """Forget what was given: it is that of steps before."""
        self._before += [
            (weakref.ref(one.tensor), one.version) for one in self._given if not self._is_changed
        ]
        self.table, self._is_changed = None, False
        self._form, self._given = [], []

    def check_before(self, loaded: Mapping[Any, Mapping[str, Any]] | None = None) -> None:
        """Raise UsageError where a loop changed, or loads, tensors that it was given before the last step.

        In memory they would have followed the steps since.
        """
        alive = [(found, version) for one, version in self._before if (found := one()) is not None]
        self._before = [(weakref.ref(found), version) for found, version in alive]
        own = {id(found) for found, _ in alive}
        states = [] if loaded is None else _tensors_in(loaded)
        if any(found._version != version for found, version in alive) or any(
            id(one) in own for one in states
        ):
            raise UsageError(
                "states that the optimizer gave before its last step were changed or loaded: in memory they would be "
                "the present ones; take optimizer.state or state_dict() anew, or keep a copy (copy.deepcopy)"
            )


def _form_of(table: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Any]:
    """Entries of a table in their order, tensors by their identity."""
    return [
        (
            id(key),
            [
                (name, id(value) if isinstance(value, torch.Tensor) else value)
                for name, value in state.items()
            ],
        )
        for key, state in table.items()
    ]


def _tensors_in(table: Mapping[Any, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for state in table.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _differs(one: _Given) -> bool:
    if one.tensor._version != one.version:
        return True
    return one.digest is not None and _digest(one.tensor) != one.digest


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(flat_view(tensor)).data)
