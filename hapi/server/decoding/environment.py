"""The environment of a process that decodes: what an interpreter and its libraries need, and nothing of the server's.

A decoder is given the stored bytes of strangers. Tokens, cloud keys and proxies with passwords in them are not its
business, so names are allowed one by one: a list of secrets would never be complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

ALLOWED = frozenset(
    (
        "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV",
        "SYSTEMROOT", "CONDA_PREFIX",
    )
)  # fmt: skip
ALLOWED_PREFIXES = (
    "LC_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "TORCH_",
    "GLIBC_",
    "COVERAGE_",
)
"""Locale, interpreter, threads, memory, torch, and coverage.py, which measures processes that tests start."""


def decoder_environment(environment: Mapping[str, str], path: Iterable[str]) -> dict[str, str]:
    """What a decoder may know of ``environment``.

    Args:
        environment: The server's.
        path: Folders of the decoder's modules, its ``PYTHONPATH``.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}
