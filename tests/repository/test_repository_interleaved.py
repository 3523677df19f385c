"""A push or a collection that stands still at each of its store operations, while another one runs as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from support.listing_behind import listing_behind
from support.standing import Standing
from support.stores import DyingStore, FullStore, Killed

from hapi.errors import ConflictError, DataError, NotFoundError
from hapi.ingest.removal import remove_model
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.journal import PUSHES
from hapi.repository.packs.pushes import CONDEMNED
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.stored import StoredModel
from hapi.repository.verify import verify_model
from hapi.repository.versions import list_versions, model_names
from hapi.store.local import LocalStore

LARGE = 300 << 10
NUMBERS = pytest.mark.parametrize(
    ("numbers", "every"),
    [
        ((1, 3, 4), 17),
        ((6, 7), 17),
        pytest.param((1, 3, 4), 3, marks=pytest.mark.slow),
        *(
            pytest.param(numbers, 1, marks=pytest.mark.long)
            for numbers in ((1, 3, 4), (6, 7), (1, 3), (3, 5))
        ),
    ],
)
"""Layers of a model that is pushed, some in a pack that goes, or in one that is packed anew; at which operations."""
MOST = 200
"""Operations that no push or collection here has."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.repository.push._COLLECTED_SECONDS", 0.0)
    monkeypatch.setattr("hapi.repository.versions._WAIT_SECONDS", 0.0)


def layer(number: int) -> SourceLayer:
    content = bytes([number]) * LARGE

    def pieces() -> Iterator[memoryview]:
        yield memoryview(content)

    return SourceLayer(f"l{number}", (SourceTensor(f"t{number}", "uint8", (LARGE,), pieces),))


def push_of(store: Any, name: str, *numbers: int) -> None:
    push_tensors(store, name, [layer(number) for number in numbers])


@pytest.fixture(scope="module")
def garbage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model, the packs of one that is gone, and a pack of which a third is needed."""
    folder = tmp_path_factory.mktemp("garbage") / "store"
    store = LocalStore(folder)
    push_of(store, "kept", 1, 2)
    push_of(store, "gone", 1, 3, 4)
    push_of(store, "large", 6, 7, 8)
    push_of(store, "part", 1, 7)
    remove_model(store, "gone")
    remove_model(store, "large")
    return folder


def copied(garbage: Path, folder: Path) -> LocalStore:
    shutil.copytree(garbage, folder)
    return LocalStore(folder)


def check_whole(store: LocalStore, *names: str) -> None:
    """Every model is whole, and those of these names are there; a collection leaves nothing behind."""
    assert set(names) <= set(model_names(store))
    for _ in range(2):
        for name in model_names(store):
            assert not verify_model(store, name).damages
        collect_packs(store)
    assert collect_packs(store) == () and not store.exists(CONDEMNED) and not store.list_keys(PUSHES)


@pytest.mark.slow_except("numbers1-17")
@NUMBERS
def test_a_push_at_each_operation_of_a_collection(
    garbage: Path, tmp_path: Path, numbers: tuple[int, ...], every: int
) -> None:
    check_pushes(garbage, tmp_path, numbers, every)


@pytest.mark.parametrize(
    "every", [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_a_push_at_each_operation_of_a_collection_on_a_full_disk(
    garbage: Path, tmp_path: Path, every: int
) -> None:
    """The push has found room."""
    check_pushes(garbage, tmp_path, (1, 3, 4), every, full=True)


@pytest.mark.slow
def test_a_push_that_no_listing_shows_at_every_third_operation_of_a_collection(
    garbage: Path, tmp_path: Path
) -> None:
    check_pushes(garbage, tmp_path, (1, 3, 4), 3, behind=True)


def check_pushes(
    garbage: Path,
    tmp_path: Path,
    numbers: tuple[int, ...],
    every: int,
    full: bool = False,
    behind: bool = False,
) -> None:
    for before in range(0, MOST, every):
        store = copied(garbage, tmp_path / str(before))
        done = []

        def other(store: LocalStore = store, done: list[bool] = done) -> None:
            try:
                push_of(store, "new", *numbers)
                done.append(True)
            except ConflictError:  # the collection stands still while it removes the structure
                done.append(False)

        standing = Standing(FullStore(store) if full else store, before, other)
        with listing_behind(store) if behind else nullcontext():
            collect_packs(standing)  # type: ignore[arg-type]
            if not standing.stood:
                other()
                collect_packs(store)
        check_whole(store, "kept", "part", *(["new"] if any(done) else []))
        if not standing.stood:
            return
    raise AssertionError


@NUMBERS
@pytest.mark.parametrize("removes", [False, True])
def test_a_collection_at_each_operation_of_a_push(
    garbage: Path, tmp_path: Path, numbers: tuple[int, ...], every: int, removes: bool
) -> None:
    check_collections(garbage, tmp_path, numbers, every, removes)


@pytest.mark.slow_except("5-True")
@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_collection_at_each_operation_of_a_push_that_writes_while_it_hashes(
    garbage: Path, tmp_path: Path, every: int, removes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its packs are condemned, and some of what it has is packed anew."""
    monkeypatch.setattr("hapi.repository.packs.layout.PACK_BYTES", LARGE)
    check_collections(garbage, tmp_path, (1, 3, 4, 7, 10, 11), every, removes)


