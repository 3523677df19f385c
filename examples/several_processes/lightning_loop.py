"""Lightning trains by several processes, which it starts itself (pip install lightning).

    hapi pack sklearn:digits /tmp/store/digits --image-size 32
    hapi-server --store /tmp/store --port 8099 &
    python examples/several_processes/lightning_loop.py http://127.0.0.1:8099 2

A session belongs to its process: it is opened in ``configure_model``, where Lightning knows the rank.
"""

import sys
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hapi


class Features(IterableDataset):
    """Batches of an epoch; Lightning iterates it anew for each."""

    def __init__(self, session: hapi.Session) -> None:
        self.session, self.epoch = session, 0

    def __len__(self) -> int:
        return len(self.session.batch_ids(0))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self.session.epoch(self.epoch)
        self.epoch += 1


class Tail(lightning.LightningModule):
    """The layers after the freeze."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.server = server
        self.total = torch.zeros(2)

    def configure_model(self) -> None:
        if hasattr(self, "trained"):
            return
        settings = hapi.SessionSettings(
            server=(self.server,), model="resnet18", weights="random", bs=32, device=str(self.device),
            trainers=self.trainer.world_size, trainer=self.trainer.global_rank,
        )  # fmt: skip
        self.features = Features(hapi.Session.open(settings))
        self.trained = self.features.session.trained

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.features, batch_size=None)  # batches come whole

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        features, labels = batch
        loss = nn.functional.cross_entropy(self.trained(features), labels)
        self.total += torch.tensor([loss.item() * len(labels), len(labels)])
        return loss

    def on_train_epoch_end(self) -> None:
        total = self.trainer.strategy.reduce(self.total, reduce_op="sum")
        if self.trainer.is_global_zero:
            print(
                f"epoch {self.current_epoch}: loss {total[0] / total[1]:.3f} over {int(total[1])} samples",
                flush=True,
            )
        self.total.zero_()

    def on_fit_end(self) -> None:
        self.features.session.close()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained.parameters(), lr=1e-3)


def main(server: str, processes: int) -> None:
    trainer = lightning.Trainer(
        devices=processes, accelerator="auto", strategy="ddp", max_epochs=2, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tail(server))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
