"""Detection of training data mixed with other data: a model trained on both looks like a success."""

from __future__ import annotations

from collections.abc import Iterable

_TRAINING = frozenset(("train", "training"))
_HELD_OUT = frozenset(("val", "valid", "validation", "test", "testing", "eval"))


def training_and_other(named: Iterable[tuple[Iterable[str], str]]) -> tuple[str, str] | None:
    """Return a name of training data and one of other data, by the words of each name; None unless there are
    both.

    ``named`` has words and name of everything. A name with words of both, such as ``train-val-0.tar``, is
    neither.
    """
    training = held_out = None
    for words, name in named:
        known = {word.lower() for word in words}
        trains, holds_out = bool(known & _TRAINING), bool(known & _HELD_OUT)
        if trains and not holds_out:
            training = training or name
        elif holds_out and not trains:
            held_out = held_out or name
    return None if training is None or held_out is None else (training, held_out)
