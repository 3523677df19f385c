"""Environment of a decoding process: only variables that an interpreter and its libraries need.

A decoder is given strangers' bytes. It must not see tokens, cloud keys and proxies with passwords, so names
are allowed one by one: a list of secrets would never be complete.
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
    """Return the part of ``environment`` that a decoder may know.

    Args:
        environment: the server's.
        path: folders of the decoder's modules, its ``PYTHONPATH``.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}
