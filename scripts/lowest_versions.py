"""Print a constraints file for pip that holds every dependency at the lowest version that pyproject.toml allows."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lowest(requirement: str) -> str:
    """``name==version`` for a requirement ``name>=version``, whatever else it bounds."""
    found = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r} has no lower bound; write it as NAME>=VERSION")
    return f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    with (ROOT / "pyproject.toml").open("rb") as file:
        print(*map(lowest, tomllib.load(file)["project"]["dependencies"]), sep="\n")
