"""Style sheet of the report: light and dark by the reader's setting, one column, prints on white."""

from __future__ import annotations

from collections.abc import Mapping

from hapi.figures.canvas import COLOURS

_DARK: Mapping[str, str] = {
    "server": "#6b9fe8",
    "network": "#f0a64a",
    "client": "#58b886",
    "stall": "#737b88",
    "chosen": "#ef78b4",
    "ink": "#e8ebf0",
    "muted": "#a3adbb",
    "rule": "#353c48",
    "paper": "#1a1f27",
}


def _variables(colours: Mapping[str, str], back: str) -> str:
    return " ".join(f"--{role}: {colour};" for role, colour in {**colours, "back": back}.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(COLOURS, "#f3f4f6")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, "#11151b")} }} }}
"""
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 8px; }
h3 { font-size: .95rem; margin: 20px 0 6px; }
p { margin: 0 0 10px; max-width: 75ch; overflow-wrap: anywhere; }
.sub { color: var(--muted); margin-bottom: 16px; }
.lead { font-size: 1.06rem; }
.lead strong { color: var(--chosen); }
section { background: var(--paper); border: 1px solid var(--rule); border-radius: 8px;
  padding: 18px 20px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(110px, 22%), 1fr)); gap: 12px;
  margin: 14px 0 0; }
.tiles div { border-left: 3px solid var(--rule); padding: 0 0 0 10px; min-width: 0; }
.tiles dt { color: var(--muted); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--server); }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; min-width: 640px; }
figure.wide svg { min-width: 1000px; }
figcaption { color: var(--muted); font-size: .85rem; margin: 6px 0 10px; max-width: 85ch; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
table.full { min-width: 100%; }
caption { text-align: left; color: var(--muted); padding: 8px 0 4px; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--muted); border-bottom: 2px solid var(--rule); }
th.l, td.l { text-align: left; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 16ch; }
tr.chosen { background: color-mix(in srgb, var(--chosen) 13%, transparent); font-weight: 600; }
tr.unfit td, tr.unfit th { color: var(--muted); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 0 28px; }
@media (max-width: 500px) { section { padding: 14px 12px; } main { padding: 16px 8px 32px; } }
@media print {
"""
    f"  :root {{ color-scheme: light; {_variables(COLOURS, '#ffffff')} }}"
    """
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  section { border: none; padding: 6px 0; } figure, tr { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .scroll { overflow: visible; } figure svg, figure.wide svg { min-width: 0; }
  th, td { padding: 2px 5px; font-size: 8pt; white-space: normal; }
}
"""
)
