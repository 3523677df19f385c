"""The job in plain PyTorch, as one writes it by hand: none of Hapi's code.

    python plain.py JOB

JOB is a JSON file: ``url`` of a folder with ``images.bin`` (the encoded images, one after the other) and
``index.json`` (``lengths``, ``labels``); ``model``, ``weights`` (a file of ``torch.save``), ``side``, ``resize``;
``order`` (a list of ids for each batch of each epoch), ``seed``, ``threads`` and the optimiser's numbers.

The images are read once, in one request. Threads decode them while more arrive, the frozen layers run in micro-batches,
and their outputs stay in memory: epochs then train on that tensor alone. A JSON line on standard output follows the
start and each epoch.
"""

from __future__ import annotations

import importlib
import io
import json
import queue
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms import v2

MICRO_BATCH = 16
"""Images of a forward pass of the frozen layers."""
AHEAD = 256
"""Images that are received or decoded and not yet computed."""
DECODERS = 2
"""Decoding threads for each thread that computes."""
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class VitPrefix(nn.Module):
    """The patches and the encoder's blocks of a vision transformer."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the tokens, [N, T, C]."""
        network = self.network
        tokens = network._process_input(images)
        tokens = torch.cat([network.class_token.expand(len(images), -1, -1), tokens], dim=1)
        blocks: torch.Tensor = network.encoder.layers(
            network.encoder.dropout(tokens + network.encoder.pos_embedding)
        )
        return blocks


class VitSuffix(nn.Module):
    """The last norm and the head."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.norm, self.heads = network.encoder.ln, network.heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.heads(self.norm(tokens)[:, 0])
        return logits


def resnet(job: dict[str, Any], blocks: int) -> tuple[nn.Module, nn.Module]:
    """(frozen, trained) layers of a ResNet whose first ``blocks`` blocks are frozen."""
    net = torchvision.models.get_model(job["model"], num_classes=job["classes"])
    net.load_state_dict(torch.load(job["weights"], weights_only=True))
    stages = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    pool = [net.avgpool, nn.Flatten()]
    frozen = [net.conv1, net.bn1, net.relu, net.maxpool, *stages[:blocks]]
    if blocks == len(stages):
        return nn.Sequential(*frozen, *pool), net.fc
    return nn.Sequential(*frozen), nn.Sequential(*stages[blocks:], *pool, net.fc)


def vit(job: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """(frozen, trained) layers of ViT-B/16: all but the last norm and the head are frozen."""
    net = torchvision.models.vit_b_16(image_size=job["side"], num_classes=job["classes"])
    net.load_state_dict(torch.load(job["weights"], weights_only=True))
    return VitPrefix(net), VitSuffix(net)


def lite0(job: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """(frozen, trained) layers of EfficientNet-Lite0: all but the last block and the head, or all but the head, which
    is new."""
    package = importlib.import_module("efficientnet_lite_pytorch")
    net = package.EfficientNet.from_name("efficientnet-lite0", drop_connect_rate=0.0, batch_norm_momentum=0.9)
    net.load_state_dict(torch.load(job["weights"], weights_only=True))
    torch.manual_seed(job["seed"])
    head = nn.Linear(1280, job["classes"])
    stem = [net._conv_stem, net._bn0, net._swish, *net._blocks[:15]]
    last = [*net._blocks[15:], net._conv_head, net._bn1, net._swish, net._avg_pooling, nn.Flatten()]
    if job["freeze"] == "_bn1":
        return nn.Sequential(*stem, *last), nn.Sequential(net._dropout, head)
    return nn.Sequential(*stem), nn.Sequential(*last, net._dropout, head)


def network(job: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """(frozen, trained) layers of the job's model, as its authors cut it by hand."""
    if job["model"] == "lite0":
        return lite0(job)
    if job["model"] == "vit_b_16":
        return vit(job)
    return resnet(job, {"resnet50": 16, "resnet18": 7}[job["model"]])


def decode(encoded: bytes, resize: v2.Compose) -> torch.Tensor:
    """Return the pixels of an image, uint8 [3, side, side]."""
    with Image.open(io.BytesIO(encoded)) as opened:
        pixels: torch.Tensor = resize(opened.convert("RGB"))
    return pixels


def decoded(job: dict[str, Any], lengths: list[int]) -> Iterator[torch.Tensor]:
    """Yield the images in their order, decoded by threads while others arrive."""
    resize = v2.Compose(
        [v2.PILToTensor(), v2.Resize(job["resize"], antialias=True), v2.CenterCrop(job["side"])]
    )
    waiting: queue.Queue[Future[torch.Tensor] | BaseException] = queue.Queue(AHEAD)
    with ThreadPoolExecutor(DECODERS * job["threads"]) as pool:

        def receive() -> None:
            """Read image after image from the link."""
            try:
                with urllib.request.urlopen(f"{job['url']}/images.bin") as answer:
                    for length in lengths:
                        waiting.put(pool.submit(decode, answer.read(length), resize))
            except BaseException as error:
                waiting.put(error)

        threading.Thread(target=receive, daemon=True).start()
        for _ in lengths:
            found = waiting.get()
            if isinstance(found, BaseException):
                raise found
            yield found.result()


def extracted(job: dict[str, Any], frozen: nn.Module, lengths: list[int]) -> torch.Tensor:
    """Return the outputs of the frozen layers for all images, float32 [N, ...]."""
    kept = torch.empty(0)
    frozen.eval()
    images: list[torch.Tensor] = []
    done = 0
    with torch.no_grad():
        for image in decoded(job, lengths):
            images.append(image)
            if len(images) < MICRO_BATCH and done + len(images) < len(lengths):
                continue
            part = frozen((torch.stack(images).float() / 255 - MEAN) / STD)
            if not done:
                kept = torch.empty(len(lengths), *part.shape[1:])
            kept[done : done + len(part)] = part
            done += len(part)
            images.clear()
    return kept


def train(job: dict[str, Any], trained: nn.Module, kept: torch.Tensor, labels: torch.Tensor) -> None:
    """Train the epochs of ``job["order"]`` on the kept features, and print the mean loss of each."""
    optimizer = torch.optim.SGD(
        trained.parameters(), lr=job["lr"], momentum=job["momentum"], weight_decay=job["weight_decay"]
    )
    trained.train()
    for epoch, batches in enumerate(job["order"]):
        total, samples = 0.0, 0
        for number, ids in enumerate(batches):
            torch.manual_seed(((job["seed"] * 1_000_003 + epoch) * 1_000_003 + number) % (1 << 63))
            rows = torch.tensor(ids)
            loss = nn.functional.cross_entropy(trained(kept[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, samples = total + loss.item() * len(ids), samples + len(ids)
        print(json.dumps({"epoch": epoch, "loss": total / samples}), flush=True)


def main(path: str) -> None:
    """Run the job of the file at ``path``."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    frozen, trained = network(job)
    print(json.dumps({"ready": True}), flush=True)
    with urllib.request.urlopen(f"{job['url']}/index.json") as answer:
        index = json.loads(answer.read())
    kept = extracted(job, frozen, index["lengths"])
    train(job, trained, kept, torch.tensor(index["labels"]))


if __name__ == "__main__":
    main(sys.argv[1])
