"""What a choice of split is made of: what fits the memory, what failed, and whose profile it may be made from. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from hapi.errors import ConfigError
from hapi.profiler.cost import memory
from hapi.profiler.fit import Sizes, profile_of
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import PLANNERS, Plan, plan


class OtherDeviceError(ConfigError):
    """A profile whose seconds are those of another kind of device."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The split changed."""

    epoch: int
    batch: int
    """The first batch that is extracted at the new split."""
    before: int
    after: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "from": self.before,
            "to": self.after,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """What :meth:`to_json` made; ValueError, KeyError or TypeError for anything else."""
        epoch, batch, before, after = (document[name] for name in ("epoch", "batch", "from", "to"))
        if not all(type(v) is int and v >= 0 for v in (epoch, batch, before, after)):
            raise ValueError("a change of split is not made of whole numbers")
        return cls(epoch=epoch, batch=batch, before=before, after=after, why=str(document["why"]))


def kept_splits(state: Any, last_split: int) -> tuple[int, int, int, list[int]]:
    """(split, earliest, latest, profiled epochs) of a plan that was kept.

    ValueError, KeyError or TypeError for anything that is no plan of a model whose last split is ``last_split``.
    """
    split, earliest, latest, profiled = (state[name] for name in ("split", "earliest", "latest", "profiled"))
    if not all(type(s) is int and 0 <= s <= last_split for s in (split, earliest, latest)):
        raise ValueError("its splits are none of this model")
    if not all(type(e) is int for e in profiled):
        raise ValueError("its profiled epochs are no numbers")
    return split, earliest, latest, profiled


def earliest_that_fits(sizes: Sizes, job: Job) -> int:
    """HAPI, Algorithm 1, line 6: the earliest split that is predicted to fit the client's memory.

    :class:`DeviceMemoryError` when none does, which says what would.
    """
    blank = profile_of(sizes, {}, (1.0, 0.0))
    if job.memory_bytes is None:
        return 0
    for split in range(sizes.last_split + 1):
        if memory(blank, job, split).peak <= job.memory_bytes:
            return split
    return plan("auto", blank, job).split  # raises


def latest_up_to_freeze(strategy: str, sizes: Sizes, job: Job, earliest: int) -> int:
    """The split next to the freeze that is predicted to fit: the least that the client can do (HAPI, Algorithm 1).

    :class:`DeviceMemoryError` when ``strategy`` will find no split that fits.
    """
    blank = profile_of(sizes, {}, (1.0, 0.0))
    if strategy in PLANNERS:
        plan(strategy, blank, job)  # raises
    fitting = (
        split
        for split in range(sizes.freeze, earliest - 1, -1)
        if job.memory_bytes is None or memory(blank, job, split).peak <= job.memory_bytes
    )
    return next(fitting, earliest)


def received_ahead(sizes: Sizes, job: Job, earliest: int) -> int:
    """Bytes of batches that may be there at once: the job's bound, and on a CPU no more than its memory leaves.

    Of the splits from ``earliest`` on that fit, the one that leaves least counts: any of them may be next.
    """
    if job.memory_bytes is None or sizes.client.device != "cpu":
        return job.prefetch_bytes
    blank = profile_of(sizes, {}, (1.0, 0.0))
    needs = [memory(blank, job, split) for split in range(earliest, sizes.last_split + 1)]
    left = [job.memory_bytes - (m.peak - m.batches) for m in needs if m.peak <= job.memory_bytes]
    return max(0, min([job.prefetch_bytes, *left]))


def allowed(found: Plan, earliest: int, latest: int) -> int:
    """The plan's split; if that lies outside ``earliest`` to ``latest``, the fastest of these that fit the memory."""
    if earliest <= found.split <= latest:
        return found.split
    inside = found.candidates[earliest : latest + 1]
    fitting = [c.estimate for c in inside if c.fits] or [c.estimate for c in inside]
    return min(fitting, key=lambda e: e.epoch_seconds).split


def fitted(profile: Profile, sizes: Sizes) -> Profile:
    """``profile`` with the bytes of this job, which are known.

    :class:`ConfigError` if it is of another model, :class:`OtherDeviceError` if of another kind of device.
    """
    there = [(layer.name, layer.output_bytes) for layer in profile.layers[: profile.last_split]]
    here = [(layer.name, layer.output_bytes) for layer in sizes.layers[: sizes.last_split]]
    ends = (profile.freeze, profile.last_split, len(profile.layers))
    if ends != (sizes.freeze, sizes.last_split, len(sizes.layers)) or there != here:
        different = next((a[0] for a, b in zip(there, here, strict=False) if a != b), "")
        at = f"its layer {different!r} differs" if different else f"it has {ends[2]} layers, freeze {ends[0]}"
        raise ConfigError(
            f"the profile of {profile.model!r} does not fit {sizes.model!r} with {len(sizes.layers)} layers and "
            f"freeze {sizes.freeze}: {at}; use one of the same model, freeze and image size (--save-profile)"
        )
    if profile.client_tier.device != sizes.client.device:
        raise OtherDeviceError(
            f"the profile was measured with the client on {profile.client_tier.device}, this one is on "
            f"{sizes.client.device}; measure anew"
        )
    layers = tuple(
        replace(own, server_seconds=other.server_seconds, client_seconds=other.client_seconds)
        for own, other in zip(sizes.layers, profile.layers, strict=True)
    )
    return replace(
        profile,
        layers=layers,
        samples=sizes.samples,
        optimizer_bytes_per_parameter_byte=sizes.optimizer_bytes_per_parameter_byte,
    )
