"""Names of model factories: told from a library's, allowed by name or module, found in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hapi.errors import UsageError
from hapi.factories import check_allowed, is_factory, search_here


@pytest.mark.parametrize("name", ["mynet:make", "my.package:Net", "my-net:Net.small", "os:abort"])
def test_factories(name: str) -> None:
    assert is_factory(name)
    check_allowed(name, [name], "n")
    check_allowed(name, [name.partition(":")[0]], "n")
    for allowed in ([], ["other:make"], [name + "x"]):
        with pytest.raises(UsageError, match=f"model 'n' .*--allow-model {name}"):
            check_allowed(name, allowed, "n")


@pytest.mark.parametrize(
    "name", ["resnet50", "timm:vit:x", "store:net", "transformer", ":", "a:", "\x1b[2J:x"]
)
def test_other_names(name: str) -> None:
    assert not is_factory(name)
    check_allowed(name, [], "n")


def test_the_current_folder_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    search_here()
    search_here()
    assert sys.path == [str(tmp_path), "/elsewhere"]


def test_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    search_here()
    assert sys.path == ["/elsewhere"]
    monkeypatch.chdir(tmp_path)
