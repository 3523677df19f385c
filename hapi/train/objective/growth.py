"""A warning for a loss that grows far beyond that of guessing."""

from __future__ import annotations

import logging
import math

from hapi.wire.labels import LabelKind

log = logging.getLogger("hapi.client")

TIMES = 3
"""Multiples of the loss of guessing from which a loss is far beyond it."""


class LossGrowth:
    """Warns once when a step's loss grew beyond three times that of guessing.

    That is ln(classes) for one class per sample, and ln(2) for several; a regression has none.

    Args:
        kind: kind of the labels.
        classes: number of classes.
    """

    def __init__(self, kind: LabelKind, classes: int) -> None:
        guessing = {"single": math.log(max(classes, 2)), "multi": math.log(2)}
        self._bound = TIMES * guessing.get(kind, math.inf)
        self._words = f"{TIMES} x ln({max(classes, 2) if kind == 'single' else 2})"
        self._first: float | None = None

    def check(self, loss: float, epoch: int, batch: int) -> None:
        """Look at the ``loss`` of a step of ``epoch``."""
        if self._first is None:
            self._first = loss
        if loss > max(self._bound, self._first):
            log.warning(
                "the loss has grown to %.4g at epoch %d, batch %d, more than %s = %.4g; guessing would be better: "
                "lower --lr, or look at the labels",
                loss, epoch, batch, self._words, self._bound,
            )  # fmt: skip
            self._bound = math.inf
