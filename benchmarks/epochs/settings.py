"""Settings of the benchmark ``epochs``: its cells, its ways of doing one job, and its prices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.ways import way_called

REAL_JOB = "solar"
"""EfficientNet-Lite0 with its weights, on photographs of solar cells."""
REAL_JOBS = {REAL_JOB: "_blocks.14.add", "solar-head": "_bn1"}
"""Last frozen layer of each such job: the last block and the head are trained, or the head alone."""
MODELS = ("resnet50", "resnet18", "transformer", *REAL_JOBS)
"""Models that the plain script has by hand, too."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of doing the job."""

    name: str
    title: str
    """Name for people."""
    flags: tuple[str, ...] | None = None
    """Flags of ``hapi-train``; None for the plain script."""
    in_store: bool = False
    """True: the program runs on the server's side, with no link between."""
    samples_only: bool = False
    """True: the cache keeps stored samples and no features."""
    by_epochs: bool = False
    """True: what it does depends on the number of epochs that it is told."""
    on_request: bool = False
    """True: it is measured only if it is asked for."""

    @property
    def caches(self) -> bool:
        """Return whether the trainer may keep something on its disk."""
        return self.flags is not None and "off" not in self.flags


WAYS = (
    Way(name="recompute", title="recompute in each epoch", flags=("--cache", "off", "--alternate", "off")),
    Way(name="alternating", title="recompute, alternating", flags=("--cache", "off"), on_request=True),
    Way(name="images", title="stream the images", flags=("--split", "none", "--cache", "off")),
    Way(name="kept images", title="keep the images", flags=("--split", "none"), samples_only=True),
    Way(name="store", title="all in the store", in_store=True),
    Way(name="plain", title="extract once by hand"),
    Way(name="always", title="keep features always", flags=("--cache", "on"), on_request=True),
    *(
        Way(
            name=f"{place} {codec}",
            title=f"codec {where}: {codec}",
            flags=("--split", "freeze", f"--{place}-codec", codec, "--cache", cache),
            on_request=True,
        )
        for place, where, cache in (("wire", "on the wire", "off"), ("cache", "at rest", "on"))
        for codec in ("auto", "none")
    ),
    Way(name="hapi", title="Hapi", flags=(), by_epochs=True),
)
"""All, in the order in which they are shown."""
CODEC_PAIRS = (("wire auto", "wire none"), ("cache auto", "cache none"))
"""Ways that differ in a codec alone: the one that measures whether it pays, and none."""


def way_of(name: str) -> Way:
    """Return the way with this name; :class:`UsageError` for an unknown one."""
    return way_called(name, WAYS)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in one currency, such as dollars."""

    egress: float = 0.09
    """Per GB over the link."""
    server: float = 0.5
    """Per hour of a processor beside the store that works."""
    trainer: float = 0.5
    """Per hour of the trainer's machine, from the job's start to its end."""

    def of(self, nbytes: float, server_seconds: float, seconds: float) -> float:
        """Return the price of a job.

        Args:
            nbytes: bytes over the link.
            server_seconds: processor seconds beside the store.
            seconds: of the job.
        """
        return (
            nbytes / 1e9 * self.egress + server_seconds / 3600 * self.server + seconds / 3600 * self.trainer
        )


@dataclass(frozen=True, kw_only=True)
class EpochsSettings:
    """Jobs to measure, and how."""

    models: tuple[str, ...] = MODELS
    bandwidths: tuple[float, ...] = (10e6, 40e6, 160e6)
    """Bits per second."""
    counts: tuple[int, ...] = (1, 2, 10, 30)
    """Numbers of epochs of a job."""
    ways: tuple[str, ...] = tuple(way.name for way in WAYS if not way.on_request)
    measured: int | None = 4
    """Epochs that are run at most; later ones are computed. None: all of them are run."""
    repeats: int = 1
    samples: int = 1024
    """Images of the jobs that are not the real one."""
    image_size: int = 64
    """Their side in pixels."""
    real_samples: int | None = None
    """Images of the real job; None for all of its training images."""
    bs: int = 64
    seed: int = 0
    folder: Path | None = None
    """Where the data and the caches are written; None for the temporary folder."""

    def measuring(self) -> dict[str, object]:
        """Return the settings that must be the same in all of a file's records."""
        return {
            "samples": self.samples,
            "image_size": self.image_size,
            "real_samples": self.real_samples,
            "bs": self.bs,
            "seed": self.seed,
        }

    def cells(self) -> list[EpochsCell]:
        """All cells; those of one model follow each other."""
        return [
            EpochsCell(model=model, bandwidth=bandwidth)
            for model in self.models
            for bandwidth in self.bandwidths
        ]

    def runs(self, way: Way) -> list[int]:
        """Return the numbers of epochs that ``way`` must be told, in runs of their own."""
        return list(self.counts) if way.by_epochs else [max(self.counts)]


@dataclass(frozen=True, kw_only=True)
class EpochsCell:
    """One model at one bandwidth."""

    model: str
    bandwidth: float
    """Bits per second."""

    @property
    def key(self) -> str:
        """Unlike that of any other cell."""
        return f"{self.model}/{self.bandwidth:.0f}"
