"""A loop of one's own by several processes, with PyTorch's DistributedDataParallel.

    hapi pack sklearn:digits /tmp/store/digits --image-size 32
    hapi-server --store /tmp/store --port 8099 &
    torchrun --standalone --nproc-per-node 2 examples/several_processes/torchrun_loop.py http://127.0.0.1:8099

Each process takes its share of every epoch: the same number of batches, each sample once.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hapi


def main(server: str) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = hapi.SessionSettings(
        server=(server,), model="resnet18", weights="random", bs=32, trainers=size, trainer=rank
    )
    with hapi.Session.open(settings) as session:
        model = DistributedDataParallel(session.trained)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(2):
            total = torch.zeros(2)
            for features, labels in session.epoch(epoch):
                loss = nn.functional.cross_entropy(model(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += torch.tensor([loss.item() * len(labels), len(labels)])
            dist.all_reduce(total)
            if rank == 0:
                print(
                    f"epoch {epoch}: loss {total[0] / total[1]:.3f} over {int(total[1])} samples", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
