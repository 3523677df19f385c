"""Tests of the version of the code that computes features."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hapi.cache import code_version as versions
from hapi.cache.code_version import code_version, code_versions, digest_of_versions
from hapi.models.source_files import source_form

ROOT = Path(__file__).parents[2]


def test_what_decodes_and_computes_is_in_it() -> None:
    found = code_versions()
    assert {"transforms", "layers", "torch", "torchvision", "pillow", "numpy"} <= set(found)
    assert found["torch"] == metadata.version("torch")
    assert any(name.startswith("pillow ") for name in found), "the decoders inside Pillow"
    assert code_version() == digest_of_versions(found) and len(code_version()) == versions.DIGITS


@pytest.mark.parametrize("name", [*code_versions(), "of another library"])
def test_any_other_version_is_another_code(name: str) -> None:
    assert digest_of_versions({**code_versions(), name: "0.0.1"}) != code_version()


def test_settings_that_change_numbers_count() -> None:
    assert code_version({"tf32": "True"}) != code_version() == code_version({})


def test_it_costs_no_import_of_torch() -> None:
    """And it is the same in every process, whatever its seed of hashes."""
    code = "import sys, hapi.cache.code_version as c; print(c.code_version(), 'torch' in sys.modules)"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {f"{code_version()} False\n"}


SOURCES = {
    "TRANSFORMS_VERSION": ("hapi/data/transforms/*.py",),
    "LAYERS_VERSION": (
        "hapi/models/devices.py#set_arithmetic",
        "hapi/models/devices.py#arithmetic_type",
        "hapi/models/graph/precision.py",
        "hapi/models/graph/rounding.py",
        "hapi/models/graph/segment.py",
        "hapi/models/graph/views.py",
        "hapi/server/device/memory_format.py",
    ),
    "ROUNDING_VERSION": ("hapi/codecs/lossy.py",),
}
"""Files, and functions in them, that decide the numbers of features, by the version that stands for them."""
KNOWN = json.loads((Path(__file__).parent / "sources_of_features.json").read_text())
"""Versions and digests of these files, as they were when somebody last looked at their differences."""


def digest_of_source(path: Path, function: str = "") -> str:
    """Digest of a file, or of one function in it, without comments, docstrings and layout."""
    tree: ast.AST = ast.parse(path.read_text())
    if function:
        (tree,) = (node for node in ast.walk(tree) if getattr(node, "name", None) == function)
    return hashlib.sha256(json.dumps(source_form(tree)).encode()).hexdigest()[:16]


def digests_of(version: str) -> dict[str, str]:
    """Digests of what ``version`` stands for, by name."""
    found = {}
    for named in SOURCES[version]:
        pattern, mark, function = named.partition("#")
        for path in sorted(ROOT.glob(pattern)):
            found[path.relative_to(ROOT).as_posix() + mark + function] = digest_of_source(path, function)
    return found


@pytest.mark.parametrize("version", SOURCES)
def test_nobody_changes_what_computes_features_without_thinking_of_its_version(version: str) -> None:
    found = digests_of(version)
    now = {"version": getattr(versions, version), "files": found}
    known = KNOWN[version]
    changed = [name for name in {**known["files"], **found} if known["files"].get(name) != found.get(name)]
    assert now == known, (
        f"{', '.join(changed) or version} changed. If any feature may come out with another bit than before, raise "
        f"{version} in hapi/cache/code_version.py, or features kept with the old code would be used beside new ones. "
        f"Then put this in the place of {version} in tests/cache/sources_of_features.json: {json.dumps(now)}"
    )


def test_comments_and_docstrings_are_no_change(tmp_path: Path) -> None:
    texts = ('"""One."""\nx = 1  # one\n', '"""Two."""\n\nx = (\n    1\n)\n', "x = 2\n")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    one, two, other = (digest_of_source(tmp_path / f"{number}.py") for number in range(3))
    assert one == two != other
