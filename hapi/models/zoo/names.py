"""Names of architectures and of weights, checked without importing torch: a typing error is answered at once."""

from __future__ import annotations

import difflib
import importlib.util
import operator
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from hapi.errors import ModelChoiceError, ModelError, UsageError
from hapi.factories import is_factory
from hapi.paths import is_folder, user_path
from hapi.wire.references import ARCHITECTURE_PATTERN

ALIASES = {"transformer": "vit_b_16"}
TIMM = "timm:"
MAX_CLASSES = 10_000_000
"""Bound of a model's classes."""
_WORDS = ("", "auto", "random", "DEFAULT")
"""Weights, even where a folder has the name."""
_RANDOM = re.compile(r"random:(\d{1,18})")
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".index.json")
_ENDINGS = (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin", ".pth", ".pt", ".ckpt",
            ".pth.tar")  # fmt: skip
"""Endings of the names of checkpoints in a folder, the preferred ones first."""
_USUAL = ("model", "pytorch_model")
"""Names before the ending that count where a folder has several files of a kind, as in Hugging Face's libraries."""
_FAMILY = r"^@register_model\(\)\n(?:^@.*\n)*^def (\w+)\("
_WEIGHTS = r"^class (\w+_Weights)\(WeightsEnum\):\n((?:(?:    .*)?\n)+)"
_NAMED = r"^def %s\(\s*\*, weights: Optional\[(\w+)\]"


def is_file(weights: str) -> bool:
    """True when ``weights`` names a local checkpoint."""
    return weights.endswith(FILE_SUFFIXES) or "/" in weights or "\\" in weights


def is_checkpoint(text: str) -> bool:
    """True when ``text`` names a checkpoint on this machine, also one in a folder, and no architecture or weights of a
    library.
    """
    if is_file(text):
        return ":" not in text or text.endswith(FILE_SUFFIXES)
    return text not in _WORDS and ":" not in text and text not in torchvision_names() and is_folder(text)


