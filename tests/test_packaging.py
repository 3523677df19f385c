"""What is published: the wheel, the source distribution, their metadata, and the extras that messages name."""

from __future__ import annotations

import argparse
import ast
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from support.parsed import ROOT, modules_of, nodes_of, tree_of
from support.train_cli import refused

import hapi
from hapi.cli.report import run as report
from hapi.errors import UsageError
from hapi.figures import canvas

LINKED = "See [the page](docs/training.md), ![chart](docs/a.png), [all](https://b.org) and [up](#top).\n"
IMPORTS = {
    "PyYAML": "yaml",
    "Pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "google-crc32c": "google_crc32c",
    "huggingface-hub": "huggingface_hub",
    "mlflow-skinny": "mlflow",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "scikit-learn": "sklearn",
    "cuda-bindings": "cuda",
}
"""Names that are imported, where they differ from the distribution's."""
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs the git checkout, which says what belongs to the project")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


class Built(NamedTuple):
    files: list[str]
    """Names in the source distribution."""
    source: Path
    """That, unpacked."""
    wheel: zipfile.ZipFile
    metadata: Message


def build(kind: str, tree: Path, target: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The distributions of a clean copy of this tree; the wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    for name in tracked():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    packed = build("build_sdist", folder / "tree", folder)
    with tarfile.open(packed) as archive:
        names = archive.getnames()
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(build("build_wheel", source, folder)) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        yield Built(names, source, wheel, email.message_from_bytes(wheel.read(metadata)))


@pytest.mark.slow
def test_the_source_distribution_is_the_tree(built: Built) -> None:
    packed = {name.partition("/")[2] for name in built.files}
    assert not [name for name in tracked() if name not in packed], "add it to MANIFEST.in"
    assert {"PKG-INFO", "pyproject.toml", "setup.py", "MANIFEST.in"} <= packed
    assert not [name for name in packed if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    names = built.wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"hapi", f"hapi_split-{hapi.__version__}.dist-info"}
    package = {name for name in tracked() if name.startswith("hapi/")}
    assert package == {name for name in names if name.startswith("hapi/")}
    (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
    assert built.wheel.read(scripts).decode().count("hapi.cli.entry:") == 3
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_imports_without_the_checkout(built: Built, tmp_path: Path) -> None:
    built.wheel.extractall(tmp_path)
    code = "import hapi, importlib.metadata as m; print(hapi.__file__, m.version('hapi-split'), hapi.pack.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "hapi/__init__.py"), hapi.__version__, "hapi.api.datasets"]


@pytest.mark.slow
def test_the_metadata_say_what_an_index_shows(built: Built) -> None:
    found = built.metadata
    assert (found["Name"], found["Version"]) == ("hapi-split", hapi.__version__)
    assert found["License-Expression"] == "Apache-2.0" and found["Summary"] and found["Keywords"]
    assert set(found.get_all("Provides-Extra", [])) == set(project()["optional-dependencies"])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(
        found.get_all("Classifier", [])
    )
    assert found["Description-Content-Type"] == "text/markdown"
    page = MarkdownIt("commonmark").enable("table").render(str(found.get_payload()))
    assert page.startswith("<h1>Hapi") and page.count("<table>") > 1 and "```" not in page
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_links_of_the_description() -> None:
    code = "```sh\n[a](b)\n```\n"
    assert setup_script().description(LINKED + code, {"version": "2.0"}) == (
        "See the page, , [all](https://b.org) and [up](#top).\n" + code
    )
    there = {"version": "2.0", "urls": {"Source": "https://forge.example/hapi/"}}
    assert setup_script().description(LINKED, there) == (
        "See [the page](https://forge.example/hapi/blob/v2.0/docs/training.md), "
        "![chart](https://forge.example/hapi/raw/v2.0/docs/a.png), [all](https://b.org) and [up](#top).\n"
    )


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hapi_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_as(requirement: str) -> str:
    name = Requirement(requirement).name
    return IMPORTS.get(name, name)


def packages(extra: str) -> set[str]:
    """Import names of an extra's own requirements."""
    return {
        imported_as(line) for line in project()["optional-dependencies"][extra] if "hapi-split" not in line
    }


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Top packages that these nodes import, also by ``import_module("name")`` and ``find_spec``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and _last_name(node.func).endswith(("import_module", "find_spec")):
            yield from (str(a.value).partition(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant))


def foreign(names: Iterator[str]) -> set[str]:
    return {name for name in names if name not in sys.stdlib_module_names and name != "hapi"}


def _last_name(node: ast.expr) -> str:
    """The ``find_spec`` of ``importlib.util.find_spec``."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def at_import(tree: ast.Module) -> Iterator[str]:
    """Packages that importing the module needs."""
    return imports_of(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))


def test_everything_imported_is_declared() -> None:
    core = {imported_as(line) for line in project()["dependencies"]}
    extras = {name for extra in project()["optional-dependencies"] for name in packages(extra)}
    for path in modules_of("hapi"):
        module = str(path.relative_to(ROOT))
        # The rooms of a fleet are imported by those who have their extras.
        room = (
            {name for extra in ("ray", "simulate") for name in packages(extra)}
            if "cluster" in module
            else set()
        )
        assert foreign(at_import(tree_of(path))) <= core | room, (
            f"{module}: import what an extra brings where it is used"
        )
        assert foreign(imports_of(nodes_of(path))) <= core | extras, f"{module}: declare it in pyproject.toml"


def test_every_extra_named_anywhere_exists() -> None:
    known = set(project()["optional-dependencies"])
    for name in tracked():
        if not name.endswith((".py", ".md", ".toml", ".sh", ".yaml", ".yml")) or name.startswith("tests/"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        named = {word for found in re.findall(r"hapi-split\[([\w,]+)\]", text) for word in found.split(",")}
        assert named <= known, f"{name}: {named - known}"
        assert not re.search(r"install '?hapi\b(?!-)", text), f"{name}: the package is called hapi-split"


def test_all_has_every_extra_of_a_user() -> None:
    extras = dict(project()["optional-dependencies"])
    (line,) = extras["all"]
    assert Requirement(line).extras == set(extras) - {"all", "docs", "test", "ray"}, (
        "ray is 0.34 GB of its own"
    )


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = canvas.importlib.util.find_spec

    def found(name: str) -> Any:
        return None if name == "matplotlib" else real(name)

    monkeypatch.setattr(canvas.importlib.util, "find_spec", found)


def test_commands_that_draw_name_the_extra(no_matplotlib: None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^hapi report needs matplotlib.*'hapi-split\[report\]'$"):
        report(argparse.Namespace(report=str(tmp_path / "r.json"), html=None))
    with pytest.raises(UsageError, match="--figure needs matplotlib"):
        canvas.check_suffix("plan.png")


def test_a_training_that_is_to_draw_ends_before_it_begins(
    no_matplotlib: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = refused(
        capsys, "--store", str(tmp_path), "--no-output", "--html", str(tmp_path / "a.html")
    )
    assert (code, "--html needs matplotlib" in message) == (2, True)


def test_the_lowest_versions_are_those_of_the_dependencies() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/lowest_versions.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [Requirement(line) for line in done.stdout.splitlines()]
    declared = [Requirement(line) for line in project()["dependencies"]]
    assert [line.name for line in lines] == [line.name for line in declared]
    for line, known in zip(lines, declared, strict=True):
        (version,) = (specifier.version for specifier in line.specifier)
        assert version in known.specifier, line


def test_workflows_call_scripts_that_there_are() -> None:
    document = yaml.safe_load((ROOT / ".github/workflows/tests.yaml").read_text(encoding="utf-8"))
    commands = [job["command"].split() for job in document["jobs"]["tests"]["strategy"]["matrix"]["include"]]
    usage = (ROOT / "scripts/test").read_text(encoding="utf-8")
    for program, *flags in commands:
        assert (ROOT / program).stat().st_mode & 0o100
        assert all(f"{flag})" in usage for flag in flags if flag.startswith("--"))


def test_files_that_a_forge_looks_for() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (hapi.__version__, project()["license"])
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{name}: {target}"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "mypy"}
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yaml"):
        assert {"name", "description", "body"} <= set(yaml.safe_load(form.read_text(encoding="utf-8")))
