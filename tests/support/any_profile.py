"""Profiles and jobs of any kind, for properties that hold for all of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hapi.profiler.profile import Job, LinkProfile, Profile
from support.profiler_tools import crafted, free_server, free_tier

seconds = st.floats(1e-6, 1e-2)
sizes = st.integers(1, 1_000_000)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(2, 6))
    per_layer = st.lists(seconds, min_size=count, max_size=count)
    costs: dict[str, Any] = {
        "decode_seconds": draw(seconds),
        "codec_seconds_per_byte": draw(st.floats(0, 1e-8)),
        "overhead_seconds": draw(seconds),
        "processors": draw(st.integers(1, 4)),
    }
    return crafted(
        draw(st.lists(sizes, min_size=count, max_size=count)),
        draw(per_layer),
        draw(per_layer),
        server=free_server(
            read_seconds=draw(seconds), concurrency=draw(st.integers(1, 5)), share=draw(st.floats(0.1, 1.0))
        ),
        server_tier=free_tier(draw(st.sampled_from(["cpu", "cuda"])), **costs),
        client_tier=free_tier(draw(st.sampled_from(["cpu", "cuda"])), **costs),
        link=LinkProfile(
            bits_per_second=draw(st.floats(1e5, 1e11)),
            variation=draw(st.floats(0, 0.5)),
            request_seconds=draw(seconds),
        ),
        step_seconds=draw(seconds),
        update_seconds=draw(seconds),
    )


jobs = st.builds(
    Job,
    bs=st.integers(1, 300),
    samples=st.integers(1, 3000),
    request_size=st.integers(1, 200),
    in_flight=st.integers(1, 6),
)
