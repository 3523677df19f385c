"""Where ranks meet: starts after each other at one store, and what is said of those that do not come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from hapi.cli.shared.ranks import going_on, longest_stall
from hapi.client.joint.ranks import Ranks
from hapi.errors import HapiError, OtherRankError, UsageError
from hapi.train.distributed import meeting
from hapi.train.distributed.launch import Launch, launched
from hapi.train.distributed.meeting import Meeting, meet, numbered, silent_ranks
from hapi.train.settings import TrainSettings

AGENT = "TORCHELASTIC_USE_AGENT_STORE"


def launch(rank: int, size: int, restarts: int = 0) -> Launch:
    return Launch(rank=rank, size=size, local_rank=rank, local_size=size, node=0, restarts=restarts)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = dist.HashStore()
    monkeypatch.setattr(meeting, "_opened", lambda launch, seconds: found)
    return found


def all_meet(size: int, restarts: Callable[[int], int] = lambda rank: 0) -> list[Meeting]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: meet(launch(rank, size, restarts(rank)), 20), range(size)))


def test_starts_follow_each_other_at_one_store(store: Any) -> None:
    """Nodes come and go (``--nnodes 1:3``): launchers count restarts differently, or not at all."""
    for number, size in enumerate((2, 3, 1, 2, 2)):
        found = all_meet(size, restarts=lambda rank, number=number: number * rank)  # type: ignore[misc]
        assert [one.is_first_start for one in found] == [number == 0] * size
        found[0].store.set("mine", str(number))
        assert all(one.store.get("mine") == str(number).encode() for one in found)


def test_a_launcher_that_keeps_no_store_counts_restarts(store: Any) -> None:
    assert [one.is_first_start for one in all_meet(2, restarts=lambda rank: 1)] == [False, False]


def test_ranks_that_died_before_they_met_are_not_waited_for(store: Any) -> None:
    with pytest.raises(OtherRankError, match=r"the first rank did not begin within 0 s"):
        meet(launch(1, 2), 0.05)
    with pytest.raises(OtherRankError, match=r"rank 1 of 2 did not come within 0 s"):
        meet(launch(0, 2), 0.05)  # the word is there, whose rank is gone
    assert not all_meet(2)[0].is_first_start


def test_those_that_do_not_come_are_named(store: Any) -> None:
    def arrive() -> None:
        with pytest.raises(OtherRankError, match="the first rank did not begin"):
            meet(launch(2, 4), 0.5)

    present = threading.Thread(target=arrive)
    present.start()
    with pytest.raises(OtherRankError, match=r"ranks 1, 3 of 4 did not come"):
        meet(launch(0, 4), 0.2)
    present.join()
    assert numbered([2]) == "rank 2"


def test_silent_ranks_are_those_that_miss_nobody(store: Any) -> None:
    store.set("missing/1", "")
    assert silent_ranks(store, 0, 4, 0.05) == [2, 3]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("variables", "error", "said"),
    [
        ({"MASTER_ADDR": "x" * 64}, UsageError, "there is no such host"),
        ({"MASTER_PORT": "0"}, UsageError, "expected a port, 1 to 65535"),
        ({"MASTER_PORT": "port"}, UsageError, "expected a port, 1 to 65535"),
        ({}, UsageError, "another process listens there, maybe another job's"),
        ({"RANK": "1", "MASTER_PORT": "1"}, OtherRankError, "the first rank did not answer within 1 s"),
        (
            {"MASTER_PORT": "1", AGENT: "True"},
            OtherRankError,
            "torchrun's own store did not answer within 1 s",
        ),
    ],
)
def test_an_address_that_is_wrong(
    variables: dict[str, str],
    error: type[HapiError],
    said: str,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(taken),
        **variables,
    }
    monkeypatch.delenv(AGENT, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "AGENT_SECONDS", 1)
    found = launched()
    assert found is not None
    with pytest.raises(error, match=said) as caught:
        meet(found, 600 if AGENT in known else 1)
    assert "\n" not in str(caught.value)


class Two(Ranks):
    """Two ranks, of which the other one has ``others``' settings."""

    size = 2

    def __init__(self, **others: Any) -> None:
        self.others = others

    def gathered(self, value: Any) -> list[Any]:
        return [value, {**value, **{f"--{name}": other for name, other in self.others.items()}}]


def test_ranks_with_other_settings_are_refused() -> None:
    settings = TrainSettings(model="resnet18", output="run")
    assert going_on(settings, Two()) == settings
    with pytest.raises(
        UsageError, match=r"rank 1 has --lr 0.5 and the first one 0.01: give all ranks the same"
    ):
        going_on(settings, Two(lr=0.5))
    with pytest.raises(UsageError, match="rank 1 has --server given and the first one not given"):
        going_on(settings, Two(server="given"))


def test_ranks_that_are_started_anew_go_on() -> None:
    ranks = Ranks()
    ranks.is_first_start = False
    assert going_on(TrainSettings(model="resnet18", output="run"), ranks).resume
    assert not going_on(TrainSettings(model="resnet18"), ranks).resume, "without a checkpoint they begin anew"


def test_a_rank_may_wait_for_servers_longer_than_an_outage() -> None:
    assert longest_stall(TrainSettings(model="resnet18", patience=100, timeout=10)) == 270
