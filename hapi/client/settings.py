"""Settings of a session, in groups: each part of the client takes the groups that it needs.

Defaults say where they come from. Users see one flat list: flags, keys of a YAML file, arguments of
:class:`SessionSettings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hapi.codecs.names import CacheCodec
from hapi.config.settings import setting, with_other_names
from hapi.profiler.reuse.facts import MOST_PRICE, PRICES, Objective, Prices
from hapi.profiler.strategies import PLANNERS
from hapi.wire.references import MAX_IMAGE_SIDE, Precision
from hapi.wire.transport.slow_server import LEAST_RATE, LONGEST_ANSWER, RATE_SECONDS

OnOff = Literal["on", "off"]
CacheMode = Literal["auto", "on", "off"]
WireCodec = Literal["auto", "none", "zeros", "planes", "zeros+planes", "fp16", "bf16", "int8"]
STORE_PREFIX = "store:"
"""Beginning of the name of a pushed model."""
ORACLE = "oracle"
STRATEGY_NAMES = (*PLANNERS, ORACLE)
"""Strategies that the setting ``split`` may name."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network, and how this side runs its part of it."""

    model: str = setting(
        "architecture (resnet50, transformer, any torchvision name, timm:NAME, package.module:factory) "
        "or store:NAME for a pushed model",
        default="resnet18",
        metavar="MODEL",
    )
    weights: str = setting(
        "auto (pre-trained where in reach, else random), random[:SEED] (of --seed), a torchvision weights name "
        "(DEFAULT, IMAGENET1K_V1), or a checkpoint: a file, an index.json of shards, or a folder with one",
        default="auto",
        metavar="WEIGHTS",
    )
    blocks: tuple[str, ...] = setting(
        "module paths run in sequence, for a model that cannot be traced",
        default=(),
        metavar="PATH,PATH",
    )
    allow_model: tuple[str, ...] = setting(
        "a model factory that a pushed model (store:NAME) may name; may be repeated",
        default=(),
        metavar="PACKAGE.MODULE:FACTORY",
    )
    freeze: int | str | None = setting(
        "last frozen layer, by index or name (default: the paper's for its families, else all but the head)",
        default=None,
        metavar="N|NAME",
    )
    frozen_precision: Precision = setting(
        "type of the frozen layers' results, on both tiers and on the wire, where bf16 and fp16 take half the bytes; "
        "the same numbers at every split, rounded. A processor without units for it computes in float32 and rounds",
        default="fp32",
    )
    device: str = setting("auto, cpu, cuda or cuda:N", default="auto", metavar="DEVICE")
    tf32: bool = setting(
        "let a GPU round the inputs of float32 products to 10 bits, here; the server's is a flag of hapi-server",
        default=False,
    )
    threads: int | None = setting("CPU threads of the trainer", default=None, low=1, high=1024)
    micro_batch: int = setting(
        "samples at a time through the frozen layers on this side (measured flat from 16 up on a CPU)",
        default=64,
        low=1,
        high=1 << 20,
    )
    memory: int | None = setting(
        "memory that the trainer may use (default: the free memory): device memory on a GPU, else its process's",
        default=None,
        low=1 << 20,
        high=1 << 48,
        unit="bytes",
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The samples, and in which order and batches they are used."""

    dataset: str | None = setting(
        "dataset in the server's store (default: the only one there)", default=None, metavar="NAME"
    )
    image_size: int | None = setting(
        "side of the square input, in pixels, instead of the dataset's own",
        default=None,
        low=1,
        high=MAX_IMAGE_SIDE,
    )
    augment: tuple[str, ...] = setting(
        "random transforms of the training samples: imagenet (resized-crop,flip), crop-flip (crop,flip), or any of "
        "resized-crop[:scale=A-B][:ratio=A-B], crop[:padding=N], flip[:p=X], "
        "jitter[:brightness=X][:contrast=X][:saturation=X][:hue=X], as in torchvision",
        default=(),
        metavar="NAME",
    )
    augment_views: int | None = setting(
        "draws of --augment for each sample, in turn from epoch to epoch, so that their features can be kept "
        "(default: a new draw in each epoch)",
        default=None,
        low=1,
        high=1 << 20,
    )
    validation: float | str | None = setting(
        "share of the samples held out (0.1), or the name of another dataset, measured after each epoch",
        default=None,
        metavar="X|NAME",
    )
    bs: int = setting("training batch size", default=128, low=1, high=1 << 20, flags=("--batch-size",))
    epochs: int = setting("passes over the data", default=3, low=1, high=1 << 20)
    seed: int = setting(
        "seed of order, head, random weights, random transforms and dropout",
        default=0,
        low=0,
        high=(1 << 31) - 1,
    )
    shuffle: str = setting(
        "order of an epoch: full (any permutation), or chunks[:GROUP[:WINDOW]]: chunks of GROUP stored samples in "
        "random order, WINDOW of them open at a time; the default ones suit the server's store. auto is full where the "
        "server reads a disk, and chunks where it reads small samples from an object store",
        default="auto",
        metavar="ORDER",
    )
    trainers: int = setting(
        "trainers that share each epoch without overlap, for loops of your own, which average gradients; --bs is of "
        "each. Under torchrun nothing is to be given",
        default=1,
        low=1,
        high=65536,
    )
    trainer: int = setting("which of them this one is, from 0", default=0, low=0, high=65535)
    drop_last: bool = setting("leave out the last batch of an epoch when it is not full", default=False)


def _price(name: str) -> float:
    """Return the setting of a price."""
    price: float = setting(PRICES[name], default=0.0, low=0, high=MOST_PRICE, metavar="PRICE")
    return price


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """The split and what is kept, and how they are chosen."""

    split: int | str = setting(
        "where the server stops: auto (measured and chosen while training runs), the strategies hapi, nsg, bandwidth "
        "and oracle, the static ones none, freeze and min, an index or a layer's name",
        default="auto",
        metavar="N|NAME",
    )
    replan: OnOff = setting(
        "let the split follow when bandwidth or load change after it was chosen (off: HAPI, Algorithm 1)",
        default="on",
    )
    alternate: OnOff = setting(
        "with auto, let batches alternate between two splits where that is faster, so that the server computes one "
        "while the trainer computes the next (off: HAPI's one split)",
        default="on",
    )
    profile_epoch: tuple[int, ...] = setting(
        "epoch that is profiled before the split is chosen; may be repeated (HAPI, section 4.3: epoch 0)",
        default=(0,),
        low=0,
        high=1 << 20,
    )
    profile_batches: int | None = setting(
        "batches that are profiled at a late split, and as many at the smallest (default: half the epoch each; with "
        "auto at most that, as few as show enough)",
        default=None,
        low=1,
        high=1 << 20,
    )
    profile: str | None = setting(
        "choose the split at once from this saved profile, or from that in a run's report",
        default=None,
        metavar="FILE",
    )
    objective: Objective = setting(
        "aim of what is kept, and with --split auto of the split: the shortest job, or the cheapest",
        default="time",
    )
    egress: float = _price("egress")
    server_price: float = _price("server_price")
    trainer_price: float = _price("trainer_price")

    @property
    def prices(self) -> Prices:
        """All prices; zeros where money does not count."""
        return Prices(egress=self.egress, server=self.server_price, trainer=self.trainer_price)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The servers, and how samples and features come from them."""

    server: tuple[str, ...] = setting(
        "URL of a hapi-server, or fleet+URL of a fleet's list of them; may be repeated",
        default=(),
        env="HAPI_SERVER",
        metavar="URL",
    )
    store: str | None = setting(
        "without --server: folder of the store that an embedded server serves",
        default=None,
        env="HAPI_STORE",
        metavar="STORE",
    )
    token_file: str | None = setting(
        "file with the bearer token (or HAPI_TOKEN)", default=None, metavar="FILE"
    )
    ca_file: str | None = setting(
        "certificate authority (PEM) to trust for https servers", default=None, metavar="FILE"
    )
    request_size: int = setting(
        "samples per request (128 in the paper, section 5.1)", default=128, low=1, high=65536
    )
    in_flight: int = setting(
        "most requests under way at a time, per server (the server runs 4 at a time by default)",
        default=4,
        low=1,
        high=256,
    )
    prefetch_bytes: int = setting(
        "bound for batches received ahead; at least one is always ahead",
        default=1 << 30,
        low=0,
        high=1 << 48,
        unit="bytes",
    )
    wire_codec: WireCodec = setting(
        "encoding of features on the wire. Exact: none, zeros (a bitmap of them), planes (exponents compressed), both, "
        "or auto: from epoch 1 on the one that gains on the measured link, if any. Rounded, which changes training: "
        "fp16, bf16, int8 (8 bit with a scale a sample)",
        default="auto",
    )
    cache: CacheMode = setting(
        "keep features of frozen layers, and stored samples that came over the network, on this machine's disk for "
        "later epochs and jobs: auto (what the plan finds worth keeping), on or off",
        default="auto",
    )
    cache_dir: str | None = setting(
        "folder of --cache (default: $XDG_CACHE_HOME/hapi/cache, which is ~/.cache/hapi/cache)",
        default=None,
        metavar="DIR",
    )
    cache_size: int | None = setting(
        "most bytes of that folder, of all jobs in it (default: half of what is free or in it, at most 100 GB)",
        default=None,
        low=1 << 20,
        high=1 << 48,
        unit="bytes",
    )
    cache_codec: CacheCodec = setting(
        "encoding of features on that disk, all exact: none, zeros, planes, both, or auto: the one that pays, if any, "
        "by the disk's measured rates. What is kept is read whatever its encoding",
        default="auto",
    )
    cache_memory: int | None = setting(
        "most bytes of kept features in this process's memory too (default: an eighth of what is free, at most 1 GiB)",
        default=None,
        low=0,
        high=1 << 48,
        unit="bytes",
    )
    timeout: float = setting(
        "silence of a server before it counts as dead", default=60.0, above=0, high=86400, unit="duration"
    )
    patience: float = setting(
        "how long to go on trying when no server answers, or (at most 1min) the last checkpoint cannot be written",
        default=300.0,
        low=0,
        high=864000,
        unit="duration",
    )
    answer_timeout: float = setting(
        "longest time of one answer in all, beside what its bytes take at --slow-server-rate",
        default=LONGEST_ANSWER,
        above=0,
        high=864000,
        unit="duration",
    )
    slow_server_rate: int = setting(
        "bytes a second that an answer must bring while it is on its way; 0: any",
        default=LEAST_RATE,
        low=0,
        high=1 << 40,
        unit="bytes",
    )
    slow_server_seconds: float = setting(
        "seconds of waiting over which that is measured", default=RATE_SECONDS, above=0, high=86400
    )
    check_features: OnOff = setting(
        "whether features that are infinite or no numbers end the training (one pass over each frame)",
        default="on",
    )
    recheck: int = setting(
        "samples of each epoch, drawn in secret, that are computed here too, from another server's stored samples "
        "where there is one; a server whose answers differ is dropped",
        default=0,
        low=0,
        high=1 << 20,
    )


@with_other_names
@dataclass(frozen=True, kw_only=True)
class SessionSettings(NetworkSettings, PlanningSettings, DataSettings, ModelSettings):
    """Settings of a session; they are checked when it opens. ``hapi-train --help`` describes each of them.

    It is each of the groups, so that what needs one of them takes it as it is.

    >>> import hapi
    >>> settings = hapi.SessionSettings(model="resnet50", dataset="flowers", server=("http://store:8099",), bs=256)
    >>> settings.split
    'auto'
    """


def default_store() -> str:
    """Return the per-user store folder that is used when none is named."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(base) / "hapi" / "store")
