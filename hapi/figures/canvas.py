"""Drawing surface of all figures: colours, files by their suffix, and SVG that follows a page's colours.

matplotlib is imported only when something is drawn: the import takes longer than most commands run.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hapi.errors import UsageError
from hapi.figures.markup import escaped
from hapi.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

COLOURS: Mapping[str, str] = {
    "server": "#3b6fb5",
    "network": "#e08a1e",
    "client": "#2f8f5b",
    "stall": "#a9adb5",
    "chosen": "#b4236b",
    "ink": "#1d2430",
    "muted": "#5c6675",
    "rule": "#d9dde3",
    "paper": "#fefefe",
}
"""Colours by role, on light paper. Each is used for one role only; a page replaces them by its own variables.
"""

_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 0.7,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # names of layers come from outside, and "$" in them is no formula
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "hatch.linewidth": 0.7,
    "hatch.color": COLOURS["paper"],
    "figure.facecolor": COLOURS["paper"],
    "svg.fonttype": "none",
    "svg.hashsalt": "hapi",
    "pdf.fonttype": 42,
}
_TIGHT: dict[str, Any] = {"handlelength": 1.3, "columnspacing": 1.1, "handletextpad": 0.5, "borderpad": 0.0}
_SPLITS_WITH_NAMES = 40
_LONGEST_NAME = 22


def check_drawing(what: str) -> None:
    """Raise :class:`UsageError` unless figures can be drawn here.

    Args:
        what: name of what needs them, such as a flag, in the error.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{what} needs matplotlib, which is not installed: pip install 'hapi-split[report]'")


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of ``width`` x ``height`` inches, to draw and save inside the block. Needs no
    display.
    """
    check_drawing("a figure")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        yield Figure(figsize=(width, height), layout="constrained")


def check_suffix(path: str, flag: str = "--figure") -> None:
    """Raise :class:`UsageError` naming ``flag`` unless ``path`` has a figure's suffix and can be drawn."""
    check_drawing(flag)
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"{flag} {path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def save(figure: Figure, path: str, flag: str = "--figure") -> None:
    """Write ``figure`` in the format of the suffix, the same bytes for the same content; UsageError on failure."""
    check_suffix(path, flag)
    suffix = Path(path).suffix.lower()
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=dated)
    try:
        Path(path).write_bytes(buffer.getvalue())
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written: {error.strerror or error}") from None


def inline_svg(figure: Figure, prefix: str, title: str) -> str:
    """Return ``figure`` as an ``<svg>`` element in the page's colours.

    Args:
        figure: the drawing.
        prefix: makes its ids unique in the page.
        title: text for screen readers.
    """
    figure.patch.set_alpha(0.0)
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{role})")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text).replace("url(#", f"url(#{prefix}-")
    opening, body = text.split(">", 1)
    opening = re.sub(r' (width|height)="[\d.]+pt"', "", opening)
    return f'{opening} role="img" aria-label="{escaped(title)}"><title>{escaped(title)}</title>{body}'


def name_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Label positions 0, 1, ... with number and name; with many, only as many as can be read."""
    step = max(1, -(-len(names) // _SPLITS_WITH_NAMES))
    positions = range(0, len(names), step)
    axes.set_xticks(
        list(positions), [f"{_short(names[i])} {i}".strip() for i in positions], rotation=90, fontsize=7.5
    )
    axes.set_xlim(-0.7, len(names) - 0.3)


def seconds_axis(axes: Axes) -> None:
    """Label the axis with seconds in a person's units."""
    axes.yaxis.set_major_formatter(lambda value, _: format_duration(value) if value > 0 else "0")


def legend(axes: Axes, marks: bool = False) -> None:
    """Place the legend above the panel, right of its title, where no bar can be; ``marks`` adds those of
    split and freeze.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, _ = axes.get_legend_handles_labels()
    if marks:
        handles.append(Patch(facecolor=COLOURS["chosen"], alpha=0.3, label="split"))
        handles.append(Line2D([], [], color=COLOURS["chosen"], linewidth=1.2, linestyle=":", label="freeze"))
    if handles:
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=len(handles), **_TIGHT
        )


def _short(name: str) -> str:
    """A layer's name that leaves room for the figure; its end tells layers of one block apart."""
    printable = "".join(c if c.isprintable() else "?" for c in name)
    return printable if len(printable) <= _LONGEST_NAME else "…" + printable[1 - _LONGEST_NAME :]
