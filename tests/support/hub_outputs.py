"""Hugging Face checkpoints as transformers makes and reads them, in a process of its own.

Among the packages of the tests torchmetrics would import it too, which takes every test's time.

    python -m support.hub_outputs make FOLDER WORD...           a small encoder and its tokenizer
    python -m support.hub_outputs compare TEXT FOLDER OTHER     fails unless both give the very tokens and outputs

``scripts/test`` installs it into ``.venv-hub``; ``HAPI_HUB_FOLDER`` names another folder.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER, REQUIRED = "HAPI_HUB_FOLDER", "HAPI_REQUIRE_HUB"


def hub_package(name: str = "transformers") -> Path:
    """The folder of this package; skips the test without it, or fails it where it is required."""
    folder = Path(os.environ.get(FOLDER) or ROOT / ".venv-hub")
    if (folder / name).is_dir():
        return folder / name
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        missing = f"no {name} in {folder}; scripts/test installs it"
        pytest.fail(missing) if os.environ.get(REQUIRED) else pytest.skip(missing)
    return Path(found.origin).parent


def run_hub(*arguments: object) -> None:
    """Run this module with ``arguments``; fails the test when it fails."""
    paths = [str(hub_package().parent), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "support.hub_outputs", *map(str, arguments)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def _make(folder: Path, words: Sequence[str]) -> None:
    import transformers

    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n"
    )
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=5 + len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(config).save_pretrained(folder)


def _outputs(folder: str, text: str) -> list[Any]:
    import torch
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    network = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return [tokens["input_ids"], network(**tokens).last_hidden_state]


def main(command: str, *arguments: str) -> None:
    """Do what the command says."""
    if command == "make":
        _make(Path(arguments[0]), arguments[1:])
        return
    import torch

    text, *folders = arguments
    first, second = (_outputs(folder, text) for folder in folders)
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        sys.exit("other tokens or outputs")


if __name__ == "__main__":
    main(*sys.argv[1:])