def check_collections(
    garbage: Path, tmp_path: Path, numbers: tuple[int, ...], every: int, removes: bool
) -> None:
    for before in range(0, MOST, every):
        store = copied(garbage, tmp_path / str(before))

        def other(store: LocalStore = store) -> None:
            if removes:
                remove_model(store, "kept")
            collect_packs(store)

        standing = Standing(store, before, other)
        try:
            push_of(standing, "new", *numbers)
            check_whole(store, "part", "new")
        except (DataError, NotFoundError) as error:
            raise AssertionError(f"at operation {before}") from error
        if not standing.stood:
            return
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_removals_and_loads_at_each_operation_of_a_collection(
    garbage: Path, tmp_path: Path, every: int
) -> None:
    """A removed version stays removed, and who opened a model before reads it from where it is now."""
    for before in range(0, MOST, every):
        store = copied(garbage, tmp_path / str(before))
        push_of(store, "part", 2, 7)
        opened, removed = open_model(store, "part@2"), list[bool]()

        def other(
            store: LocalStore = store, opened: StoredModel = opened, removed: list[bool] = removed
        ) -> None:
            check_reads(opened)
            with suppress(ConflictError):  # the collection stands still while it holds the name
                remove_model(store, "part@1")
                removed.append(True)

        standing = Standing(store, before, other)
        collect_packs(standing)  # type: ignore[arg-type]
        check_reads(opened)
        assert list_versions(store, "part") == ([2] if any(removed) else [1, 2])
        check_whole(store, "kept", "part")
        if not standing.stood:
            return
    raise AssertionError


def check_reads(opened: StoredModel) -> None:
    assert {int(tensor[0]) for _, tensor in opened.read(opened.manifest.tensors)} == {2, 7}


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_collection_that_dies_at_each_change_and_a_push_after_it(
    garbage: Path, tmp_path: Path, full: bool
) -> None:
    for changes in range(MOST):
        store = copied(garbage, tmp_path / str(changes))
        dying = DyingStore(FullStore(store) if full else store, changes)  # type: ignore[arg-type]
        try:
            collect_packs(dying)  # type: ignore[arg-type]
            return
        except Killed:
            try:
                push_of(store, "new", 1, 3, 4)
            except ConflictError as error:  # its structure is condemned until the next collection
                assert "run it again" in str(error)
                collect_packs(store)
                push_of(store, "new", 1, 3, 4)
            check_whole(store, "kept", "part", "new")
    raise AssertionError
