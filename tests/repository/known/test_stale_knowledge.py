"""Machines that know a remote store as it was: pushes, collections and removals of others, kills, late listings."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from support.listing_behind import listing_behind
from support.standing import Standing
from support.stores import CountingRemote, DyingStore, Killed
from support.threads import at_once

from hapi.errors import ConflictError, NotFoundError
from hapi.ingest.removal import remove_model
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import list_models
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.index import PackIndex
from hapi.repository.packs.journal import written_versions
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.repository.versions import model_names
from hapi.store.local import LocalStore

LARGE = 300 << 10
MOST = 200
"""Operations that no push or collection here has."""
EVERY = pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.long)])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.repository.push._COLLECTED_SECONDS", 0.0)


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Goes on at the machine of this number, with its own cache."""
    return lambda number: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"home{number}"))


@pytest.fixture(autouse=True)
def _first(on_machine: Callable[[int], None]) -> None:
    on_machine(0)


def layer(number: int) -> SourceLayer:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes([number]) * LARGE)

    return SourceLayer(f"l{number}", (SourceTensor(f"t{number}", "uint8", (LARGE,), pieces),))


def push_of(store: Any, name: str, *numbers: int) -> None:
    push_tensors(store, name, [layer(number) for number in numbers])


def check_whole(folder: Path) -> None:
    store = LocalStore(folder)
    for name in model_names(store):
        assert not verify_model(store, name).damages
    assert all(found.problem is None for found in list_models(CountingRemote(folder)))


@pytest.mark.slow_except("listing-0")
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("late", [False, True], ids=["listing", "late listing"])
def test_two_machines_and_what_each_remembers(
    tmp_path: Path, on_machine: Callable[[int], None], seed: int, late: bool
) -> None:
    drawn, folder = random.Random(seed), tmp_path / "store"
    push_of(CountingRemote(folder), "m0", 1, 2)
    for _ in range(25):
        on_machine(drawn.randrange(2))
        store, name = CountingRemote(folder), f"m{drawn.randrange(4)}"
        is_late = late and drawn.random() < 0.3
        with listing_behind(store.origin) if is_late else nullcontext():  # type: ignore[arg-type]
            for _ in range(drawn.randrange(1, 3)):
                if drawn.random() < 0.65:
                    push_of(store, name, *drawn.sample(range(1, 9), drawn.randrange(1, 5)))
                elif drawn.random() < 0.6:
                    with suppress(NotFoundError):
                        remove_model(store, name)
                else:
                    collect_packs(store)
        check_whole(folder)


@pytest.fixture
def garbage(tmp_path: Path) -> Path:
    """A store with a model, the packs of one that is gone, and a pack of which a third is needed."""
    store = LocalStore(tmp_path / "garbage")
    for name, numbers in (("kept", (1, 2)), ("gone", (1, 3, 4)), ("large", (6, 7, 8)), ("part", (1, 7))):
        push_of(store, name, *numbers)
    remove_model(store, "gone")
    remove_model(store, "large")
    return tmp_path / "garbage"


def known_copy(garbage: Path, folder: Path) -> CountingRemote:
    """A copy whose packs and journal this machine knows."""
    shutil.copytree(garbage, folder)
    store = CountingRemote(folder)
    PackIndex.read(store)
    written_versions(store, "kept")
    return store


@pytest.mark.slow_except("numbers1-13")
@EVERY
@pytest.mark.parametrize("numbers", [(1, 3, 4), (6, 7)])
def test_a_collection_at_each_operation_of_a_push(
    garbage: Path, tmp_path: Path, numbers: tuple[int, ...], every: int
) -> None:
    for before in range(0, MOST, every):
        folder = tmp_path / f"store{before}"
        store = Standing(
            known_copy(garbage, folder), before, lambda folder=folder: collect_packs(CountingRemote(folder))
        )
        push_of(store, "new", *numbers)
        check_whole(folder)
        assert "new" in model_names(LocalStore(folder))
        if not store.stood:
            return
    pytest.fail("a push has more operations")


@pytest.mark.slow_except("numbers1-13")
@EVERY
@pytest.mark.parametrize("numbers", [(1, 3, 4), (6, 7)])
def test_a_push_at_each_operation_of_a_collection(
    garbage: Path, tmp_path: Path, numbers: tuple[int, ...], every: int
) -> None:
    for before in range(0, MOST, every):
        folder = tmp_path / f"store{before}"

        def pushed(folder: Path = folder) -> None:
            push_of(CountingRemote(folder), "new", *numbers)

        store = Standing(known_copy(garbage, folder), before, pushed)
        with suppress(ConflictError):  # a push waits for a collection that stands
            collect_packs(store)  # type: ignore[arg-type]
        check_whole(folder)
        if not store.stood:
            return
    pytest.fail("a collection has more operations")


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_push_that_dies_at_each_change(garbage: Path, tmp_path: Path, every: int) -> None:
    for changes in range(0, MOST, every):
        folder = tmp_path / f"store{changes}"
        store = known_copy(garbage, folder)
        died = False
        try:
            push_of(DyingStore(store, changes), "new", 1, 3, 5)
        except Killed:
            died = True
        collect_packs(store)
        check_whole(folder)
        push_of(store, "new", 1, 3, 5)
        check_whole(folder)
        if not died:
            return
    pytest.fail("a push has more changes")


@pytest.mark.slow
def test_many_pushes_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def work(number: int) -> None:
        for turn in range(4):
            push_of(CountingRemote(folder), f"m{number}", 1, 2, 10 + number, 20 + turn)

    at_once(4, work)
    check_whole(folder)
    collect_packs(CountingRemote(folder))
    check_whole(folder)
    assert len(model_names(LocalStore(folder))) == 4
