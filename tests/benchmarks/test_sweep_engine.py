"""How the sweep measures a cell, with tiers that are made up here: what is broken off, repeated, resumed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from benchmarks.split import sweep as engine
from benchmarks.split.study import measured_cells
from benchmarks.split.sweep_client import spread
from benchmarks.testbed.cells import Grid, Results
from hapi.errors import TransportError, UsageError

BANDWIDTH = 1e6
ONE = Grid(
    models=("alexnet",),
    batches=(16,),
    bandwidths=(BANDWIDTH,),
    least_samples=16,
    least_profile_samples=16,
    epoch_batches=1,
)
TWO = replace(ONE, models=("alexnet", "vgg11"), epoch_batches=Grid().epoch_batches)


class Tiers:
    """A bed and its client: an epoch at a split takes as long as :attr:`seconds` says, run after run."""

    address = "nowhere"

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {0: [4.0], 1: [1.0], 2: [1.1], 3: [1.3]}
        self.wire = [10, 10, 10, 10]
        self.estimates = [4.0, 1.0, 1.1, 1.3]
        self.autos = [1]
        """The choice of ``auto`` after one profile, after two and so on."""
        self.plans: list[int] = []
        """Epochs before each profile."""
        self.unfit: set[int] = set()
        self.plan_fits = True
        self.fail_at: tuple[int, BaseException] | None = None
        """The epoch (counted over all) at which something breaks."""
        self.epochs: list[int] = []
        self.bandwidth: float | None = None
        self.form = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bandwidth = None

    def set_bandwidth(self, bandwidth: float | None) -> None:
        self.bandwidth = bandwidth

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        return dict(getattr(self, "do_" + do)(**arguments))

    def do_open(self, **settings: Any) -> dict[str, Any]:
        self.form = settings["dataset"]
        return {"ok": True, "splits": list(self.seconds)}

    def do_plan(
        self, samples: int, epoch: int, profiled: int, before: Any = None, parts: int = 0
    ) -> dict[str, Any]:
        assert before == ([len(self.plans)] if parts else None), "that of the plans before"
        self.plans.append(len(self.epochs))
        assert profiled == 12 * 16
        assert self.bandwidth is not None, "a profile without the link's rate is of another link"
        if not self.plan_fits:
            return {"ok": False, "memory": True, "error": "does not fit"}
        choices = {"auto": self.autos[min(parts, len(self.autos) - 1)], "none": 0}
        forms = dict.fromkeys(("auto", "paper", "sum"), self.estimates)
        return {
            "ok": True,
            "choices": choices,
            "wire": self.wire,
            "seconds": 2.0,
            "profile": [len(self.plans)],
            **forms,
        }

    def do_warm(self, split: int, samples: int) -> dict[str, Any]:
        return {"ok": split not in self.unfit, "memory": True, "error": "out of memory"}

    def do_epoch(self, split: int, samples: int, epoch: int, limit: float | None) -> dict[str, Any]:
        assert self.bandwidth == BANDWIDTH
        if self.fail_at is not None and len(self.epochs) == self.fail_at[0]:
            raise self.fail_at[1]
        if self.form == "images":
            self.epochs.append(split)
        if split in self.unfit:
            return {"ok": False, "memory": True, "error": "out of memory"}
        took = self.seconds[split]
        seconds = took.pop(0) if len(took) > 1 else took[0]
        over = limit is not None and seconds > limit
        return {
            "ok": True, "seconds": limit if over else seconds, "over": over, "bytes": self.wire[split],
        }  # fmt: skip


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> Tiers:
    made = Tiers()
    monkeypatch.setattr(engine, "make_store", lambda folder, samples, side: folder)
    monkeypatch.setattr(engine, "start_server", lambda *args, **kwargs: "http://nowhere")
    monkeypatch.setattr(engine, "BenchClient", lambda *args, **kwargs: made)
    return made


def measure(tiers: Tiers, path: Path, grid: Grid = ONE, **kwargs: Any) -> tuple[Results, list[str]]:
    results = Results(path / "sweep.jsonl", {})
    told: list[str] = []
    engine.sweep(tiers, grid, results, told.append, **kwargs)  # type: ignore[arg-type]
    return results, told


def runs(results: Results, split: int) -> list[dict[str, Any]]:
    return [r for r in results.records if r["kind"] == "run" and r["split"] == split]


def test_the_most_promising_come_first_and_those_near_the_best_are_repeated(
    tiers: Tiers, tmp_path: Path
) -> None:
    tiers.wire, tiers.seconds[2] = [1, 1, 1, 1], [1.07]
    results, _ = measure(tiers, tmp_path)
    assert tiers.epochs[:4] == [1, 2, 3, 0]
    assert [len(runs(results, split)) for split in (1, 2, 3)] == [3, 2, 1], "nearer from turn to turn"
    assert results.done(ONE.cells()[0])


def test_repeats_are_in_turns(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds[2] = [1.05]
    results, _ = measure(tiers, tmp_path)
    assert [r["split"] for r in results.records if r["kind"] == "run"][4:8] == [1, 2, 1, 2]


def test_the_choice_of_auto_is_measured_again_however_bad_it_was(tiers: Tiers, tmp_path: Path) -> None:
    tiers.estimates, tiers.seconds[1] = [4.0, 1.0, 1.1, 1.3], [1.6]
    results, _ = measure(tiers, tmp_path)
    assert len(runs(results, 1)) == 3


def test_what_decides_is_measured_until_it_is_known(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds[1], tiers.seconds[2] = [1.0, 1.1, 1.0], [1.02]
    results, _ = measure(tiers, tmp_path)
    assert 3 < len(runs(results, 1)) == len(runs(results, 2)) < 17, "also the one that is known: in turns"
    assert len(runs(results, 3)) == 1


def test_what_never_settles_ends(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds[1], tiers.seconds[2] = [1.0, 1.4] * 20, [1.0, 1.4] * 20
    results, _ = measure(tiers, tmp_path)
    assert len(runs(results, 1)) == len(runs(results, 2)) == 17, "20 s of either"


def test_long_epochs_are_measured_less_often(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds = {0: [99.0], 1: [5.0, 6.0] * 20, 2: [5.0, 6.0] * 20, 3: [99.0]}
    results, _ = measure(tiers, tmp_path)
    assert len(runs(results, 1)) == len(runs(results, 2)) == 4


def test_what_nothing_comes_near_is_known_well_enough(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds[1], tiers.seconds[2] = [1.0, 1.1] * 20, [1.25]
    results, _ = measure(tiers, tmp_path)
    assert len(runs(results, 1)) == 3


def test_tensors_that_the_link_makes_too_slow_are_not_sent(tiers: Tiers, tmp_path: Path) -> None:
    results, _ = measure(tiers, tmp_path)
    none = {r["form"]: r for r in results.records if r["kind"] == "none"}
    assert none["float32"]["over"] and none["float32"]["seconds"] == pytest.approx(
        16 * 3 * 64**2 * 4 * 8 / BANDWIDTH
    )
    assert tiers.form == "uint8"


def test_twins_are_measured_once(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds[4] = [1.0]
    tiers.wire, tiers.estimates = [10, 20, 20, 30, 30], [4.0, 1.0, 1.004, 1.3, 1.302]
    results, told = measure(tiers, tmp_path)
    assert not runs(results, 2) and not runs(results, 4)
    assert [(r["split"], r["of"]) for r in results.records if r["kind"] == "twin"] == [(2, 1), (4, 3)]
    assert "auto 1 (+0%)" in told[-2] and told[-1] == "1/1"


def test_what_is_a_twin() -> None:
    assert engine.twins([1, 1, 1, 2], [1.0, 1.004, 1.0, 1.0]) == [0, 0, 0, 3]
    assert engine.twins([1, 1, 1], [1.0, 1.004, 1.008]) == [0, 0, 2], (
        "by the first of them, so that they cannot drift"
    )
    assert engine.twins([1, 2, 1], [1.0, 1.0, 1.0]) == [0, 1, 2], "neighbours only"


def test_what_is_far_beyond_the_best_is_broken_off(tiers: Tiers, tmp_path: Path) -> None:
    results, _ = measure(tiers, tmp_path)
    (one,) = runs(results, 0)
    assert one["over"] and one["seconds"] == pytest.approx(engine.BEYOND * 1.0)


def test_what_the_link_alone_makes_too_long_is_not_run(tiers: Tiers, tmp_path: Path) -> None:
    tiers.wire = [10**6, 10, 10, 10]  # 8 s at the link's rate
    results, _ = measure(tiers, tmp_path)
    (one,) = runs(results, 0)
    assert one["over"] and one["seconds"] == pytest.approx(8.0) and 0 not in tiers.epochs


def test_a_lucky_first_run_does_not_condemn_the_others(tiers: Tiers, tmp_path: Path) -> None:
    tiers.seconds = {0: [9.0], 1: [1.0, 2.0, 2.0], 2: [1.8], 3: [9.0]}
    tiers.estimates = [9.0, 1.0, 1.8, 9.0]
    results, _ = measure(tiers, tmp_path)
    first, *others = runs(results, 2)
    assert first["over"] and others and not any(r["over"] for r in others)


def test_a_split_that_does_not_fit_is_recorded_and_the_rest_goes_on(tiers: Tiers, tmp_path: Path) -> None:
    tiers.unfit = {1}
    results, _ = measure(tiers, tmp_path)
    assert [r["ok"] for r in runs(results, 1)] == [False]
    assert len(runs(results, 2)) == 3 and results.done(ONE.cells()[0])


@pytest.mark.parametrize("plan_fits", [True, False])
def test_a_cell_that_does_not_fit_at_all_ends_and_is_not_tried_again(
    tiers: Tiers, tmp_path: Path, plan_fits: bool
) -> None:
    tiers.unfit, tiers.plan_fits = set(tiers.seconds), plan_fits
    results, _ = measure(tiers, tmp_path)
    assert results.done(ONE.cells()[0]) and not any(
        r.get("ok") for r in results.records if r["kind"] == "run"
    )
    tried = len(tiers.epochs)
    measure(tiers, tmp_path)
    assert len(tiers.epochs) == tried


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TransportError("the benchmark's client ended")])
def test_an_interrupted_cell_is_measured_anew_and_a_whole_one_is_kept(
    tiers: Tiers, tmp_path: Path, error: BaseException
) -> None:
    tiers.fail_at = (11, error)  # the first cell takes 6, the second is profiled again after 10
    with pytest.raises(type(error)):
        measure(tiers, tmp_path, TWO)
    tiers.fail_at = None
    first, second = TWO.cells()
    results, told = measure(tiers, tmp_path, TWO)
    assert told[0].startswith("2 cells, 1 to measure")
    assert [len(results.of(cell, "done")) for cell in (first, second)] == [1, 1]
    assert [len(results.of(cell, "plan")) for cell in (first, second)] == [2, 4]
    (one, other) = measured_cells(results.records)
    assert one.times == other.times, "nothing of the one that was interrupted counts"


def test_a_cell_is_profiled_again_after_its_first_epochs_and_the_last_choice_counts(
    tiers: Tiers, tmp_path: Path
) -> None:
    tiers.autos = [1, 3]
    results, told = measure(tiers, tmp_path)
    assert tiers.plans == [0, 4] and [r["part"] for r in results.of(ONE.cells()[0], "plan")] == [1, 2]
    assert len(runs(results, 3)) == 3 and "auto 3 (+30%)" in told[-2]
    (one,) = measured_cells(results.records)
    assert one.choices["auto"] == 3 and len(one.times[1]) == 3 and one.times[3] == [1.3] * 3


def test_more_profiles_and_seconds_go_on_with_cells_that_are_done(tiers: Tiers, tmp_path: Path) -> None:
    noisy = [1.0, 1.4] * 40
    tiers.seconds[1], tiers.seconds[2], tiers.autos = list(noisy), list(noisy), [1, 1, 2]
    _, told = measure(tiers, tmp_path)
    assert told[0].startswith("1 cells, 1 to measure;")
    results, told = measure(tiers, tmp_path, replace(ONE, profile_parts=3, enough=40.0))
    assert told[0] == "1 cells, 0 to measure, 1 to go on with, about 41.60 s left" and told[-1] == "1/1"
    assert [r["part"] for r in results.of(ONE.cells()[0], "plan")] == [1, 2, 3]
    (one,) = measured_cells(results.records)
    assert one.choices["auto"] == 2 and all(40 <= sum(one.times[split]) < 42 for split in (1, 2))
    assert len(runs(results, 3)) == 1
    assert len(results.of(ONE.cells()[0], "none")) == 2, "not measured again"
    _, told = measure(tiers, tmp_path, replace(ONE, profile_parts=3, enough=40.0))
    assert told == ["1 cells, 0 to measure"]


def test_going_on_with_a_cell_can_be_interrupted_and_loses_nothing(tiers: Tiers, tmp_path: Path) -> None:
    noisy = [1.0, 1.4] * 40
    tiers.seconds[1], tiers.seconds[2] = list(noisy), list(noisy)
    measure(tiers, tmp_path)
    had = len(tiers.epochs)
    tiers.fail_at = (had + 10, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(tiers, tmp_path, replace(ONE, enough=40.0))
    tiers.fail_at = None
    results, _ = measure(tiers, tmp_path, replace(ONE, enough=40.0))
    (one,) = measured_cells(results.records)
    assert sum(len(times) for times in one.times.values()) + 1 == len(tiers.epochs)
    assert all(40 <= sum(one.times[split]) < 42 for split in (1, 2))


def test_what_fails_again_and_again_ends(tiers: Tiers, tmp_path: Path) -> None:
    noisy = [1.0, 1.4] * 40
    tiers.seconds[1], tiers.seconds[2] = list(noisy), list(noisy)
    measure(tiers, tmp_path)
    tiers.unfit = {1, 2}
    results, _ = measure(tiers, tmp_path, replace(ONE, enough=40.0))
    assert [r["ok"] for r in runs(results, 1)][-2:] == [True, False]


def test_time_that_is_up_ends_it_between_cells(tiers: Tiers, tmp_path: Path) -> None:
    results, told = measure(tiers, tmp_path, TWO, seconds=0.0)
    assert not any(results.done(cell) for cell in TWO.cells()) and "2 cells are left" in told[-1]


def test_an_epoch_of_a_part_of_the_data_is_like_all_of_it() -> None:
    """What is stored class by class may have larger samples in front; estimates go by the whole dataset's mean."""
    ids = np.arange(768)
    assert spread(ids, 768).tolist() == ids.tolist() and spread(ids, 1000).tolist() == ids.tolist()
    for samples in (1, 16, 192, 384, 500):
        found = spread(ids, samples)
        assert len(set(found.tolist())) == samples
        assert abs(np.count_nonzero(found < 384) - samples / 2) <= 1


def test_a_file_from_before_there_was_a_setting_is_not_gone_on_with(tmp_path: Path) -> None:
    path, grid = tmp_path / "sweep.jsonl", asdict(ONE)
    del grid["least_profile_samples"]
    Results(path, {"grid": grid})
    with pytest.raises(
        UsageError, match="least_profile_samples unknown, this run has 16; give another --results"
    ):
        Results(path, {"grid": asdict(ONE)})
