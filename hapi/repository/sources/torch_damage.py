"""One line for a file that ``torch.load`` refuses: what it is instead, or that it is damaged."""

from __future__ import annotations

import errno
import re

from hapi.errors import ModelError
from hapi.repository.sources.files import SourceFile

_CODE = re.compile(r"GLOBAL ([\w.]+)")
_ADVICE = "save model.state_dict(), with torch.save or as .safetensors"
_COPY = "copy or download it again"
_FOREIGN = (
    (
        b"version https://git-lfs",
        "is a pointer of Git LFS, not the weights: run 'git lfs pull' where it came from",
    ),
    (b"<", "is a web page or XML, not the weights: download the file that it stands for"),
    (b"\x1f\x8b", "is compressed by gzip: unpack it"),
    (b"\x89HDF", "is an HDF5 file, as Keras writes: convert it to .safetensors"),
    (b"PK\x03\x04", f"is damaged: its archive cannot be read; {_COPY}"),
)
_TAR = b"ustar"
"""Bytes 257 to 261 of a tar archive, which PyTorch before 0.2 wrote and no reader without code takes."""
_NESTED, _NESTED_BYTES = (b"_rebuild_nested_tensor", b"torch.nested"), 4 << 20
"""Names in the pickle of a file with nested tensors, and bytes in which they are looked for: it stands first. torch
fails in many ways at them, where it does not read memory that is not theirs."""
_UNKNOWN = ("not allocated", "not implemented", "not supported", "sparse", "compressed tensor", "quantized")
"""Words of errors about tensors that are whole, but of kinds that cannot be described."""


def nested_error(file: SourceFile) -> ModelError:
    """Return the error for a file with a nested tensor: several tensors of different shapes in one."""
    return ModelError(
        f"weights file {file.path} has a nested tensor, which no store holds: save its tensors (unbind()) under names "
        "of their own"
    )


def load_error(file: SourceFile, error: Exception) -> ModelError:
    """Return the error for a weights file that ``torch.load`` refused with ``error``. Code in it was not run."""
    what, text = f"weights file {file.path}", str(error)
    if isinstance(error, MemoryError):
        return ModelError(f"{what} does not fit into memory")
    if (
        isinstance(error, OSError) and error.errno != errno.EINVAL
    ):  # torch seeks before the start of damaged files
        return ModelError(f"{what} cannot be read: {error.strerror or error}")
    if not file.size:
        return ModelError(f"{what} is empty: {_COPY}")
    first = file.read(0, min(file.size, _NESTED_BYTES))
    if any(name in first for name in _NESTED):
        return nested_error(file)
    code = _CODE.search(text) if "weights_only" in text else None
    if code is not None:
        return ModelError(
            f"{what} holds more than tensors, which is never loaded: it asks for {code[1][:80]}, which may run code; "
            f"{_ADVICE}"
        )
    if isinstance(error, RuntimeError) and any(word in text for word in _UNKNOWN):
        return ModelError(f"{what} cannot be read as tensors: {text.splitlines()[0][:200]}")
    if first[257:262] == _TAR:
        return ModelError(
            f"{what} is a tar archive: unpack it; if a PyTorch before 0.2 saved it so, save it anew"
        )
    start = first[:32]
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < file.size:
        return ModelError(f"{what} is a safetensors file: give it a name that ends with .safetensors")
    for beginning, kind in _FOREIGN:
        if start.startswith(beginning):
            return ModelError(f"{what} {kind}")
    return ModelError(f"{what} is damaged, or no checkpoint of torch.save: {_COPY}, or {_ADVICE}")
