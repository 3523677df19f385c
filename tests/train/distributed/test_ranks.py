"""Parts of a training by several ranks that need no second process."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.joint_training import network, normed_network, spare_network
from torch import nn

from hapi.cli.shared.ranks import along
from hapi.client.joint.ranks import ALONE, Ranks, part_of, part_size
from hapi.errors import HapiError, OtherRankError, StoreError, UsageError
from hapi.models.graph.layers import layered
from hapi.train.distributed.batch_norm import has_batch_norm, synchronise
from hapi.train.distributed.collected import Collected
from hapi.train.distributed.group import is_lost_rank
from hapi.train.distributed.launch import launched
from hapi.train.distributed.unused import leaves_out
from hapi.train.interrupts import Interrupts
from hapi.train.report import Measured, of_all_ranks
from hapi.train.running_epoch import RunningEpoch
from hapi.train.steps.gradient_step import step_seed

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@given(st.integers(1, 70), st.integers(1, 9))
def test_parts_are_the_batch_in_order_and_even(count: int, ranks: int) -> None:
    batch = np.arange(100, 100 + count)
    sizes = [part_size(count, rank, ranks) for rank in range(ranks)]
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1
    parts = [part_of(batch, rank, ranks) for rank in range(ranks)]
    assert all(len(part) == max(1, size) for part, size in zip(parts, sizes, strict=True))
    counted = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    assert np.concatenate(counted).tolist() == batch.tolist()
    last = Ranks()
    last.rank, last.size = ranks - 1, ranks
    assert last.part(batch).tolist() == parts[-1].tolist()
    assert last.largest_part(count) == max(1, *sizes, 0)


def test_a_rank_is_found_in_torchruns_environment() -> None:
    found = launched({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node) == (3, 4, 1, 2, 1)
    assert found.restarts == 0
    assert launched({}) is None and launched({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "4"}, "no rank of a job"),
        ({"RANK": "-1"}, "RANK='-1': expected a whole number"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "no rank of a job"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launched({**TORCHRUN, **changes})


def test_costs_are_added_and_times_are_the_first_ones() -> None:
    def measured(**counters: float) -> Measured:
        return Measured(counters=counters, splits={2: 5}, stages={"compute": 1.0}, cos_batch=8)

    found = of_all_ranks(
        [
            measured(
                seconds=3.0, network_seconds=1.0, client_seconds=1.0, stall_seconds=0.5, bytes_received=10
            ),
            measured(
                seconds=4.0, network_seconds=2.0, client_seconds=1.0, stall_seconds=0.1, bytes_received=7
            ),
        ]
    )
    assert found.counters["bytes_received"] == 17 and found.stages == {"compute": 2.0}
    assert found.counters["seconds"] == 3.0 and found.counters["stall_seconds"] == 0.5
    assert found.splits == {2: 5}, "batches are those of all ranks together"


def test_ranks_draw_differently_and_the_first_one_as_alone() -> None:
    seeds = [step_seed(1, 2, 3, rank) for rank in range(4)]
    assert len(set(seeds)) == 4 and seeds[0] == step_seed(1, 2, 3)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_another_launcher_do_not_train_the_same_twice(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=4: (srun|mpirun) has started several processes"):
        launched({name: "4"})
    found = launched({**TORCHRUN, name: "4"})
    assert found is not None and found.size == 4, "one that gives torchrun's variables is as good"
    for alone in ("1", "01", "0", "", "many"):
        assert launched({name: alone}) is None
    assert launched({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None, "a batch script's own process"


def test_an_interrupt_asks_all_ranks_and_a_late_second_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Ranks):
        size = 2
        stops = 0

        def want_stop(self) -> None:
            self.stops += 1

    ranks = Two()
    with Interrupts(ranks) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert ranks.stops == 2, "a terminal and torchrun both send one"
        monkeypatch.setattr(interrupts, "GROUPED_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_one_rank_alone_exchanges_with_itself() -> None:
    values = torch.tensor([1.0])
    assert ALONE.summed(values) is values and ALONE.rows(values, 1) is values
    assert ALONE.gathered(3) == [3] and ALONE.shared(lambda: 4) == 4
    module = nn.Linear(1, 1)
    assert ALONE.wrapped(module) is module
    ALONE.settle(now=True)
    with pytest.raises(KeyboardInterrupt):
        ALONE.want_stop()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("shape mismatch"), False),
        (OtherRankError("gloo"), False),
    ],
)
def test_torchs_words_for_a_lost_rank(error: Exception, is_lost: bool) -> None:
    assert is_lost_rank(error) is is_lost


def test_batch_norm_is_found_and_synchronised_between_gpus_only() -> None:
    layers: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert has_batch_norm(layers) and not has_batch_norm(layers[0])
    assert not has_batch_norm(nn.Sequential(nn.SyncBatchNorm(2)))
    with pytest.raises(UsageError, match="needs several ranks"):
        synchronise(layers, ALONE)


class Numbers(nn.Module):
    """A layer whose code needs the numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().max())


