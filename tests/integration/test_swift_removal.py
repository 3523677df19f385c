"""``hapi rm`` and ``hapi gc`` over a real OpenStack Swift, killed in the middle."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import hapi
from support.killed_storing import killed_storing
from support.swift_tools import PACKED, Swift

from hapi.store.open import open_store

STORE, MODELS = "s3://hapi/removal", "s3://hapi/packed-anew"
TENSOR = 10 << 20
"""Bytes of a tensor; a pack of one is uploaded in parts."""


@pytest.mark.slow
def test_removed_with_kills(swift: Swift) -> None:
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    rm = ["rm", f"{STORE}/digits", "--yes", "--keep-old", "0"]
    code, _ = killed_storing("delete", "", 3, *rm, env=swift.environment)
    assert code == -signal.SIGKILL
    assert "digits" not in hapi("ls", STORE, **swift.environment).stdout
    assert "removed" in hapi("gc", STORE, "--yes", **swift.environment).stdout
    assert "every object belongs to something" in hapi("gc", STORE, **swift.environment).stdout
    hapi("pack", "sklearn:digits", f"{STORE}/digits", *PACKED, **swift.environment)
    assert "sound" in hapi("verify", f"{STORE}/digits", "--quiet", **swift.environment).stdout


@pytest.mark.slow
def test_packed_anew_with_kills(swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the new pack is uploaded, before a version is told of it, and before the old one goes."""
    for name, numbers in (("large", (1, 2, 3)), ("part", (2,))):
        file = tmp_path / f"{name}.safetensors"
        save_file({f"t{n}.weight": torch.full((TENSOR,), n, dtype=torch.uint8) for n in numbers}, file)
        hapi("push", str(file), f"{MODELS}/{name}", "--quiet", **swift.environment)
    hapi("rm", f"{MODELS}/large", "--yes", **swift.environment)
    for change, where, count in (
        ("piece", "/packs/", 3),
        ("put", "models/part", 0),
        ("delete", "/packs/", 0),
    ):
        code, output = killed_storing(change, where, count, "gc", MODELS, "--yes", env=swift.environment)
        assert code == -signal.SIGKILL, output
        assert ": sound" in hapi("verify", f"{MODELS}/part", "--quiet", **swift.environment).stdout
    hapi("gc", MODELS, "--yes", **swift.environment)
    assert "every object belongs to something" in hapi("gc", MODELS, **swift.environment).stdout
    for name, value in swift.environment.items():
        monkeypatch.setenv(name, value)
    (pack,) = open_store(MODELS).list("repository/packs")
    assert pack.size < TENSOR + 4096
    hapi("pull", f"{MODELS}/part", "--output", str(tmp_path / "back.safetensors"), **swift.environment)
    (tensor,) = load_file(tmp_path / "back.safetensors").values()
    assert torch.equal(tensor, torch.full((TENSOR,), 2, dtype=torch.uint8))
