"""Small files beside a Hugging Face checkpoint: settings and tokenizer, without which its tensors are of no use.

They are pushed as a last layer, each as the bytes of a tensor. So they are named by their content, shared by versions,
verified, compared, collected and repaired as tensors are. Nothing that a program would run is among them: no code, and
no pickles. Brings no torch.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from hapi.units import format_bytes

if TYPE_CHECKING:
    from hapi.repository.entries import TensorEntry
    from hapi.repository.manifest import ModelManifest

FILES_LAYER = "@files"
"""Name of the layer, which no module can have."""
FILES_PREFIX = f"{FILES_LAYER}/"
"""Beginning of the names of its tensors."""
MAX_FILES_BYTES = 64 << 20
"""Bytes of all files; the longest tokenizers have 33 MB."""
_SETTINGS, _ADAPTER = "config.json", "adapter_config.json"
_PATTERNS = (
    _SETTINGS, "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3",
    "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "*.tiktoken", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", _ADAPTER,
    "LICENSE", "LICENSE.*", "NOTICE", "NOTICE.*", "README.md",
)  # fmt: skip
"""Names of files that libraries load with a model, those that matter most first."""
_NO_PARTS = frozenset("/\\\0")
_CODE = (".py", ".so", ".sh", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".exe")


_PART = re.compile(r"[0-9]{1,2}_[A-Za-z]{1,40}", re.ASCII)
"""Folders of sentence-transformers' modules; their settings are files too, such as ``1_Pooling/config.json``."""


def is_side_file(name: str) -> bool:
    """Return whether a file of this name is pushed and pulled: a known one that is no code."""
    part, slash, settings = name.partition("/")
    if slash:
        return settings == _SETTINGS and _PART.fullmatch(part) is not None
    if (
        not name.isprintable()
        or name.startswith(".")
        or _NO_PARTS & set(name)
        or name.lower().endswith(_CODE)
    ):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _PATTERNS)


def find_side_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files that belong to a checkpoint in ``folder`` by name, and lines on those that are left out.

    A folder without ``config.json``, or an adapter's, is none of Hugging Face's: nothing in it is taken. A link is
    followed within the folder, and within Hugging Face's cache: a downloaded one might stand for any private file of
    this machine.
    """
    sizes: dict[str, int] = {}
    taken, left, room = dict[str, Path](), dict[str, str](), MAX_FILES_BYTES
    for name in _listed(folder):
        path = folder / name
        try:
            found = path.stat()
            if not _is_own(path, folder):
                left[name] = (
                    f"{path} is not pushed: it is a link out of its folder; put the file itself there"
                )
            elif stat.S_ISREG(found.st_mode):
                sizes[name] = found.st_size
        except (OSError, RuntimeError) as error:  # a link to nothing, or to itself
            left[name] = f"{path} is not pushed: {getattr(error, 'strerror', None) or error}"
    if sizes.keys().isdisjoint((_SETTINGS, _ADAPTER)):
        return {}, [left[_SETTINGS]] if _SETTINGS in left else []
    notes = list(left.values())
    for name in sorted(sizes, key=lambda name: (_importance(name), name)):
        if sizes[name] > room:
            notes.append(
                f"{folder / name} is not pushed: it has {format_bytes(sizes[name])}, and the files beside a "
                f"checkpoint may have {format_bytes(MAX_FILES_BYTES)} in all"
            )
            continue
        room -= sizes[name]
        taken[name] = folder / name
    return taken, notes


def side_files_of(manifest: ModelManifest) -> Mapping[str, TensorEntry]:
    """Return the files of a pushed model by name; a name that no file may have is left out, whoever pushed it."""
    if manifest.spec is not None or not manifest.layers or manifest.layers[-1].name != FILES_LAYER:
        return {}
    found = {}
    for tensor in manifest.layers[-1].tensors:
        entry, name = manifest.tensors[tensor], tensor.removeprefix(FILES_PREFIX)
        if (
            tensor.startswith(FILES_PREFIX)
            and is_side_file(name)
            and (entry.dtype, len(entry.shape)) == ("uint8", 1)
        ):
            found[name] = entry
    return found


def are_of_adapter(files: Collection[str]) -> bool:
    """Return whether files of these names belong to an adapter of a model, and to no model."""
    return _ADAPTER in files and _SETTINGS not in files


def _listed(folder: Path) -> list[str]:
    try:
        names = sorted(path.name for path in folder.iterdir())
        inside = [f"{name}/{_SETTINGS}" for name in names if _PART.fullmatch(name)]
        return [*filter(is_side_file, names), *(name for name in inside if (folder / name).exists())]
    except OSError:  # the checkpoint's own error says so
        return []


def _is_own(path: Path, folder: Path) -> bool:
    """Return whether the file at ``path`` lies in ``folder``, or where Hugging Face's cache keeps the files of one."""
    file, home = path.resolve(), folder.resolve()
    if file.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and file.parent == home.parent.parent / "blobs"


def _importance(name: str) -> int:
    numbers = (number for number, pattern in enumerate(_PATTERNS) if fnmatchcase(name, pattern))
    return next(numbers, len(_PATTERNS))
