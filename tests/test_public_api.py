"""The names that ``import hapi`` offers: light, complete, described, and their examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hapi

ROOT = Path(hapi.__file__).parents[1]
NAMES = [name for name in hapi.__all__ if name != "__version__"]
HEAVY = {"torch", "torchvision", "aiohttp", "numpy", "obstore", "yaml", "matplotlib"}
WITHOUT_TORCH = (
    "HapiError", "Job", "PackOptions", "Profile", "ServerSettings", "SessionSettings", "TrainSettings",
    "keep_freed_memory", "list_datasets", "open_dataset", "open_store", "plan", "verify",
)  # fmt: skip


def new_process(code: str) -> str:
    """What ``code`` prints in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(name: str) -> list[str]:
    """The indented examples of a name's docstring."""
    text = inspect.getdoc(getattr(hapi, name)) or ""
    found = re.findall(r"(?:^|\n\n)((?: {4}.*(?:\n|$))+)", text.partition("\nArgs:")[0])
    return [inspect.cleandoc(block) for block in found]


def test_there_are_no_more_names_than_a_user_needs() -> None:
    assert 15 <= len(NAMES) <= 30
    assert list(hapi.__all__) == sorted(hapi.__all__)
    assert set(hapi._MODULES) == set(NAMES)
    assert set(hapi.__all__) <= set(dir(hapi))


def test_importing_hapi_imports_nothing_heavy() -> None:
    loaded = new_process("import hapi, sys; dir(hapi); print(*sys.modules)").split()
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert [name for name in loaded if name.startswith("hapi")] == ["hapi"]


@pytest.mark.slow
def test_plain_names_do_not_bring_torch() -> None:
    lines = [f"hapi.{name}; print('{name}', 'torch' in sys.modules)" for name in WITHOUT_TORCH]
    found = new_process("\n".join(["import hapi, sys", *lines])).split()
    assert dict(zip(found[::2], found[1::2], strict=True)) == dict.fromkeys(WITHOUT_TORCH, "False")


def test_every_name_is_there_and_a_type_checker_sees_the_same() -> None:
    tree = ast.parse(Path(hapi.__file__).read_text(encoding="utf-8"))
    (typed,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    places = {
        alias.name: node.module
        for node in typed.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    wrong = []
    for name in NAMES:
        place = places[name] if places[name] != "hapi" else f"hapi.{name}"
        module = importlib.import_module(place)
        if place != hapi._MODULES[name] or getattr(hapi, name) is not (
            module if places[name] == "hapi" else getattr(module, name)
        ):
            wrong.append(f"hapi.{name}: {place} for type checkers, {hapi._MODULES[name]} when it runs")
    assert not wrong, "\n".join(wrong)


def test_other_names_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'sesion'; it has: .*Session"):
        hapi.sesion  # type: ignore[attr-defined]  # noqa: B018


def test_every_name_has_a_docstring_with_an_example() -> None:
    bare = [
        f"hapi.{name}" for name in NAMES
        if ">>> " not in (inspect.getdoc(getattr(hapi, name)) or "")
        and not any(f"hapi.{name}" in block for block in blocks(name))
    ]  # fmt: skip
    assert not bare, f"{bare}: show how they are used, with '>>>' where it runs without a server"


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(getattr(hapi, name)) or "", {}, f"hapi.{name}", None, 0
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    lines: list[str] = []
    runner.run(test, out=lines.append)
    assert not runner.failures, "".join(lines)


def test_examples_that_need_a_server_name_only_what_there_is() -> None:
    wrong = []
    for name in NAMES:
        for block in blocks(name):
            ast.parse(block)
            unknown = set(re.findall(r"hapi\.(\w+)", block)) - set(NAMES)
            wrong += [f"hapi.{name}: the example uses hapi.{other}" for other in sorted(unknown)]
    assert not wrong, "\n".join(wrong)


def test_the_page_has_every_name_once() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: hapi\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(NAMES), "docs/api.md: put every name below a heading"


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "examples/custom_loop.py"])
def test_what_users_read_uses_the_public_names(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) if page.endswith(".md") else text
    assert "hapi." in code
    assert not re.findall(r"^\s*from hapi\b.*", code, re.M), f"{page}: use the names of 'import hapi'"
    assert set(re.findall(r"\bhapi\.(\w+)", code)) <= set(NAMES)


def test_python_m_hapi_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hapi", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, f"hapi {hapi.__version__}")