@pytest.mark.parametrize(
    ("made", "unused"),
    [
        (network, False),
        (normed_network, False),
        (spare_network, True),
        (lambda: nn.Sequential(*network(), Numbers()), True),
    ],
)
def test_layers_that_may_leave_a_parameter_out_are_found(made: Any, unused: bool) -> None:
    model = layered(made(), (3, 32, 32))
    layers = model.segment(2, len(model), frozen=False)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    sample = torch.empty((2, *model.output_shapes()[2]), device="meta")
    assert leaves_out(layers, sample) is unused
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert all(parameter.grad is None for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("error", "code", "waits"),
    [(UsageError("wrong"), 2, True), (OtherRankError("gone"), 1, True), (StoreError("full"), 1, False)],
)
def test_another_rank_lets_the_first_one_speak(
    error: HapiError,
    code: int,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = launched(TORCHRUN)
    assert launch is not None
    waited: list[float] = []
    monkeypatch.setattr("hapi.cli.shared.ranks.time.sleep", waited.append)

    def failing() -> int:
        raise error

    assert along(failing, "hapi-train", launch) == code
    assert bool(waited) == waits
    assert capsys.readouterr().err == f"hapi-train: rank 3: error: {error}\n"


class Pair(Ranks):
    """The first of two ranks, whose other one measures and answers the same."""

    size = 2
    exchanges = 0

    def gathered(self, value: Any) -> list[Any]:
        self.exchanges += 1
        return [value, value]


class Counted:
    """A part of a checkpoint that counts how often its state is asked for."""

    asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def running(ranks: Ranks) -> RunningEpoch:
    epoch = RunningEpoch(SimpleNamespace(ranks=ranks))  # type: ignore[arg-type]
    counters = {**Measured.of(epoch.report).counters, "seconds": 2.0, "bytes_received": 100.0}
    epoch.go_on(Measured(counters=counters))
    return epoch


def test_a_checkpoint_has_what_all_ranks_measured_of_its_epoch() -> None:
    ranks, part = Pair(), Counted()
    collected = Collected(ranks, running(ranks), lambda: {"part": part})
    for _ in range(2):  # the first rank tries again, alone
        parts, measured = collected.at((0, 5))
        assert measured.counters["bytes_received"] == 200 and measured.counters["seconds"] == 2
        assert parts["part"].state_dict() == {"asked": 1} and ranks.exchanges == 1
    collected.clear()
    collected.together = False  # it failed, and the others go on
    assert collected.at((0, 5))[1].counters["bytes_received"] == 100 and ranks.exchanges == 1


def test_what_was_measured_before_counts_once() -> None:
    other = Pair()
    other.rank = 1
    assert running(other).measured.counters["bytes_received"] == 0
    assert running(ALONE).measured.counters["bytes_received"] == 100
