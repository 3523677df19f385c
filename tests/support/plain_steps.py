"""A plain PyTorch loop over a session's features, beside the trainer: what the trainer's steps must equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hapi.client.session import Session
from hapi.train.steps.gradient_step import step_seed
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import Handler
from support.local_job import Silent, open_session, trainer_of

EPOCHS = 2
Batch = tuple[torch.Tensor, torch.Tensor]


class Twin:
    """A copy of the trained layers before training, the batches that they are trained with, and the trainer."""

    def __init__(self, session: Session, changes: dict[str, Any]) -> None:
        self.session = session
        self.module = copy.deepcopy(session.trained).train()
        self.epochs: list[list[Batch]] = [
            [(features.clone(), labels) for features, labels in session.epoch(epoch)]
            for epoch in range(session.settings.epochs)
        ]
        self.trainer: Trainer = trainer_of(session, Silent(), **changes)

    def batches(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(epoch, batch, features, labels), with the generator seeded as the trainer does."""
        for epoch, batches in enumerate(self.epochs):
            for number, (features, labels) in enumerate(batches):
                torch.manual_seed(step_seed(self.session.settings.seed, epoch, number))
                yield epoch, number, features, labels

    def check(
        self, module: nn.Module | None = None, trained: nn.Module | None = None, **tolerance: float
    ) -> None:
        """The trainer's layers are those of the plain loop; bitwise without a tolerance."""
        ours, plain = (trained or self.session.trained).state_dict(), (module or self.module).state_dict()
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            if tolerance:
                torch.testing.assert_close(ours[name], value, **tolerance)
            else:
                assert torch.equal(ours[name], value), name


@contextmanager
def twin(remembered: Handler, **changes: Any) -> Iterator[Twin]:
    """A twin of a small job with these settings."""
    changes = {"epochs": EPOCHS, "freeze": 11, **changes}
    with open_session(remembered, **changes) as session:
        yield Twin(session, changes)
