"""Random numbers that a model draws: torch's, and those of the generators that all code of a process shares.

Of these other threads may draw in the same moment, such as those that pause by chance; a model draws in each of its
runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def draws(func: Any, given: Mapping[str, Any]) -> bool:
    """Return whether an operator of torch draws random numbers with these arguments, as attention may, for dropout."""
    is_dropout = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    return seeded and not (is_dropout and not given.get("dropout_p"))


def python_generators() -> tuple[Any, ...]:
    """Return the states of the generators that Python's ``random`` and numpy have for a whole process."""
    found = np.random.get_state(legacy=False)  # of whatever bit generator a user has set
    words = (one.tobytes() if isinstance(one, np.ndarray) else one for one in found["state"].values())
    return random.getstate(), *words, found.get("has_gauss"), found.get("has_uint32"), found.get("uinteger")
