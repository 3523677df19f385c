"""Whole jobs that a seed draws: what they train, how it is run, and what happens to it meanwhile.

The flags of ``truth`` decide the numbers. Those of ``way``, the servers, the ranks and the trouble must not change
them: a training by the truth alone, with everything in the trainer, is what the job is compared with.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from support.random_data import DATA, Data
from support.thin_resnet import THIN_LAYERS, THIN_RESNET

NETWORK = "support.joint_training:network"
OWN = (THIN_RESNET, NETWORK)
"""Models of the tests' own, which servers must allow."""
RANDOMNESS = {
    "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1", "mnasnet0_5", "alexnet", "googlenet",
    "inception_v3", "vit_b_16", "swin_t", "convnext_tiny",
}  # fmt: skip
"""Models with dropout or the like, which ranks draw each for itself."""


@dataclass(frozen=True)
class Model:
    """A model, its number of layers to cut at, and the sides of inputs that it takes."""

    name: str
    layers: int
    sizes: tuple[int, ...]
    often: float
    """How often it is drawn, by its cost."""
    norms_until: int = 0
    """The first freeze behind which nothing that is trained takes statistics of a batch."""


MODELS = (
    Model("resnet18", 14, (32, 48), 5, 12),
    Model(THIN_RESNET, 14, (32, 64), 6, 12),
    Model(NETWORK, 8, (32,), 5, 0),
    Model("mobilenet_v2", 73, (32, 64), 2, 68),
    Model("mobilenet_v3_small", 59, (32, 64), 3, 58),
    Model("shufflenet_v2_x0_5", 89, (32, 64), 2, 28),
    Model("squeezenet1_1", 34, (64,), 2, 0),
    Model("mnasnet0_5", 72, (32,), 1, 57),
    Model("efficientnet_b0", 79, (32,), 1, 57),
    Model("regnet_y_400mf", 38, (32,), 1, 38),
    Model("densenet121", 22, (32,), 1, 20),
    Model("alexnet", 22, (64, 96), 1, 0),
    Model("googlenet", 26, (32, 64), 1, 28),
    Model("inception_v3", 32, (96,), 0.3, 28),
    Model("convnext_tiny", 40, (32,), 0.5, 0),
    Model("swin_t", 30, (32,), 0.7, 0),
    Model("vit_b_16", 20, (32,), 0.3, 0),
)
TROUBLES = (
    ("none", 8), ("kill", 6), ("interrupt", 3), ("term", 2), ("restart", 3), ("flip", 3), ("no cache", 2), ("again", 4),
    ("beside", 2), ("server flip", 1),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A drawn job."""

    seed: int
    data: Data
    model: Model
    truth: tuple[str, ...]
    way: tuple[str, ...]
    servers: tuple[tuple[str, ...], ...]
    """Flags of each server; none: the trainer starts its own."""
    server_cache: bool
    ranks: int
    """Under a launcher; 0: a process alone."""
    trouble: str
    tolerance: float
    """Relative, of losses; 0: equal to the last bit, the weights too."""

    def __str__(self) -> str:
        parts = [
            f"seed {self.seed}",
            f"trouble {self.trouble}",
            f"ranks {self.ranks}",
            f"tolerance {self.tolerance}",
            f"truth {' '.join(self.truth)}",
            f"way {' '.join(self.way)}",
            *(f"server {' '.join(flags)}" for flags in self.servers),
            *(["servers keep features"] if self.server_cache else []),
        ]
        return "\n  ".join(parts)


class _Draw:
    """Flags by chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def flag(self, share: float, name: str, *values: Any) -> tuple[str, ...]:
        """The flag with one of the values, in this share of the jobs."""
        drawn, value = self.chance(share), self.one(*values) if values else None
        if not drawn:
            return ()
        return (name,) if value is None else (name, str(value))


def draw(seed: int) -> Job:
    """Draw a job: always the same one from a seed."""
    d = _Draw(seed)
    data = d.random.choices(DATA, [4, 6, 3, 2, 3, 3, 3, 3, 1, 1, 1])[0]
    model = d.random.choices(MODELS, [m.often for m in MODELS])[0]
    freeze = d.one(None, 0, 1, d.random.randrange(model.layers), model.layers - 1, max(1, model.layers - 2))
    bs = d.one(2, 3, 7, 8, 16, 16, 20, 32, data.count, data.count + 13)
    ranks = d.random.choices((0, 1, 2), (10, 1, 4))[0]
    precision = d.random.choices(("fp32", "bf16", "fp16"), (12, 1, 1))[0]
    frozen_precision = d.random.choices(("fp32", "bf16"), (14, 1))[0]
    truth = _truth(d, data, model, freeze, bs, ranks)
    truth += ("--precision", precision, "--frozen-precision", frozen_precision)
    keeps = d.chance(0.25)
    servers = tuple(_server(d, keeps) for _ in range(d.random.choices((0, 1, 2), (4, 4, 2))[0]))
    trouble = d.random.choices([name for name, _ in TROUBLES], [often for _, often in TROUBLES])[0]
    if trouble == "server flip":
        keeps, servers = True, (_server(d, True),)
    if trouble == "restart" and not servers:
        servers = (_server(d, keeps),)
    way = _way(d, model, freeze, trouble, "rmsprop" in truth)
    if "--cache" in way and (freeze == 0 or ("--augment" in truth and "--augment-views" not in truth)):
        way = tuple(
            "auto" if part == "on" and way[n - 1] == "--cache" else part for n, part in enumerate(way)
        )
    if min(bs, data.count) < ranks or (data.count % bs or bs) < ranks:
        ranks = 0
    if (
        model.name in RANDOMNESS
        or (freeze is None and model.norms_until)
        or (freeze or 0) < model.norms_until
    ):
        ranks = min(ranks, 1)  # each would draw, or take statistics, of its own part
    rounded = precision != "fp32" or frozen_precision != "fp32"
    tolerance = 5e-2 if rounded else 1e-4
    if _exact(truth, way, bs, data, ranks):
        tolerance = 0.0
    return Job(seed, data, model, truth, way, servers, keeps, ranks, trouble, tolerance)


def _exact(truth: tuple[str, ...], way: tuple[str, ...], bs: int, data: Data, ranks: int) -> bool:
    """Whether the job computes all as its truth does: here, and in passes of 16 samples or more where it keeps any."""
    if ranks > 1 or way[way.index("--split") + 1] != "none" or "--micro-batch" in way:
        return False
    sizes = {min(bs, data.count), data.count % bs or bs}
    return way[way.index("--cache") + 1] == "off" or (min(sizes) >= 16 and "--validation" not in truth)


def _truth(d: _Draw, data: Data, model: Model, freeze: int | None, bs: int, ranks: int) -> tuple[str, ...]:
    """Flags that decide the numbers."""
    size = d.one(*model.sizes)
    flags: tuple[str, ...] = ("--model", model.name, "--dataset", data.name, "--bs", str(bs), "--no-progress")
    flags += (
        "--weights",
        d.one("random", "random:3"),
        "--epochs",
        str(d.one(1, 2, 2, 3, 4)),
        "--threads",
        "1",
    )
    if model.name == THIN_RESNET:
        flags += tuple(part for name in THIN_LAYERS for part in ("--blocks", name))
    if data.images and (size != 32 or d.chance(0.3)):
        flags += ("--image-size", str(size))
    flags += () if freeze is None else ("--freeze", str(freeze))
    flags += d.flag(0.3, "--seed", 0, 1, 2147483647)
    flags += d.flag(0.2, "--drop-last") if 2 * bs <= data.count else ()
    flags += d.flag(0.3, "--shuffle", "full", "chunks", "chunks:5", "chunks:7:2")
    flags += d.flag(0.35, "--validation", 0.1, 0.25, 0.5, data.name)
    if data.images and d.chance(0.3):
        flags += (
            "--augment",
            d.one("imagenet", "crop-flip", "flip", "jitter:brightness=0.4:hue=0.1", "flip:p=1"),
        )
        flags += d.flag(0.5, "--augment-views", 1, 2, 3)
    return flags + _optimizer(d) + _objective(d, data, ranks)


def _optimizer(d: _Draw) -> tuple[str, ...]:
    optimizer = d.random.choices(("sgd", "adamw", "adam", "rmsprop"), (5, 4, 2, 1))[0]
    rate = 0.002 if optimizer == "sgd" else 0.0002
    flags: tuple[str, ...] = ("--optimizer", optimizer, "--lr", str(rate))
    flags += d.flag(0.2, "--weight-decay", 0.01) + d.flag(0.1, "--no-decay-norm-bias")
    flags += d.flag(0.2, "--head-lr", rate * 2) + d.flag(0.1, "--backbone-lr", rate / 2)
    if optimizer == "sgd":
        flags += d.flag(0.2, "--nesterov") or d.flag(0.2, "--momentum", 0)
    schedule = d.random.choices(("constant", "cosine", "step", "one-cycle"), (6, 2, 1, 1))[0]
    flags += ("--schedule", schedule)
    if schedule == "step":
        flags += ("--step-every", d.one("1ep", "2", "0.5ep"))
    flags += d.flag(0.2, "--warmup", "0.5ep", 1, 2)
    flags += d.flag(0.25, "--accumulate", 2, 3, 50) + d.flag(0.25, "--clip-norm", 0.5, 100)
    return flags + d.flag(0.2, "--ema", 0.9, 0.999)


def _objective(d: _Draw, data: Data, ranks: int) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if data.kind == "regression":
        flags += d.flag(0.5, "--loss", "l1", "huber", "mse")
    else:
        flags += d.flag(0.15, "--class-weights", "balanced") + d.flag(0.15, "--label-smoothing", 0.1)
    if ranks < 2:
        flags += d.flag(0.1, "--feature-mixup", 0.3)
    return flags


def _way(d: _Draw, model: Model, freeze: int | None, trouble: str, rmsprop: bool) -> tuple[str, ...]:
    """Flags that must not change the numbers; those of folders come when the job is run."""
    split = d.random.choices(
        ("auto", "none", "freeze", "min", "hapi", "nsg", "bandwidth", "oracle", "index"),
        (7, 5, 4, 1, 1, 1, 1, 1, 3),
    )[0]
    if split == "index":
        split = str(d.random.randrange((1 if freeze is None else freeze) + 1))
    flags: tuple[str, ...] = ("--split", split)
    cache = "on" if trouble in ("flip", "no cache") else d.one("off", "auto", "auto", "on", "on")
    flags += ("--cache", cache)
    if cache != "off":
        flags += d.flag(0.3, "--cache-size", "1MiB", "2MiB", "100MB")
        flags += d.flag(0.4, "--cache-codec", "none", "zeros", "planes", "zeros+planes")
        flags += d.flag(0.5, "--cache-memory", 0, "100kB", "1GB")
    flags += d.flag(0.3, "--replan", "off") + d.flag(0.3, "--alternate", "off")
    flags += d.flag(0.2, "--profile-batches", 1, 2)
    flags += d.flag(0.5, "--request-size", 1, 5, 16, 33) + d.flag(0.2, "--in-flight", 1, 2)
    flags += d.flag(0.2, "--prefetch-bytes", 0, "1MB") + d.flag(0.15, "--micro-batch", 1, 5, 16)
    flags += d.flag(0.5, "--wire-codec", "none", "zeros", "planes", "zeros+planes")
    flags += d.flag(0.1, "--egress", 1) or d.flag(0.1, "--check-features", "off")
    flags += d.flag(0.1, "--recheck", 1, 5) + d.flag(0.1, "--memory", "4GB", "1GB")
    flags += d.flag(0.7 if trouble in ("kill", "interrupt", "term") else 0.2, "--checkpoint-every", 1, 2, 5)
    flags += d.flag(0.2, "--keep", 2)
    where = ("off", "auto") if rmsprop else ("off", "auto", "disk", "disk", "host")
    return flags + d.flag(0.3, "--offload", *where)


def _server(d: _Draw, keeps: bool) -> tuple[str, ...]:
    flags = d.flag(0.4, "--cos-batch", *((16, 100) if keeps else (1, 3, 16, 100))) or d.flag(
        0.3, "--batching", "fixed", "adaptive"
    )
    flags += d.flag(0.2, "--merge", 64) + d.flag(0.1, "--no-model-reuse") + d.flag(0.2, "--chunk-cache", 0)
    flags += d.flag(0.2, "--max-running", 1) + d.flag(0.1, "--decode-threads", 2)
    return flags + tuple(part for name in OWN for part in ("--allow-model", name))
