"""A loop of one's own by several processes, with Hugging Face's Accelerate (pip install accelerate).

hapi pack sklearn:digits /tmp/store/digits --image-size 32
hapi-server --store /tmp/store --port 8099 &
accelerate launch --num_processes 2 --cpu examples/several_processes/accelerate_loop.py http://127.0.0.1:8099
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

import hapi


def main(server: str) -> None:
    accelerator = Accelerator()
    settings = hapi.SessionSettings(
        server=(server,),
        model="resnet18",
        weights="random",
        bs=32,
        device=str(accelerator.device),
        trainers=accelerator.num_processes,
        trainer=accelerator.process_index,
    )
    with hapi.Session.open(settings) as session:
        model, optimizer = accelerator.prepare(
            session.trained, torch.optim.AdamW(session.trained.parameters(), lr=1e-3)
        )
        for epoch in range(2):
            total = torch.zeros(2, device=accelerator.device)
            for features, labels in session.epoch(epoch):
                loss = nn.functional.cross_entropy(model(features), labels)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                total += torch.tensor([loss.item() * len(labels), len(labels)], device=total.device)
            total = accelerator.reduce(total, "sum")
            accelerator.print(f"epoch {epoch}: loss {total[0] / total[1]:.3f} over {int(total[1])} samples")
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
