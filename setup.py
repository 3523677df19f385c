"""The computed part of the package's metadata: its description, made from README.md.

Everything else is in pyproject.toml. Where ``[project.urls]`` names a ``Source``, the README's relative links become
links to the files of this version there. Without it they become plain text, so that no page shows a link that leads
nowhere; the files themselves are in the source distribution.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(
    r"^```.*?^```$|(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)", re.DOTALL | re.MULTILINE
)
"""A block of code, which stays as it is, or a relative link."""


def description(readme: str, project: dict[str, Any]) -> str:
    """Return the text of ``readme`` without relative links.

    Args:
        readme: Markdown.
        project: the table ``[project]`` of pyproject.toml.
    """
    source = project.get("urls", {}).get("Source")

    def absolute(found: re.Match[str]) -> str:
        """One link for readers elsewhere."""
        image, text, target = found.groups()
        if target is None:
            return found[0]
        if source is None:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({source.rstrip('/')}/{kind}/v{project['version']}/{target})"

    return _LINK.sub(absolute, readme)


if __name__ == "__main__":
    with (ROOT / "pyproject.toml").open("rb") as file:
        facts = tomllib.load(file)["project"]
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), facts),
        long_description_content_type="text/markdown",
    )
