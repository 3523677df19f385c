"""Records of a plan: changes, checkpoints and profiles, checked against the job. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hapi.errors import ConfigError
from hapi.profiler.fit import Sizes
from hapi.profiler.profile import Job, Profile
from hapi.profiler.ranks import as_shared
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.strategies import Plan, choices
from hapi.text import counted


class OtherDeviceError(ConfigError):
    """A profile whose seconds were measured on another kind of device."""


def kept_splits(state: Any, last_split: int) -> tuple[Alternation, int, int, list[int]]:
    """Return (what batches run at, min_split, max_split, profiled epochs) of a saved plan.

    ValueError, KeyError or TypeError for anything but a plan of a model whose last split is ``last_split``.
    """
    split, min_split, max_split, profiled = (
        state[name] for name in ("split", "min_split", "max_split", "profiled")
    )
    if not all(type(s) is int and 0 <= s <= last_split for s in (split, min_split, max_split)):
        raise ValueError("its splits are none of this model")
    if not all(type(e) is int for e in profiled):
        raise ValueError("its profiled epochs are no numbers")
    at, other, share = Alternation.only(split), state.get("other_split"), state.get("other_share")
    if other is not None:
        if not (
            type(other) is int and 0 <= other <= last_split and type(share) is float and 0 < share <= 0.5
        ):
            raise ValueError("its splits do not alternate")
        at = Alternation(split=split, other=other, share=share)
    return at, min_split, max_split, profiled


def given_words(profile: Profile) -> str:
    """Return why a run begins with the plan of ``profile``, which it was given."""
    crowd = f"; other jobs leave {profile.server.share:.0%} of the server" if profile.server.share < 1 else ""
    return f"from the given profile{crowd}"


def fitted(profile: Profile, sizes: Sizes) -> Profile:
    """Return ``profile`` with the known bytes of this job, as each of its ranks sees it.

    :class:`ConfigError` if it is of another model, :class:`OtherDeviceError` if of another kind of device.
    """
    given = [(layer.name, layer.output_bytes) for layer in profile.layers[: profile.last_split]]
    known = [(layer.name, layer.output_bytes) for layer in sizes.layers[: sizes.last_split]]
    ends = (profile.freeze, profile.last_split, len(profile.layers))
    if ends != (sizes.freeze, sizes.last_split, len(sizes.layers)) or given != known:
        different = next((a[0] for a, b in zip(given, known, strict=False) if a != b), "")
        at = (
            f"its layer {different!r} differs"
            if different
            else f"it has {counted(ends[2], 'layer')}, freeze {ends[0]}"
        )
        raise ConfigError(
            f"the profile of {profile.model!r} does not fit {sizes.model!r} with {len(sizes.layers)} layers and "
            f"freeze {sizes.freeze}: {at}; use one of the same model, freeze, image size and "
            "precision (--save-profile)"
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
    known_bytes = replace(
        profile,
        layers=layers,
        samples=sizes.samples,
        one_machine=sizes.one_machine,
        optimizer_bytes_per_parameter_byte=sizes.optimizer_bytes_per_parameter_byte,
        offloaded_bytes=sizes.offloaded_bytes,
    )
    return as_shared(known_bytes, sizes.ranks, sizes.local_ranks)


def at_document(at: Alternation) -> dict[str, Any]:
    """Return what batches run at, as it is in a report and in a checkpoint."""
    document: dict[str, Any] = {"split": at.split}
    return document | {"other_split": at.other, "other_share": at.share} if at.share else document


def plan_document(
    strategy: str, at: Alternation, job: Job, profile: Profile | None, plan: Plan | None
) -> dict[str, Any]:
    """Return the plan as it is in a run's report.

    Args:
        strategy: rule that chose.
        at: the present choice.
        job: the training that estimates are for.
        profile: the measurements; None before there are some.
        plan: every candidate with its estimate.
    """
    document: dict[str, Any] = {"strategy": strategy, **at_document(at), "job": asdict(job)}
    if profile is not None and plan is not None:
        document["profile"] = profile.to_json()
        document["candidates"] = [asdict(candidate) for candidate in plan.candidates]
        document["strategies"] = choices(profile, job)
    return document
