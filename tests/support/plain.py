"""A plain PyTorch loop that uses none of Hapi's code, the split training beside it, and how equal the two are.

The plain loop reads the images from scikit-learn, prepares them with torchvision's transforms, builds the model with
torchvision, and trains it whole, batch by batch, in the order that the session says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from hapi.cli.main import main
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.steps.gradient_step import step_seed
from hapi.wire.transport.http import LoopbackTransport

EPOCHS, BATCH, SEED, LR, COUNT = 3, 8, 7, 0.01, 16
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-5
"""Relative, float32 on a CPU: losses of three epochs; gradients of the first step, as vectors, per parameter."""


@dataclass(frozen=True)
class Family:
    """An architecture as a plain PyTorch user fine-tunes it, written down by hand."""

    name: str
    head: str
    trained: tuple[str, ...]
    """Modules that are trained; everything else is frozen, in eval mode."""
    freeze: int
    last_frozen: str
    """The module whose output is layer ``freeze``'s, up to its shape."""
    size: int = 32
    make: Callable[[int], nn.Module] = field(default=lambda size: nn.Identity())


def torchvision_model(name: str) -> Callable[[int], nn.Module]:
    options = {"vit_b_16": lambda size: {"image_size": size}}.get(name, lambda size: {})
    return lambda size: getattr(torchvision.models, name)(weights=None, **options(size))


def family(
    name: str, head: str, trained: tuple[str, ...], freeze: int, last_frozen: str = "", size: int = 32
) -> Family:
    return Family(name, head, trained, freeze, last_frozen, size, torchvision_model(name))


FAMILIES = [
    family("alexnet", "classifier.6", ("classifier.4", "classifier.6"), 17, "classifier.1", 64),
    family("resnet18", "fc", ("layer4.1", "fc"), 11, "layer4.0"),
    family("resnet50", "fc", ("fc",), 21, "avgpool"),
    family("densenet121", "classifier", ("features.norm5", "classifier"), 20, "features.denseblock4"),
    family("vgg11", "classifier.6", ("classifier.6",), 25, "classifier.3"),
    family("vgg19", "classifier.6", ("classifier.0", "classifier.3", "classifier.6"), 36, "features.35"),
    family("vit_b_16", "heads.head", ("encoder.ln", "heads.head"), 17, "encoder.layers.encoder_layer_11"),
]


# -- the plain side: nothing of hapi below, but for the order of samples and the seed of each step ------------


def plain_inputs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All digits' first COUNT images as normalised [n, 3, size, size], and labels."""
    digits = load_digits()
    resize = round(size * 256 / 224)
    prepare_image = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(resize, interpolation=InterpolationMode.BILINEAR, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    pictures = (digits.images[:COUNT] * 255 / 16).round().astype(np.uint8)
    images = [Image.fromarray(p).convert("RGB") for p in pictures]
    return torch.stack([prepare_image(i) for i in images]), torch.tensor(digits.target[:COUNT])


def plain_model(f: Family) -> nn.Module:
    torch.manual_seed(SEED)
    model = f.make(f.size)
    parent, _, last = f.head.rpartition(".")
    owner = model.get_submodule(parent)
    old = getattr(owner, last)
    torch.manual_seed(SEED)
    new = (
        nn.Linear(old.in_features, 10)
        if isinstance(old, nn.Linear)
        else nn.Conv2d(old.in_channels, 10, old.kernel_size)
    )
    setattr(owner, last, new)
    return model


@dataclass
class Result:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    features: list[torch.Tensor] = field(default_factory=list)
    """What the last frozen module put out for each batch of the first epoch; only on the plain side."""

    def step(
        self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: dict[str, nn.Parameter]
    ) -> float:
        """Take a step, keeping the first one's gradients; returns the loss."""
        optimizer.zero_grad()
        loss.backward()
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        return loss.item()


def plain_training(f: Family, order: list[list[list[int]]], device: str = "cpu") -> Result:
    model = plain_model(f).to(device)
    images, labels = (t.to(device) for t in plain_inputs(f.size))
    model.requires_grad_(False)
    for path in f.trained:
        model.get_submodule(path).requires_grad_(True)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=LR, momentum=0.9)
    result = Result([], {})
    for epoch, batches in enumerate(order):
        total = 0.0
        for number, ids in enumerate(batches):
            model.eval()
            for path in plain_training_mode(f, model):
                model.get_submodule(path).train()
            torch.manual_seed(step_seed(SEED, epoch, number))
            with recorded(model.get_submodule(f.last_frozen), result.features if epoch == 0 else []):
                loss = nn.functional.cross_entropy(model(images[ids]), labels[ids])
            total += result.step(optimizer, loss, parameters) * len(ids)
        result.losses.append(total / COUNT)
    return result


