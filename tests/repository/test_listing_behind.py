"""A repository of models whose store's listing is behind: what was just written is found, and never collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.listing_behind import listing_behind

from hapi.cli.main import main
from hapi.errors import ConflictError, NotFoundError
from hapi.ingest.removal import remove_model
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs import journal
from hapi.repository.packs.collect import collect_packs
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.repository.versions import add_tag, drop_versions, list_tags, list_versions, version_key
from hapi.store.local import LocalStore

LARGE = 300 << 10


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def push_of(store: LocalStore, name: str, *numbers: int) -> None:
    def layer(number: int) -> SourceLayer:
        def pieces() -> Iterator[memoryview]:
            yield memoryview(bytes([number]) * LARGE)

        return SourceLayer(f"l{number}", (SourceTensor(f"t{number}", "uint8", (LARGE,), pieces),))

    push_tensors(store, name, [layer(number) for number in numbers])


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_commands_find_the_newest_version(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], earlier: int
) -> None:
    for number in range(earlier):
        push_of(store, "m", number)
    address, newest, out = f"{store.url}/m", f"m@{earlier + 1}", tmp_path / "m.safetensors"

    def says(*arguments: str) -> str:
        assert main([*arguments]) == 0
        told = capsys.readouterr()
        assert not told.err
        return told.out

    with listing_behind(store):
        save_file({"w": torch.full((LARGE,), 9, dtype=torch.uint8)}, tmp_path / "given.safetensors")
        says("push", str(tmp_path / "given.safetensors"), address, "--tag", "best", "--quiet")
        assert says("show", address).startswith(f"{newest}: ")
        assert f'"version": {earlier + 1},' in says("ls", address, "--json")
        assert says("tag", address).splitlines()[-1].startswith(newest)
        assert says("verify", address, "--quiet").endswith(": sound\n")
        assert says("diff", address, f"{store.url}/{newest}").endswith("the same model\n")
        says("pull", f"{address}@best", "--output", str(out), "--quiet")
        assert load_file(out)["w"].eq(9).all()
        assert "version" in says("tag", address, "other") and open_model(store, "m@other").reference == newest


def test_a_removed_version_that_is_still_listed(store: LocalStore) -> None:
    push_of(store, "m", 1)
    push_of(store, "m", 2)
    with listing_behind(store):
        remove_model(store, "m@2")
        assert open_model(store, "m").reference == "m@1"
        push_of(store, "m", 3)
        assert open_model(store, "m").reference == "m@2" and not verify_model(store, "m").damages
        remove_model(store, "m")
        for reference in ("m", "m@1", "m@best"):
            with pytest.raises(NotFoundError, match="no model 'm'"):
                open_model(store, reference)


def test_versions_that_are_replaced_leave_the_newest_listed_one(store: LocalStore) -> None:
    push_of(store, "m", 1)
    push_of(store, "m", 2)
    with listing_behind(store):
        push_of(store, "m", 3)
        push_of(store, "m", 4)
        assert drop_versions(store, "m", before=4) == [1]
    with listing_behind(store):
        assert open_model(store, "m").reference == "m@4"
        assert drop_versions(store, "m", before=4) == [2, 3]


def test_a_listing_that_lacks_what_another_one_had_hides_no_newest_version(store: LocalStore) -> None:
    """As of a node that was down while versions were pushed and replaced, beside one that was not."""
    push_of(store, "m", 1)
    add_tag(store, "m", "best", 1)
    with listing_behind(store):
        push_of(store, "m", 2)
        push_of(store, "m", 3)
        store.delete(version_key("m", 2))
        assert open_model(store, "m").reference == "m@3"
        push_of(store, "m", 4)
        assert open_model(store, "m").reference == "m@4"


def test_a_tagged_version_is_kept_although_its_tag_is_hidden(store: LocalStore) -> None:
    for number in (1, 2, 3):
        push_of(store, "m", number)
    add_tag(store, "m", "old", 1)
    with listing_behind(store):
        add_tag(store, "m", "best", 2)
        add_tag(store, "m", "old", 2)
        for _ in range(2):
            assert {name: tag.version for name, tag in list_tags(store, "m").items()} == {"best": 2, "old": 2}
            with pytest.raises(ConflictError, match="is tagged best, old; move the tag first"):
                remove_model(store, "m@2")
            add_tag(store, "m", "best", 2)  # the same again adds nothing
        assert drop_versions(store, "m", before=3) == [1] and open_model(store, "m@best").reference == "m@2"
        assert "best" in _said(lambda: open_model(store, "m@other"))
        assert not verify_model(store, "m").damages
        collect_packs(store)
        assert not verify_model(store, "m@best").damages
        remove_model(store, "m")
    assert store.list("models") == []


def _said(call: Callable[[], object]) -> str:
    with pytest.raises(NotFoundError) as caught:
        call()
    return str(caught.value)


def test_a_push_follows_versions_that_are_hidden_behind_a_gap(store: LocalStore) -> None:
    push_of(store, "kept", 4)
    with listing_behind(store):
        behind_a_gap(store)
        push_of(store, "new", 8)
    assert list_versions(store, "new") == [3, 4] and not verify_model(store, "new").damages
    with listing_behind(store):
        push_of(store, "new", 8)
        assert list_versions(store, "new") == [3, 4]


def named(store: LocalStore) -> None:
    push_of(store, "new", 1, 2)


def numbered(store: LocalStore) -> None:
    push_of(store, "kept", 1, 2)


def behind_a_gap(store: LocalStore) -> None:
    for number in (5, 6, 1):
        push_of(store, "new", number)
    for version in (1, 2):
        store.delete(f"models/new/versions/{version:08}.json.gz")


@pytest.mark.parametrize("pushes", [named, numbered, behind_a_gap])
def test_nothing_is_collected_that_a_hidden_version_needs(
    store: LocalStore, pushes: Callable[[LocalStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at once nor after the journal was summed up, and old sums alone are kept."""
    push_of(store, "gone", 1, 2, 3)
    push_of(store, "kept", 4)
    remove_model(store, "gone")
    with listing_behind(store):
        pushes(store)
        for _ in range(3):
            collect_packs(store)
            push_of(store, "kept", 7)
            push_of(store, "kept", 8)
    for days in (0, 2):
        now = journal.time.time() + days * journal.KEPT_SECONDS
        monkeypatch.setattr(journal.time, "time", lambda now=now: now)
        push_of(store, "kept", 9 + days)
        before = len(store.list_keys(journal.JOURNAL))
        with listing_behind(store):
            collect_packs(store)
        assert (len(store.list_keys(journal.JOURNAL)) < before) is (days > 0)
    collect_packs(store)
    for name in {*("kept", "new")} & {*store.list_names("models")}:
        for version in list_versions(store, name):
            assert not verify_model(store, f"{name}@{version}").damages
    assert len(store.list_names("models")) == 1 + (pushes is not numbered)
