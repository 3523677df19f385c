"""Options of an optimiser's parameter groups (learning rate, betas, ...) as bytes of a commit."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hapi.wire.documents import parse_document

log = logging.getLogger("hapi.offload")

ROOM_OF_A_GROUP = 1024
"""Bytes that the options of a group may take: torch's have 250, with those of a scheduler 450."""
_LENGTH = struct.Struct("<I")
_FORMS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Keys of a group that say how a step is computed, or for which parameters."""
_START = "initial_lr"
"""Learning rate that a scheduler of torch began with: each of them notes it in the groups that it drives."""

Groups = Sequence[dict[str, Any]]


def options_room(groups: Groups) -> int:
    """Return the bytes that options take, whatever their values become."""
    return _LENGTH.size + ROOM_OF_A_GROUP * len(groups)


def pack_options(groups: Groups) -> bytes:
    """Return the numbers among the options of the groups, in :func:`options_room` bytes.

    Options that are no numbers are left out; all of them where there is too little room.
    """
    text = json.dumps([_numbers(group) for group in groups]).encode()
    room = options_room(groups)
    if len(text) > room - _LENGTH.size:
        text = b""
    return (_LENGTH.pack(len(text)) + text).ljust(room, b"\0")


def restore_options(packed: bytes, groups: Groups) -> bool:
    """Give groups the options that :func:`pack_options` took from them.

    The learning rate stays as it was made where a scheduler drove it: the next one begins with the same rate, and a
    loop moves it on.

    Returns:
        Whether a scheduler drove the learning rate.
    """
    (length,) = _LENGTH.unpack_from(packed)
    if not length:
        log.warning(
            "the parameter groups have more options than a commit holds: they are those they were made with"
        )
        return False
    found = parse_document(packed[_LENGTH.size : _LENGTH.size + length], nan=True)
    for group, kept in zip(groups, found, strict=True):
        for name, value in kept.items():
            if name in group and not (_START in kept and name in ("lr", _START)):
                group[name] = _as(value, group[name])
    return any(_START in kept for kept in found)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _plain(value) for name, value in group.items() if name not in _FORMS}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """A number, a truth value, or several of them; None for anything else."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.dim()):
        return value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        found = [_plain(one) for one in value]
        return None if None in found else found
    return None


def _as(value: Any, like: Any) -> Any:
    """``value`` in the form of the option that it replaces."""
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    if isinstance(like, tuple | list) and isinstance(value, list) and len(like) == len(value):
        return type(like)(_as(one, other) for one, other in zip(value, like, strict=True))
    return value