@contextmanager
def recorded(module: nn.Module, outputs: list[torch.Tensor]) -> Iterator[None]:
    """Append what ``module`` puts out inside the block."""
    handle = module.register_forward_hook(lambda m, inputs, output: outputs.append(output.detach().clone()))
    yield
    handle.remove()


def plain_training_mode(f: Family, model: nn.Module) -> list[str]:
    """What is in train mode: everything after the last frozen module with weights, dropout included."""
    leaves = [n for n, m in model.named_modules() if not list(m.children())]
    first = min(i for i, n in enumerate(leaves) if any(n == t or n.startswith(t + ".") for t in f.trained))
    while first and not list(model.get_submodule(leaves[first - 1]).parameters()):
        first -= 1
    return leaves[first:]


# -- the split side -------------------------------------------------------------------------------------------


def packed_digits(folder: Path) -> Path:
    """``folder`` with the first COUNT digits as images in ``source`` and packed as dataset ``digits``."""
    digits = load_digits()
    source = folder / "source"
    for i in range(COUNT):
        target = source / str(digits.target[i])
        target.mkdir(parents=True, exist_ok=True)
        picture = (digits.images[i] * 255 / 16).round().astype(np.uint8)
        Image.fromarray(picture).save(target / f"{i:05d}.png")
    assert main(["pack", str(source), f"{folder}/digits", "--image-size", "32", "--quiet"]) == 0
    return folder


def file_order(store: Path) -> np.ndarray:
    """Position of each packed sample in scikit-learn's order: files are packed by class, then by name."""
    return np.array([int(p.stem) for p in sorted((store / "source").glob("*/*.png"))])


def open_session(
    service: Service, f: Family, split: int | str, freeze: int | str, *, device: str = "cpu", **more: object
) -> Session:
    settings = SessionSettings(
        model=f.name, weights="random", dataset="digits", image_size=f.size, bs=BATCH, seed=SEED,
        split=split, freeze=freeze, request_size=5, micro_batch=3, device=device, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return Session.open(settings, transports=[LoopbackTransport(loopback_handler(service))])


def split_training(session: Session) -> Result:
    """A user's own loop over the session's features."""
    trained = session.trained
    optimizer = torch.optim.SGD(trained.parameters(), lr=LR, momentum=0.9)
    result = Result([], {})
    for epoch in range(EPOCHS):
        total = 0.0
        for number, (features, labels) in enumerate(session.epoch(epoch)):
            torch.manual_seed(step_seed(SEED, epoch, number))
            loss = nn.functional.cross_entropy(trained(features), labels)
            total += result.step(optimizer, loss, dict(trained.named_parameters())) * len(labels)
        result.losses.append(total / COUNT)
    return result


def check_equal(
    split: Result, plain: Result, what: str, gradient_tolerance: float = GRADIENT_TOLERANCE
) -> float:
    """Fails beyond the tolerances; returns the largest relative difference of a gradient."""
    assert split.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE), what
    assert sorted(split.gradients) == sorted(plain.gradients), what
    largest = 0.0
    for name, gradient in plain.gradients.items():
        difference = (split.gradients[name] - gradient).norm()
        # A bias before a BatchNorm has a gradient of nothing but rounding: compared with the whole gradient's size.
        scale = max(gradient.norm(), 1e-3 * max(g.norm() for g in plain.gradients.values()))
        assert difference <= gradient_tolerance * scale, f"{what}: gradient of {name}"
        largest = max(largest, float(difference / scale))
    return largest


def check_features(session: Session, plain: Result, what: str, split: int | None = None) -> None:
    """The first epoch's features equal the plain model's at the freeze, within rounding.

    ``split``: where it is cut, in a session whose split is chosen.
    The session's are those after the layers without parameters that follow the freeze, if any do.
    """
    model, freeze = session.job_context.model, session.job_context.freeze
    following = model.segment(freeze, session.last_split, frozen=True)
    shape = model.output_shapes()[freeze]
    split_of = None if split is None else (lambda n: split)
    delivered = [features for features, _ in session.epoch(0, split_of=split_of)]
    assert len(delivered) == len(plain.features)
    for mine, at_freeze in zip(delivered, plain.features, strict=True):
        theirs = following(at_freeze.reshape(len(at_freeze), *shape).to(mine.device))
        difference = (mine.reshape(theirs.shape) - theirs).norm()
        assert difference <= GRADIENT_TOLERANCE * theirs.norm(), what


def order_of(session: Session, store: Path) -> list[list[list[int]]]:
    positions = file_order(store)
    return [[positions[ids].tolist() for ids in session.batch_ids(e)] for e in range(EPOCHS)]
