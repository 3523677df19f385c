"""A training loop of one's own over Hapi's features: everything after the frozen layers is ordinary PyTorch.

    hapi pack sklearn:digits /tmp/store/digits --image-size 32
    python examples/custom_loop.py /tmp/store

The session starts a server for the store in a process of its own. With a server that runs beside the data,
give its URL instead: SessionSettings(server=("http://storage:8099",), ...).
"""

import sys

import torch
from torch import nn

import hapi


def main(store: str) -> None:
    settings = hapi.SessionSettings(store=store, model="resnet18", weights="random", bs=64, validation=0.2)
    with hapi.Session.open(settings) as session:
        print(f"the server runs {session.split} layers")
        model = session.trained  # the layers after the freeze: an nn.Module like any other
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)

        for epoch in range(3):
            model.train()
            for features, labels in session.epoch(epoch):  # every sample once, in an order made from the seed
                loss = loss_function(model(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            seconds, received = session.last.seconds, session.last.traffic.bytes_received

            model.eval()
            correct = total = 0
            with torch.no_grad():
                for features, labels in session.validation():
                    correct += (model(features).argmax(1) == labels).sum().item()
                    total += len(labels)
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, held-out accuracy {correct / total:.1%}, "
                f"{seconds:.1f} s, {received / 1e6:.1f} MB received"
            )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
