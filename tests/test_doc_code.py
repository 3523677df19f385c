"""Python that the documents and docstrings show: it compiles, and what can run does, to the end."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.forked import ForkedProcess
from support.forked_python import PYTHON
from support.harness import server
from support.profiler_tools import crafted

import hapi

ROOT = Path(hapi.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IMPORTS = "import hapi\nimport torch\n"


def page_blocks(text: str) -> list[str]:
    """The fenced Python blocks of Markdown ``text``."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def docstring_block(name: str) -> str:
    """The literal block in the docstring of ``hapi.NAME``."""
    found = re.search(r"::\n\n((?: {4}.*\n|\n)+)", (inspect.getdoc(getattr(hapi, name)) or "") + "\n")
    assert found is not None, f"hapi.{name} shows no example"
    return inspect.cleandoc(found[1])


EXAMPLES = {
    "README.md": page_blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0],
    "training.md": page_blocks((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))[0],
    "hapi.Trainer": IMPORTS + docstring_block("Trainer"),
    "hapi.Profile and hapi.plan": IMPORTS + docstring_block("Profile") + "\n" + docstring_block("plan"),
}
"""Examples that run to their end where there are a dataset, a server and a profile."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with a store, its dataset "flowers" and a profile; and the URL of a server of that store."""
    folder = tmp_path_factory.mktemp("examples")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    np.savez(folder / "flowers.npz", x=pixels, y=np.arange(24) % 3)
    hapi.pack(folder / "flowers.npz", f"{folder}/store/flowers", image_size=32)
    crafted([100, 50, 10], [1e-3, 1e-3, 1e-3]).save(str(folder / "profile.json"))
    with server(folder / "store") as running:
        yield folder, running.url


def ran(code: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, with a small model, this store and this server for those that it names."""
    for shown, meant in {
        "http://store:8099": url,
        "resnet50": "resnet18",
        "s3://bucket/hapi": str(folder / "store"),
        "epochs=3": "epochs=1",
    }.items():
        code = code.replace(shown, meant)
    process = ForkedProcess(
        [PYTHON, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        output, errors = process.communicate(240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), output, errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_compiles(page: Path) -> None:
    for block in page_blocks(page.read_text(encoding="utf-8")):
        ast.parse(block, filename=page.name)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_to_its_end(example: str, place: tuple[Path, str]) -> None:
    done = ran(EXAMPLES[example], *place)
    assert done.returncode == 0, f"{example}: {done.stderr}"


@pytest.mark.slow
def test_an_example_with_a_mistake_fails(place: tuple[Path, str]) -> None:
    done = ran(EXAMPLES["training.md"].replace("next_batch(", "next_batches("), *place)
    assert done.returncode != 0 and "next_batches" in done.stderr
    with pytest.raises(SyntaxError):
        ast.parse(page_blocks("```python\nwith hapi.Session.open(settings) session:\n```")[0])
