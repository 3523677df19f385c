"""Bytes and seconds of offloaded states against the paper's figures and torch's own optimisers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.profiler_tools import MIB, heavy
from torch import nn

from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import plan_pieces
from hapi.offload.training import memory_taken
from hapi.profiler.cost import memory
from hapi.profiler.offload.freezes import later_freezes
from hapi.profiler.offload_costs import (
    BUFFERS,
    PIECE_ELEMENTS,
    STATES,
    OffloadCosts,
    OffloadName,
    OffloadPrice,
    OffloadTerms,
    choose_offload,
    offloaded,
    price_offload,
)
from hapi.profiler.profile import Job, Profile


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("sgd with momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("sgd", lambda p: torch.optim.SGD(p)),
    ],
)
def test_memory_is_what_torch_holds_after_a_step(name: str, make: object) -> None:
    layers = nn.Linear(64, 32)
    optimizer = make(layers.parameters())  # type: ignore[operator]
    layers(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    held = sum(p.nbytes + p.grad.nbytes for p in layers.parameters() if p.grad is not None)
    for state in optimizer.state.values():
        held += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    costs = OffloadCosts(parameters=64 * 32 + 32, states=STATES[name])
    assert costs.memory_without == held


def test_adamw_as_the_paper_counts_it() -> None:
    half = OffloadCosts(parameters=10, states=2, half=True)
    assert (half.read, half.written, half.memory_without) == (120, 120, 160)
    whole = OffloadCosts(parameters=10, states=2)
    assert (whole.read, whole.written, whole.disk_bytes, whole.memory_without) == (80, 120, 240, 160)


def test_memory_with_offloading_keeps_parameters_and_a_bounded_rest() -> None:
    costs = OffloadCosts(parameters=10**9, states=2, drives=2, largest=10**7)
    assert costs.memory_with == 4 * 10**9 + (64 << 20) + 4 * 10**7 + (2 * BUFFERS + 1) * (12 << 20)
    assert replace(costs, keeps_gradients=True).memory_with == 8 * 10**9 + (2 * BUFFERS + 1) * (12 << 20)
    assert costs.saved == costs.memory_without - costs.memory_with
    assert OffloadCosts(parameters=1000, states=2).saved == 0


def priced(step_seconds: float, samples: int = 10_000) -> OffloadPrice:
    costs = OffloadCosts(parameters=10**8, states=2)
    return OffloadPrice(
        costs=costs, read_rate=8e8, write_rate=1.2e9, step_seconds=step_seconds, batch=32, samples=samples
    )


@given(step_seconds=st.floats(0.01, 3.0), work=st.lists(st.floats(1.0, 10.0), min_size=6, max_size=6))
def test_the_freeze_that_is_named_hides_the_cost_and_no_earlier_one_does(
    step_seconds: float, work: list[float]
) -> None:
    layers = [replace(layer, flops=flops) for layer, flops in zip(heavy().layers, work, strict=False)]
    profile = replace(heavy(), layers=tuple(layers))
    price = replace(priced(step_seconds), freezes=tuple(later_freezes(profile)))
    trained = sum(layer.flops for layer in layers[profile.last_split :])

    def is_hidden(freeze: int) -> bool:
        parameters = sum(layer.parameter_bytes for layer in layers[freeze:]) // 4
        work = sum(layer.flops for layer in layers[freeze:]) / trained
        transfer = replace(price, costs=replace(price.costs, parameters=parameters)).transfer_seconds
        return transfer <= work * step_seconds

    later = range(profile.last_split + 1, len(layers))
    hidden = [freeze for freeze in later if is_hidden(freeze)]
    assert price.free_freeze == (hidden[0] if hidden else None)
    if price.added_seconds:
        assert (f"with --freeze {price.free_freeze} it is free" in str(price)) == bool(hidden)
    assert replace(price, step_seconds=0.0).free_freeze is None


def test_seconds_hide_behind_the_step() -> None:
    assert priced(1.5).transfer_seconds == pytest.approx(2.0)
    assert priced(1.5).added_seconds == pytest.approx(0.5)
    assert priced(3.0).added_seconds == 0
    assert (priced(1.5).free_batch, priced(3.0).free_batch) == (43, 32)


def test_the_price_says_what_would_make_it_free() -> None:
    assert "adds 500.0 ms to steps of 1.50 s; free from --bs 43 on" in str(priced(1.5))
    assert "no batch of 40 samples would hide that" in str(priced(1.5, samples=40))
    assert "hidden behind steps of 3.00 s" in str(priced(3.0))
    assert "free where forward and backward take as long" in str(priced(0.0))


JOB = Job(bs=8, samples=80)


def chosen(bound: int | None, wanted: OffloadName = "auto", device: str = "cpu") -> tuple[str, bool, bool]:
    job = replace(JOB, memory_bytes=bound)
    found = choose_offload(heavy(device), job, OffloadTerms(wanted=wanted, states=2))
    return found.where, found.is_needed, found.freed > 0


def test_states_leave_the_memory_that_they_do_not_fit() -> None:
    needed = memory(heavy(), JOB, 2).parameters
    assert chosen(None) == chosen(2 * needed) == ("off", False, False)
    assert chosen(needed) == ("disk", True, True)
    assert chosen(needed, "off") == ("off", False, False)
    assert chosen(2 * needed, "disk") == ("disk", False, True)
    assert chosen(needed, "host") == ("host", False, False), "a CPU trains in the host's memory"
    assert chosen(needed - MIB, "host", "cuda") == ("host", True, True)


def test_a_plan_with_offloading_has_less_memory_and_longer_steps() -> None:
    profile, job = heavy(), replace(JOB, memory_bytes=memory(heavy(), JOB, 2).parameters)
    choice = choose_offload(profile, job, OffloadTerms(wanted="auto", states=2))
    price = replace(priced(2.0), costs=choice.costs)
    elsewhere = offloaded(profile, choice, price)
    saved = memory(profile, job, 2).parameters - memory(elsewhere, job, 2).parameters
    assert saved == pytest.approx(choice.freed, abs=8) and choice.freed == choice.costs.saved
    assert Profile.from_json(elsewhere.to_json()) == elsewhere, "a report has it"
    assert elsewhere.update_seconds == pytest.approx(profile.update_seconds + price.added_seconds)
    assert choice.costs.largest == 128 * MIB, "the largest gradient is in memory for a while"


def test_the_freeze_that_fits() -> None:
    terms = OffloadTerms(wanted="auto", states=2)

    def freeze(share: float, split: int | None = None) -> int | None:
        bound = int(share * memory(heavy(), JOB, 2).peak)
        return choose_offload(heavy(), replace(JOB, memory_bytes=bound), terms, split).fitting_freeze

    assert freeze(1.01) is None, "all fits"
    assert freeze(0.6) == 3
    assert freeze(0.3) == 4
    assert freeze(0.3, split=0) is None, "what is frozen then is in this memory"


@given(
    sizes=st.lists(st.integers(1, 3 << 20), min_size=1, max_size=6),
    names=st.sampled_from([(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")]),
    half=st.booleans(),
    drives=st.integers(1, 3),
    keeps=st.booleans(),
)
def test_a_price_counts_what_training_takes(
    sizes: list[int], names: tuple[str, ...], half: bool, drives: int, keeps: bool
) -> None:
    kind = torch.bfloat16 if half else torch.float32
    parameters = [
        TrainedParameter(
            number=number, name="", parameter=nn.Parameter(torch.empty(size, dtype=kind)), group=0,
            state_names=names, gradient_at=0, keeps_in_memory=keeps,
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip
    layout = plan_pieces([known.size for known in parameters], drives)
    taken = memory_taken(parameters, layout, is_alone=True)
    costs = OffloadCosts(
        parameters=sum(sizes), states=len(names), half=half, drives=drives, largest=max(sizes),
        keeps_gradients=keeps,
    )  # fmt: skip
    if max(sizes) >= PIECE_ELEMENTS:
        assert costs.memory_with == taken.total
    filled = (
        64 * len(sizes) * (len(names) + 1) + 2 * 4096
    )  # a record's blocks begin at pages, its segments at lines
    assert taken.total <= costs.memory_with + (BUFFERS * drives + 1) * filled
    assert taken.total - taken.constant == costs.memory_with - replace(
        costs, keeps_gradients=True
    ).memory_with + (0 if keeps else costs.parameter_bytes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_stay_where_there_is_room_for_them(ranks: int) -> None:
    def kept(bound: int | None, wanted: OffloadName = "auto", is_short: bool = False) -> bool:
        profile, job = replace(heavy("cuda"), ranks=ranks), replace(JOB, memory_bytes=bound)
        terms = OffloadTerms(wanted=wanted, states=2)
        return choose_offload(profile, job, terms, is_short=is_short).costs.keeps_gradients

    needed = memory(heavy(), JOB, 2).parameters
    reduced = ranks > 1
    assert kept(4 * needed, "disk") and kept(None, "disk") and kept(needed, "host")
    assert kept(needed) == kept(4 * needed, "disk", is_short=True) == kept(needed // 2, "disk") == reduced


def slow_servers() -> Profile:
    """A profile whose first split is far faster than the last one, which takes the least memory here."""
    whole = heavy()
    layers = tuple(
        replace(x, server_seconds=1.0 * (i > 0), client_seconds=0.01) for i, x in enumerate(whole.layers)
    )
    return replace(whole, layers=layers)


def test_states_leave_for_a_faster_split_where_its_price_is_worth_it() -> None:
    profile, terms = slow_servers(), OffloadTerms(wanted="auto", states=2)
    peaks = [memory(profile, JOB, split).peak for split in range(3)]
    job = replace(JOB, memory_bytes=peaks[2])
    assert peaks[2] < min(peaks[:2])
    fast = price_offload(profile, job, terms, lambda: (8e9, 8e9)).choice
    assert (fast.where, fast.is_needed, fast.is_short) == ("disk", False, True)
    assert fast.faster is not None and fast.faster.split < fast.faster.fitting == 2
    assert "with the states in memory it is" in str(fast.faster)
    slow = price_offload(profile, job, terms, lambda: (1e8, 1e8)).choice
    unknown = price_offload(profile, job, terms, lambda: (0.0, 0.0)).choice
    forbidden = price_offload(profile, job, replace(terms, wanted="off"), lambda: (8e9, 8e9)).choice
    roomy = price_offload(profile, replace(job, memory_bytes=2 * max(peaks)), terms, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert {slow.where, unknown.where, forbidden.where, roomy.choice.where} == {"off"}
    assert (
        price_offload(profile, replace(job, memory_bytes=1), terms, lambda: (8e9, 8e9)).choice.faster is None
    )
