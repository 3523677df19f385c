"""Loops of libraries, with their states in memory and on a disk, in a process of their own.

python -m support.library_loops LIBRARY FOLDER      fails unless the weights are equal, bit by bit
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.offload_loops import State, offloaded

Prepare = Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]
"""Gives the optimiser to train with."""
WAYS = {"kept": "keep", "swapped": "swap", "recomputed": "recompute"}
"""Words on the treatment of activations, and its name."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        found: torch.Tensor = self.last(rows)
        return found


def data() -> list[torch.Tensor]:
    return [torch.randn(32, 16, generator=torch.Generator().manual_seed(number)) for number in range(14)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def accelerate(prepare: Prepare, folder: Path) -> State:
    """Accumulate over three batches, clip, and lower the rate."""
    from accelerate import Accelerator

    net = Net()
    library = Accelerator(cpu=True, gradient_accumulation_steps=3)
    optimizer = prepare(net, adamw(net))
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, wrapped, batches, scheduler = library.prepare(
        net, optimizer, torch.utils.data.DataLoader(data(), batch_size=1), rates
    )
    for _ in range(2):
        for rows in batches:
            with library.accumulate(model):
                library.backward(model(rows).tanh().square().mean())
                if library.sync_gradients:
                    library.clip_grad_norm_(model.parameters(), 0.05)
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
    return net.state_dict()


def lightning(prepare: Prepare, folder: Path) -> State:
    """Train with accumulation, clipping and validation; the training step calls layers, and not their model."""
    import lightning as library

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            rows = self.net.first(batch)
            for block in self.net.blocks:
                rows = block(rows)
            found: torch.Tensor = self.net.last(rows).square().mean()
            return found

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("loss", self.net(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = prepare(self, adamw(self.net))
            rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return [optimizer], [{"scheduler": rates, "interval": "step"}]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    batches = torch.utils.data.DataLoader(data(), batch_size=1)
    library.Trainer(
        accelerator="cpu", max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.05, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(module, batches, batches)  # fmt: skip
    return module.net.state_dict()


def trainer(prepare: Prepare, folder: Path) -> State:
    """Train a GPT-2 of three blocks, whose blocks are given a cache, with accumulation, clipping and a schedule."""
    import transformers

    class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            words = torch.randint(3, 90, (12,), generator=torch.Generator().manual_seed(number))
            return {"input_ids": words, "labels": words}

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=3, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = prepare(model, adamw(model))
    options = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5,
        num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="steps", save_steps=5, disable_tqdm=True, seed=3,
    )  # fmt: skip
    rates = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 12)
    transformers.Trainer(model, options, train_dataset=Words(), optimizers=(optimizer, rates)).train()
    found: State = model.state_dict()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    loop = {"accelerate": accelerate, "lightning": lightning, "trainer": trainer}[sys.argv[1]]
    folder = Path(sys.argv[2])
    expected = loop(lambda model, optimizer: optimizer, folder / "memory")
    for words, activations in WAYS.items():

        def prepare(
            model: nn.Module, optimizer: torch.optim.Optimizer, words: str = words, way: str = activations
        ) -> torch.optim.Optimizer:
            return offloaded(model, optimizer, folder / words / "states", activations=way)

        found = loop(prepare, folder / words)
        differing = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        if differing:
            raise SystemExit(f"{words}: {differing} differ")
    print(f"equal: {', '.join(WAYS)}")


if __name__ == "__main__":
    main()
