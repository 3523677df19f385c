"""Input of a plan: sizes, measured seconds, and the settings of one job. Plain JSON, no torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hapi.errors import ConfigError, UsageError
from hapi.paths import write_whole
from hapi.profiler.reading import load_document, read_strictly

PROFILE_VERSION = 4
MAX_PROFILE_BYTES = 64 << 20
"""Largest profile, also as a part of a run's report."""
_MAX_LAYERS = 100_000
MIN_SHARE = 1e-9
"""Smallest bandwidth and share of a server that are believed: seconds stay finite."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, per sample."""

    name: str
    output_bytes: int
    """Bytes of one sample of its output."""
    flops: float
    """Floating-point operations of one sample's forward pass."""
    parameter_bytes: int
    working_bytes: int
    """Most bytes of one sample that are alive at once inside it: input, output, what is between."""
    saved_bytes: int
    """Bytes of one sample that it keeps for the backward pass when it is trained."""
    workspace_bytes: int = 0
    """Most bytes that one of its operations takes beside, whatever the batch: weights in another layout."""
    server_seconds: float
    """Seconds of one sample's forward pass on the server."""
    client_seconds: float
    """Seconds of one sample's forward pass on the client."""


@dataclass(frozen=True, kw_only=True)
class TierProfile:
    """Constants of one tier's machine (HAPI, section 4.3, Table 1: linear in the data's size)."""

    device: str
    """``cpu`` or ``cuda``: on a CPU the forward pass shares its processors with everything else."""
    processors: int = 1
    """Processor cores that the tier may use."""
    threads: int = 1
    """Number of them that a forward pass on a CPU keeps busy."""
    devices: int = 1
    """Devices that run forward passes at the same time."""
    decode_seconds: float
    """CPU seconds a stored sample takes to be decoded and transformed."""
    codec_seconds_per_byte: float
    """CPU seconds. Server: making and sending frames with checksums. Client: receiving frames and checking them."""
    overhead_seconds: float = 0.0
    """CPU seconds a sample costs beside: reading, HTTP, bookkeeping."""
    to_device_seconds_per_byte: float
    from_device_seconds_per_byte: float

    def together(self, compute: float, overhead: float) -> float:
        """Seconds until ``compute`` (forward passes, one after another) and ``overhead`` (CPU seconds of other threads)
        are both done, when they run at the same time."""
        if self.device == "cpu":
            shared = (compute * self.threads + overhead) / self.processors
            return max(compute, overhead / self.processors, shared)
        return max(compute / self.devices, overhead / self.processors)


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """The network from the server to the client."""

    bits_per_second: float
    variation: float
    """Standard deviation of the bandwidth over its mean, from 0 to below 1."""
    request_seconds: float
    """Seconds of a request beside its bytes: the way there, the store's first byte."""
    sample_bytes: float = 0.0
    """Bytes a sample takes on the wire beside its content: its share of frame headers, its id and label."""


@dataclass(frozen=True, kw_only=True)
class ServerProfile:
    """Costs of the server beside computing."""

    read_seconds: float
    """Seconds to read one stored sample."""
    model_load_seconds: float
    """Seconds to load the front for a request; 0 when models stay resident."""
    concurrency: int
    """Requests worked on at a time (the "waves" of HAPI, section 4.3)."""
    waiting_seconds: float
    """Seconds that a request waits for other tenants, as the server reports them."""
    cos_batch: int
    """Samples per forward pass and frame."""
    servers: int = 1
    """Servers that share the requests. All seconds of work are such that one could do alone what they do together."""
    share: float = 1.0
    """The part of its computing that other tenants leave, above 0 and up to 1."""


