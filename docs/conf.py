"""Sphinx makes a site of the README and docs/, from the checkout's root: ``scripts/docs`` calls it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from sphinx.application import Sphinx

import hapi

project = "Hapi"
author = "the Hapi authors"
release = version = hapi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "deploy/README.md", "deploy/prometheus/README.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "hapi", "tests", "benchmarks", "scripts", "configs", "examples"]

html_theme = "furo"
html_title = f"Hapi {release}"
html_copy_source = False
highlight_language = "none"

myst_heading_anchors = 4
napoleon_numpy_docstring = False
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__"}  # a dataclass's fields say the same
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # without it os.environ's content stands in a signature
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# References in docstrings must lead to a page of the site; types in signatures need not.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", ".*")]

CONTENTS = {
    root_doc: """
```{toctree}
:hidden:
:caption: Use

docs/training
docs/models
docs/operations
docs/caching
docs/offload
deploy/README
deploy/prometheus/README
docs/reports
```
```{toctree}
:hidden:
:caption: Reference

docs/protocol
docs/api
docs/glossary
```
```{toctree}
:hidden:
:caption: Inside

docs/architecture
docs/decisions/README
docs/measurements/README
docs/contributing
CHANGELOG
```
""",
    "docs/decisions/README": """
```{toctree}
:glob:

[0-9]*
```
""",
    "docs/measurements/README": """
```{toctree}
:hidden:
:glob:

[!R]*
```
""",
}
"""Page to the order of the pages below it, for the menu; here, so that the pages stay plain Markdown elsewhere."""


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append a page's part of the menu."""
    source[0] += CONTENTS.get(page, "")


def describe_settings(
    app: Sphinx, what: str, name: str, thing: type, options: object, lines: list[str]
) -> None:
    """Add the settings of a class with what ``--help`` says of them."""
    for field in dataclasses.fields(thing) if what == "class" and dataclasses.is_dataclass(thing) else ():
        if "hapi" in field.metadata:
            plain = field.default not in (None, dataclasses.MISSING)
            default = f" (default: ``{field.default!r}``)" if plain else ""
            lines.append(f":param {field.name}: {field.metadata['hapi'].help}{default}")


def restore_colon(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Put an attribute's description together again: napoleon takes what stands before a colon for its type."""
    while lines and not lines[-1]:
        lines.pop()
    if what == "attribute" and lines and lines[-1].startswith(":type: "):
        lines[0] = f"{lines.pop().removeprefix(':type: ')}: {lines[0]}"


def copy_front_page(app: Sphinx, failure: Exception | None) -> None:
    """Make the README what a browser opens first."""
    if failure is None:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    """Connect the functions above; Sphinx calls this."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", describe_settings)
    app.connect("autodoc-process-docstring", restore_colon, priority=900)  # after napoleon
    app.connect("build-finished", copy_front_page)
