"""The setting of the paper's evaluation (HAPI, section 5.1) as profiles, and every strategy's 49 choices in it.

Published, and used as it is: models, freeze indices and layer counts (Table 2), batch sizes, 30,720 samples of
224 x 224 stored as float32 tensors in the proxy's memory, requests of 128, 4 at a time, COS batches of 16, 12 Gbit/s,
a T4 with 16 GB on each side, the seconds to load a model for a request (Table 4), no micro-batches on the client.

Assumed, as the paper gives no figures: what stands in capitals below. Sizes and operations are our own models'.

    python tests/profiler/paper_setting.py        writes profiles and decisions anew
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hapi.errors import DeviceMemoryError
from hapi.profiler.profile import Job, LinkProfile, Profile, ServerProfile, TierProfile
from hapi.profiler.strategies import PLANNERS, plan

FOLDER = Path(__file__).parent / "paper"
DECISIONS = FOLDER / "decisions.json"

MODEL_LOAD_SECONDS = {
    "alexnet": 0.387,
    "resnet18": 0.048,
    "resnet50": 0.113,
    "densenet121": 0.096,
    "vgg11": 0.838,
    "vgg19": 0.811,
    "vit_b_16": 0.382,
}
"""Table 4; its "Transformer" is vit_b_16."""
BATCHES = (128, 256, 512, 1024, 1536, 2048, 3072)
BITS_PER_SECOND = 12e9
SAMPLES = 30720

FLOPS_PER_SECOND = 0.5 * 8.1e12
"""A T4's float32 peak, of which half is reached."""
TRAFFIC_BYTES_PER_SECOND = 0.7 * 320e9
"""A T4's memory, of which 70% is reached."""
COPY_BYTES_PER_SECOND = 6e9
"""Between host and GPU from ordinary memory."""
PICKLE_BYTES_PER_SECOND = 1e9
"""Of the server; on the client for unpickling and making a data loader together."""
REQUEST_SECONDS = 2e-3
BACKWARD = 3.0
"""Forward and backward pass over the forward pass alone."""
CLIENT_BYTES = 14 << 30
"""Of 16 GB, less what CUDA and its libraries take."""


def job(bs: int) -> Job:
    """The paper's job with one of its batch sizes."""
    return Job(
        bs=bs,
        samples=SAMPLES,
        micro_batch=bs,
        request_size=128,
        in_flight=bs // 128,
        memory_bytes=CLIENT_BYTES,
    )


def make_profile(model: str) -> Profile:
    """The profile of one of the seven models in the paper's setting. Imports torch."""
    from hapi.models.zoo.build import ModelSpec, structure
    from hapi.profiler.fit import Tier
    from hapi.profiler.sizes import sizes_of
    from hapi.profiler.work import layer_work

    layered = structure(ModelSpec(architecture=model))
    freeze = layered.default_freeze or 0
    last_split = layered.last_split(freeze)
    work = layer_work(layered, last_split, "cuda")
    tensor_bytes = layered.output_bytes()[0]
    sizes = sizes_of(
        layered,
        model,
        freeze,
        stored_bytes=tensor_bytes,
        encoded=False,
        client=Tier(device="cuda"),
        work=work,
    )
    seconds = [w.flops / FLOPS_PER_SECOND + w.traffic_bytes / TRAFFIC_BYTES_PER_SECOND for w in work]
    weights = sum(layer.parameter_bytes for layer in sizes.layers[last_split:])
    tier = TierProfile(
        device="cuda",
        processors=16,
        threads=1,
        decode_seconds=0.0,
        codec_seconds_per_byte=1 / PICKLE_BYTES_PER_SECOND,
        to_device_seconds_per_byte=1 / COPY_BYTES_PER_SECOND,
        from_device_seconds_per_byte=1 / COPY_BYTES_PER_SECOND,
    )
    return Profile(
        model=model,
        freeze=freeze,
        last_split=last_split,
        layers=tuple(
            replace(layer, server_seconds=s, client_seconds=s)
            for layer, s in zip(sizes.layers, seconds, strict=True)
        ),
        samples=sizes.samples,
        server=ServerProfile(
            read_seconds=0.0,
            model_load_seconds=MODEL_LOAD_SECONDS[model],
            concurrency=4,
            waiting_seconds=0.0,
            cos_batch=16,
        ),
        server_tier=tier,
        client_tier=tier,
        link=LinkProfile(bits_per_second=BITS_PER_SECOND, variation=0.0, request_seconds=REQUEST_SECONDS),
        step_seconds=BACKWARD * sum(seconds[last_split:]),
        update_seconds=5 * weights / TRAFFIC_BYTES_PER_SECOND,
        optimizer_bytes_per_parameter_byte=1.0,
        notes=(
            "the paper's setting; see tests/profiler/paper_setting.py for what is published and what assumed",
        ),
    )


def load_profile(model: str) -> Profile:
    """The profile as it was kept."""
    return Profile.load(str(FOLDER / f"{model}.json"))


def choices(profile: Profile, bs: int) -> dict[str, int | None]:
    """Every strategy's split; None where nothing fits."""
    return {name: _choice(name, profile, bs) for name in PLANNERS}


def _choice(strategy: str, profile: Profile, bs: int) -> int | None:
    try:
        return plan(strategy, profile, job(bs)).split
    except DeviceMemoryError:
        return None


def fitting(profile: Profile, bs: int) -> list[int]:
    """Splits that the client's memory holds."""
    found = plan("none", profile, job(bs))
    return [c.estimate.split for c in found.candidates if c.fits]


def decisions(profiles: Mapping[str, Profile]) -> list[dict[str, Any]]:
    """The 49 rows of the table."""
    rows = []
    for model, profile in profiles.items():
        for bs in BATCHES:
            fits = fitting(profile, bs)
            rows.append({"model": model, "bs": bs, "earliest_that_fits": min(fits), **choices(profile, bs)})
    return rows


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Keep them, one line each."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    DECISIONS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Write everything anew."""
    FOLDER.mkdir(exist_ok=True)
    profiles = {model: make_profile(model) for model in MODEL_LOAD_SECONDS}
    for model, profile in profiles.items():
        profile.save(str(FOLDER / f"{model}.json"))
    write_rows(decisions(profiles))


if __name__ == "__main__":
    main()
