"""What the documents say about places and lengths is true."""

from __future__ import annotations

import re
from pathlib import Path

import hapi

ROOT = Path(hapi.__file__).parents[1]
DOCS = ROOT / "docs"
MOST_WORDS = 19_000
"""Words of all pages in docs/ but the measurements and the list of public names: longer pages are not read."""
MOST_WORDS_OF_A_DECISION = 150
LONGEST_README = 250


def answers() -> dict[str, list[str]]:
    """Question to the folders that docs/contributing.md answers it with."""
    text = (DOCS / "contributing.md").read_text(encoding="utf-8")
    section = text.split("## A newcomer's ten questions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+\?) \| ([^|]+) \|$", section, re.MULTILINE)
    return {question: re.findall(r"`([^`]+)`", answer) for question, answer in rows}


def decisions() -> list[Path]:
    """Pages of docs/decisions, the index left out."""
    return sorted((DOCS / "decisions").glob("[0-9]*.md"))


def test_ten_questions_are_answered() -> None:
    assert len(answers()) == 10
    assert all(answers().values()), "answer each question by a folder's name in backticks"


def test_the_folders_of_the_answers_exist() -> None:
    missing = {
        question: lost for question, names in answers().items()
        if (lost := [name for name in names if not (ROOT / name).is_dir()])
    }  # fmt: skip
    assert not missing, f"docs/contributing.md: no such folders, say where they are now: {missing}"


def test_decisions_are_short_and_whole() -> None:
    wrong = []
    for page in decisions():
        text = page.read_text(encoding="utf-8")
        if len(text.split()) > MOST_WORDS_OF_A_DECISION:
            wrong.append(f"{page.name}: at most {MOST_WORDS_OF_A_DECISION} words")
        parts = ("Context", "Decision", "Consequence", "Evidence")
        wrong += [f"{page.name}: no {part.lower()}" for part in parts if f"**{part}.** " not in text]
    assert not wrong, "\n".join(wrong)


def test_the_pages_stay_short() -> None:
    pages = [
        *(page for page in DOCS.glob("*.md") if page.name != "api.md"),
        *(DOCS / "decisions").glob("*.md"),
    ]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert words < MOST_WORDS, (
        f"docs/ has {words} words: shorten a page, or delete a decision that no longer shapes anything"
    )
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    assert lines < LONGEST_README, f"README.md has {lines} lines; details belong in docs/"


def test_places_that_the_documents_name_exist() -> None:
    named = re.compile(r"`((?:hapi|tests|benchmarks|scripts)/[\w./-]+)")
    missing = [
        f"{page.relative_to(ROOT)}: {name} is not there; say where it is now"
        for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
        for name in named.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()
    ]  # fmt: skip
    assert not missing, "\n".join(missing)


def test_every_room_stands_in_the_architecture() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = [folder.name for folder in (ROOT / "hapi").iterdir() if (folder / "__init__.py").exists()]
    missing = [room for room in rooms if f"| `{room}` |" not in text]
    assert not missing, f"docs/architecture.md: the table of rooms lacks {missing}"


def test_the_wire_table_has_the_version_of_the_code() -> None:
    from hapi.wire.frames import WIRE_VERSION

    text = (DOCS / "protocol.md").read_text(encoding="utf-8")
    assert re.findall(r"version u8 = (\d+)", text) == [str(WIRE_VERSION)], (
        "docs/protocol.md: the table of frames"
    )