@dataclass(frozen=True, kw_only=True)
class SampleProfile:
    """Bytes of one sample in the possible forms of sending it."""

    stored_bytes: int
    """Bytes as stored (JPEG, or a tensor packed before); split 0 sends them."""
    encoded: bool
    """True when the stored form has to be decoded and transformed."""
    uint8_bytes: int
    tensor_bytes: int
    """Bytes of the float32 tensor that enters the model."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything measured about one model, frozen at one layer, on one pair of machines.

    ``hapi plan MODEL --save-profile FILE`` and ``hapi-train --save-profile FILE`` write one, to be read with::

        profile = hapi.Profile.load("profile.json")
        print(profile.model, profile.freeze, [layer.output_bytes for layer in profile.layers])
    """

    version: int = PROFILE_VERSION
    model: str
    freeze: int
    last_split: int
    """The largest candidate split: the freeze, or later over layers without parameters and randomness.

    Layers 1 to here that the server does not run are run on the client without gradients; later layers are
    trained.
    """
    layers: tuple[LayerProfile, ...]
    samples: SampleProfile
    server: ServerProfile
    server_tier: TierProfile
    client_tier: TierProfile
    link: LinkProfile
    step_seconds: float
    """Seconds a sample of forward and backward pass through the layers after ``last_split``."""
    update_seconds: float
    """Seconds of one optimiser step, whatever the batch."""
    optimizer_bytes_per_parameter_byte: float
    """State that the optimiser keeps beside the gradients (1 for momentum, 2 for Adam)."""
    offloaded_bytes: int = 0
    """Bytes of the trained layers' parameters, gradients and states that are not in memory."""
    one_machine: bool = False
    """True when server and client share one machine's processors."""
    ranks: int = 1
    """Processes of the training, among which the link and the servers were shared when they were measured."""
    local_ranks: int = 1
    """Those of them on the client's machine, which shared its processors."""
    notes: tuple[str, ...] = ()
    """Origin of the figures: measured, scaled or assumed; when, and with which versions."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= _MAX_LAYERS:
            raise ConfigError(f"profile: expected 1 to {_MAX_LAYERS} layers, found {len(self.layers)}")
        if not 0 <= self.freeze <= self.last_split <= len(self.layers):
            raise ConfigError(
                f"profile: freeze {self.freeze} and last_split {self.last_split} must ascend within the "
                f"{len(self.layers)} layers"
            )
        if not self.link.bits_per_second >= MIN_SHARE or not self.link.variation < 1:
            raise ConfigError("profile: link needs bits_per_second well above 0 and a variation below 1")
        if min(self.server.concurrency, self.server.cos_batch, self.server.servers) < 1:
            raise ConfigError("profile: server.concurrency, cos_batch and servers must be at least 1")
        if not MIN_SHARE <= self.server.share <= 1:
            raise ConfigError("profile: server.share must be well above 0 and at most 1")
        tiers = (self.server_tier, self.client_tier)
        if min(count for t in tiers for count in (t.processors, t.threads, t.devices)) < 1:
            raise ConfigError("profile: processors, threads and devices of a tier must be at least 1")
        if not 1 <= self.local_ranks <= self.ranks:
            raise ConfigError("profile: local_ranks must be at least 1 and at most ranks")

    def sent_bytes(self, split: int) -> int:
        """Bytes of one sample that cross the network at ``split``."""
        return self.layers[split - 1].output_bytes if split else self.samples.stored_bytes

    def output_bytes(self) -> list[int]:
        """Bytes of one sample: ``[0]`` of the input tensor, ``[i]`` after layer i."""
        return [self.samples.tensor_bytes, *(layer.output_bytes for layer in self.layers)]

    def to_json(self) -> dict[str, Any]:
        """Return a document that :meth:`from_json` reads back, equal to this one."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse ``document``; :class:`ConfigError` names the first field that is wrong."""
        version = document.get("version") if isinstance(document, Mapping) else None
        # First: of another version the fields are others, too.
        if isinstance(version, int) and version != PROFILE_VERSION:
            raise ConfigError(
                f"profile: version is {version}, this hapi reads {PROFILE_VERSION}; measure anew"
            )
        if isinstance(document, Mapping):  # what is usual need not be said
            usual = {"one_machine": False, "offloaded_bytes": 0, "ranks": 1, "local_ranks": 1}
            document = {**usual, **document}
        return typing.cast(Self, read_strictly(cls, document, "profile"))

    def save(self, path: str, job: Job | None = None) -> None:
        """Write it as JSON, whole or not at all; :class:`UsageError` when that fails.

        Args:
            path: the file.
            job: the run that it was measured in, which :meth:`Job.load` reads back.
        """
        document = self.to_json() if job is None else {**self.to_json(), "job": dataclasses.asdict(job)}
        write_whole(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str) -> Self:
        """Read a saved profile, or that in a run's report; :class:`UsageError` or :class:`ConfigError` in one line."""
        document = _loaded(path)
        if isinstance(document, Mapping) and "epochs" in document:
            document = _reported(document, path)
        if isinstance(document, Mapping):
            document = {name: value for name, value in document.items() if name != "job"}
        try:
            return cls.from_json(document)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _loaded(path: str) -> Any:
    return load_document(path, MAX_PROFILE_BYTES, "make a profile with 'hapi plan --save-profile'")


def _reported(report: Mapping[str, Any], path: str) -> Any:
    """Profile in the report of a run that was read from ``path``."""
    plan = report.get("plan")
    found = plan.get("profile") if isinstance(plan, Mapping) else None
    if found is None:
        raise ConfigError(
            f"{path}: is the report of a run without a profile, as its split was fixed or it ended while profiling; "
            "give one of a whole run with --split auto"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run as far as its price depends on it. The defaults are those of the trainer's settings.

    >>> import hapi
    >>> hapi.Job(bs=256, samples=50_000, epochs=10).request_size
    128
    """

    bs: int = 128
    """Training batch, in samples."""
    samples: int = 30720
    """Samples of an epoch (HAPI, section 5.1)."""
    epochs: int = 30
    micro_batch: int = 64
    request_size: int = 128
    in_flight: int = 4
    prefetch_bytes: int = 1 << 30
    memory_bytes: int | None = None
    """The client's budget: device memory on a GPU, process memory on a CPU; None for no bound."""
    weights_from: int | None = None
    """Weights of the layers after this one stay on the client's device, also at a later split, as a strategy may come
    back to them; None for only those after the split."""
    alternate: bool = True
    """Batches may alternate between two splits."""

    @classmethod
    def load(cls, path: str) -> Self | None:
        """The run that a profile was measured in, from the file of :meth:`Profile.save` or from a run's report.

        Returns:
            The job; None for a profile without one, as ``hapi plan`` saves it.

        Raises:
            UsageError: the file cannot be read.
            ConfigError: it is not of the form that was written.
        """
        document = _loaded(path)
        plan = document.get("plan", document) if isinstance(document, Mapping) else None
        found = plan.get("job") if isinstance(plan, Mapping) else None
        if found is None:
            return None
        known = {**dataclasses.asdict(cls()), **(found if isinstance(found, Mapping) else {"job": found})}
        return typing.cast(Self, read_strictly(cls, known, f"{path}: job"))

    def __post_init__(self) -> None:
        for name in ("bs", "samples", "epochs", "micro_batch", "request_size", "in_flight"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be at least 1")
