"""Tests of the version of the code that computes features."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from hapi.cache import code_version as versions
from hapi.cache.code_version import code_version, code_versions, digest_of_versions


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
