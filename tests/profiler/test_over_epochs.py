"""Jobs by their number of epochs: the costs of the choice for each number."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.profiler_tools import crafted, free_tier

from hapi.profiler.profile import Job
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import Prices, ReuseFacts, Storage
from hapi.profiler.reuse.over_epochs import courses, epoch_counts


@pytest.mark.parametrize("most", [1, 2, 10, 11, 30, 10_000])
def test_a_few_numbers_of_epochs_from_one_to_the_most(most: int) -> None:
    counts = epoch_counts(most)
    assert counts[0] == 1 and counts[-1] == most and len(counts) <= 10
    assert all(fewer < more for fewer, more in pairwise(counts))


def test_each_point_is_the_best_choice_of_its_mode() -> None:
    profile = crafted([60_000, 1_000, 10], [0.01] * 3, [0.01] * 3, client_tier=free_tier("cpu"))
    facts = ReuseFacts(client=Storage(bytes=10**9, read=5e8, write=1e5))
    job, prices = Job(bs=100, samples=1000, epochs=20, request_size=50), Prices(egress=1.0)
    found = {course.mode: course for course in courses(profile, job, facts, prices, "money")}
    assert set(found) == {"recompute", "keep samples", "keep here"}
    for at, epochs in enumerate(epoch_counts(20)):
        chosen = choose_reuse(profile, replace(job, epochs=epochs), facts, prices=prices, objective="money")
        for one in chosen.candidates:
            if one.cost is not None:
                course = found[one.mode]
                assert (course.epochs[at], course.seconds[at], course.money[at]) == (
                    epochs, one.cost.seconds, one.cost.money,
                )  # fmt: skip