def checkpoint_in(folder: Path) -> Path:
    """Return the one checkpoint in ``folder``, or that of the usual name; :class:`ModelError` if there is none, or more
    than one of a kind.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None
    for ending in _ENDINGS:
        found = [name for name in names if name.endswith(ending)]
        usual = [name for name in found if name.removesuffix(ending) in _USUAL]
        if len(found) == 1 or len(usual) == 1:
            return folder / (usual or found)[0]
        if found:
            raise ModelError(
                f"{folder} has {len(found)} files that may be the checkpoint ({', '.join(found[:3])}); name one of them"
            )
    raise ModelError(f"{folder} has no checkpoint: no file ends with {', '.join(_ENDINGS)}")


def random_seed(weights: str) -> int | None:
    """The seed of ``random:SEED``; None for other weights. :class:`ModelChoiceError` for a wrong seed."""
    match = _RANDOM.fullmatch(weights)
    if match is None and weights.split(":")[0] == "random":
        raise ModelChoiceError(
            f"weights {weights[:40]!r}: write random:SEED with SEED a whole number, such as random:0"
        )
    return int(match[1]) if match else None


def with_seed(weights: str, seed: int) -> str:
    """``weights``, with ``seed`` where they are ``random`` without one."""
    return f"random:{seed}" if weights == "random" else weights


def suggestion(name: str, known: Collection[str]) -> str:
    """Advice for the unknown architecture ``name``: near misses, or the forms that there are."""
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return "use a torchvision name such as resnet50, timm:NAME, or package.module:factory"


def check_model(model: str) -> None:
    """Check the name of an architecture as far as that is possible without importing its library.

    Args:
        model: a torchvision name, ``timm:NAME`` or ``package.module:factory``.

    Raises:
        ModelChoiceError: there is no such model; the message names near misses.
    """
    name = ALIASES.get(model, model)
    if ARCHITECTURE_PATTERN.fullmatch(name) is None:
        raise ModelChoiceError(f"{name[:80]!r} is not an architecture's name")
    if name.startswith(TIMM):
        _check_timm(name)
    elif is_factory(name):
        return
    elif (known := torchvision_names()) and name not in known:
        raise ModelChoiceError(f"unknown architecture {name[:80]!r}; {suggestion(name, [*known, *ALIASES])}")


def check_weights(model: str, weights: str) -> None:
    """Check the name of weights as far as that is possible without importing torch.

    Args:
        model: the architecture.
        weights: ``auto``, ``random``, ``random:SEED``, a name of the library's weights, or the path of a checkpoint or
            of a folder with one.

    Raises:
        UsageError: there is no such file, or the architecture has no weights of this name.
        ModelError: the folder has no checkpoint.
    """
    if weights in _WORDS or random_seed(weights) is not None:
        return
    if is_checkpoint(weights):
        _check_weights_file(weights)
        return
    known = weights_names(ALIASES.get(model, model))
    if known and weights not in known:
        raise UsageError(
            f"--weights {weights[:80]}: {model} has no such weights; it has DEFAULT, {', '.join(known)} "
            "(or random, random:SEED, or a file or folder)"
        )


def could_be_layer(model: str, name: str) -> bool:
    """Return whether ``name`` may be a layer of ``model``; False only when it surely is none."""
    source = "" if ":" in model else _source("torchvision")
    first = re.sub(r"_?\d+$", "", name.partition(".")[0])
    return (
        not source or first in dir(operator) or re.search(rf"\b{re.escape(first)}_?\d*\b", source) is not None
    )


@cache
def torchvision_names() -> tuple[str, ...]:
    """Return the classification models of the installed torchvision; none where its source cannot be read."""
    return tuple(sorted(re.findall(_FAMILY, _source("torchvision"), re.MULTILINE)))


def weights_names(model: str) -> tuple[str, ...]:
    """Return the names of torchvision's weights for ``model``, without DEFAULT; none where they are not known."""
    source = _source("torchvision")
    found = re.search(_NAMED % re.escape(model), source, re.MULTILINE)
    bodies = dict(re.findall(_WEIGHTS, source, re.MULTILINE)) if found else {}
    names = re.findall(r"^    (\w+) = Weights\(", bodies.get(found[1], "") if found else "", re.MULTILINE)
    return tuple(names)


@cache
def _source(library: str) -> str:
    """Source of the models of an installed library; empty where there is none to read."""
    found = importlib.util.find_spec(library)
    folders: Sequence[str] = (found.submodule_search_locations if found else None) or ()
    try:
        files = [path for folder in folders for path in sorted(Path(folder, "models").glob("*.py"))]
        return "\n".join(path.read_text("utf-8") for path in files)
    except (OSError, ValueError):
        return ""


def _check_timm(name: str) -> None:
    if importlib.util.find_spec("timm") is None:
        raise ModelChoiceError(f"model {name!r} needs timm, which is not installed: pip install timm")
    short, source = name.removeprefix(TIMM).partition(".")[0], _source("timm")
    if source and not re.search(rf"\bdef {re.escape(short)}\(|(['\"]){re.escape(short)}\1", source):
        known = re.findall(r"^@register_model\ndef (\w+)\(", source, re.MULTILINE)
        raise ModelChoiceError(f"timm has no model {short[:80]!r}; {suggestion(short, known)}")


def _check_weights_file(weights: str) -> None:
    file = user_path(weights, "--weights")
    try:
        if file.is_dir():
            checkpoint_in(file)
            return
        found, exists = file.is_file(), file.exists()
    except OSError as error:  # in a folder that must not be read, or a name that is too long
        raise UsageError(f"--weights {weights}: cannot be read: {error.strerror}") from None
    if not found:
        raise UsageError(
            f"--weights {weights}: {'is not a plain file' if exists else 'there is no such file'}"
        )
