"""Small models, and loops that tell the gradients of each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed(x)


class SmallGpt(nn.Module):
    """Embeddings tied to the output, dropout, and a list of blocks inside of another module."""

    def __init__(self, width: int = 64, depth: int = 4, words: int = 101) -> None:
        super().__init__()
        self.words = words
        self.body = nn.ModuleDict(
            {
                "embedding": nn.Embedding(words, width),
                "blocks": nn.ModuleList(Block(width) for _ in range(depth)),
                "after": nn.LayerNorm(width),
            }
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.body["embedding"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body["embedding"](tokens)
        for block in self.body["blocks"]:
            x = block(x)
        return self.head(self.body["after"](x))


def gpt_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 101, (4, 48)).to(next(model.parameters()).device)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def image_loss(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    return functional.cross_entropy(model(images.to(device)), labels.to(device))


def train(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int = 3, accumulate: int = 1
) -> list[torch.Tensor]:
    """Train by SGD from a fixed seed; return the gradients of all steps, then the weights and buffers."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss(model).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
