"""The site of the documents: its build finds what is broken, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import hapi

pytestmark = pytest.mark.slow
ROOT = Path(hapi.__file__).parents[1]
MISTAKES = {
    "a page that is not there": ("README.md", "[x](docs/gone.md)", r"README.*docs/gone\.md"),
    "a heading that is not there": (
        "docs/training.md",
        "[x](operations.md#gone)",
        r"training.*operations.*gone",
    ),
    "a file that is not there": ("docs/operations.md", "[x](../deploy/gone.yaml)", r"operations.*gone\.yaml"),
    "a picture that is not there": ("docs/reports.md", "![x](gone.png)", r"reports.*gone\.png"),
    "a block that is not JSON": ("docs/protocol.md", "```json\n{x: 1}\n```", r"protocol.*as \"json\""),
    "a page outside the menu": ("docs/lost.md", "# Lost", r"lost\.md.*toctree"),
    "a name that is not there": (
        "docs/api.md",
        "```{eval-rst}\n.. autofunction:: hapi.gone\n```",
        r"hapi\.gone|'gone'",
    ),
    "a reference in a docstring": (
        "docs/glossary.md",
        "```{eval-rst}\n:func:`hapi.absent`\n```",
        r"glossary.*hapi\.absent",
    ),
}
"""What is wrong, to the page, what is appended to it, and what the build says."""


class Built(NamedTuple):
    """A copy of the documents with :data:`MISTAKES`, built."""

    pages: Path
    code: int
    warnings: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The site of a copy of the checkout's documents, with all mistakes at once."""
    checkout = tmp_path_factory.mktemp("checkout")
    for folder in ("docs", "deploy", "examples"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for page in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / page, checkout)
    for name, text, _ in MISTAKES.values():
        with (checkout / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{text}\n")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-c", "docs", ".", "site"],
        cwd=checkout, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    warnings = re.findall(r"^.*(?:WARNING|ERROR): .*$", done.stderr, re.MULTILINE)
    return Built(checkout / "site", done.returncode, warnings)


def test_the_build_finds_what_is_broken_and_nothing_else(built: Built) -> None:
    assert built.code != 0
    for mistake, (_, _, pattern) in MISTAKES.items():
        assert any(re.search(pattern, warning) for warning in built.warnings), f"{mistake}: {built.warnings}"
    patterns = "|".join(pattern for _, _, pattern in MISTAKES.values())
    others = [warning for warning in built.warnings if not re.search(patterns, warning)]
    assert not others, "the documents themselves have mistakes"


def test_the_pages_load_nothing_from_elsewhere(built: Built) -> None:
    loads = (
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//"
    )
    imports = r"@import\s|url\([\"']?(?:https?:)?//"
    pages = sorted(built.pages.rglob("*.html"))
    assert len(pages) > 50
    wrong = [page.name for page in pages if re.search(loads, page.read_text(encoding="utf-8"))]
    wrong += [
        sheet.name
        for sheet in built.pages.rglob("*.css")
        if re.search(imports, sheet.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_the_site_opens_with_the_readme(built: Built) -> None:
    front = (built.pages / "index.html").read_text(encoding="utf-8")
    assert "Hapi: near-data transfer learning" in front
    menu = re.findall(r'class="toctree-l1[^"]*"><a[^>]*href="([^"]+)"', front)
    assert menu[:2] == ["docs/training.html", "docs/models.html"]
