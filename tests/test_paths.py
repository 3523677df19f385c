"""Files that are there whole or not at all, and places that are tried before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from hapi.errors import UsageError
from hapi.paths import check_output, check_outputs, user_path, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("first", "second \udc80"):
        write_whole(str(path), text)
    assert path.read_text(encoding="utf-8") == "second ?"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["absent/x", ".", "/", "", "file/x", "x\0y", "y" * 300])
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="cannot be written") as found:
        write_whole(name, "text", "--report")
    assert str(found.value).startswith("--report ") and "\n" not in str(found.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_place_is_tried_and_its_folder_made(tmp_path: Path) -> None:
    check_output("--html", str(tmp_path / "new" / "x.html"))
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("name", [".", "/", "", "/dev/null", "/proc/x", "file/x", "x\0y", "y" * 300])
def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match=r"^--html .*(not a plain file|cannot be written there)"):
        check_output("--html", name)


def test_a_file_has_one_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    check_outputs(
        [("--html", "a"), ("--report", None), ("--trace", "b")], [("--ca-file", "absent"), ("-w", None)]
    )
    with pytest.raises(
        UsageError, match=r"^--trace new/../a: it is the same file as --html; give another name$"
    ):
        check_outputs([("--html", "a"), ("--trace", "new/../a")])
    with pytest.raises(UsageError, match=r"^--html link: it is the same file as --profile"):
        check_outputs([("--html", "link")], [("--profile", "kept")])
    with pytest.raises(UsageError, match=r"^--trace kept/x: cannot be written there"):
        check_outputs([("--html", "a"), ("--trace", "kept/x")])


def test_an_unknown_home() -> None:
    with pytest.raises(UsageError, match=r"--store ~nobody-here/x: there is no user of this name"):
        user_path("~nobody-here/x", "--store")
