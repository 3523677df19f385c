"""The HTML report in a real browser: it renders, says nothing on the console, and fits narrow and wide pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.browser_tools import contrast
from support.report_tools import KEPT

from hapi.figures.html import page
from hapi.figures.reading import Run

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SHOTS = os.environ.get("HAPI_SCREENSHOTS")
"""A folder to keep the screenshots in, to be looked at."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BROWSER, reason="no Chromium here: apt-get install chromium (scripts/test does, as root)"
    ),
]

PROBE = """<script>
const errors = []; console.error = console.warn = (...what) => errors.push(what.join(" "));
addEventListener("error", event => errors.push(String(event.message)), true);
addEventListener("load", () => {
  const width = document.documentElement.clientWidth, framed = e => e.closest(".scroll, svg");
  const found = {
    width, scrolled: document.documentElement.scrollWidth, errors,
    svgs: [...document.querySelectorAll("svg")].map(e => {
      const b = e.getBoundingClientRect(); return [b.width, b.height, e.querySelectorAll("path").length]; }),
    outside: [...document.querySelectorAll("main *")].filter(e => !framed(e) || e.matches(".scroll"))
      .filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.tagName + "." + e.className),
    ink: getComputedStyle(document.body).color, back: getComputedStyle(document.body).backgroundColor,
    bar: getComputedStyle([...document.querySelectorAll("#stages-figure_1 path")]
      .find(e => (e.getAttribute("style") || "").includes("--server"))).fill,
  };
  const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def browse(tmp_path: Path, *flags: str) -> str:
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--enable-logging=stderr", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, [x for x in done.stderr.splitlines() if "CONSOLE" in x]
    return done.stdout


def probed(tmp_path: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the browser itself says of the page at ``width`` CSS pixels.

    Its own window is not narrower than about 500 pixels, so the page stands in a frame of that width.
    """
    inner = tmp_path / "report.html"
    inner.write_text(page(Run.from_json(KEPT)).replace("<style>", PROBE + "<style>", 1), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<!doctype html><iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
        '<pre id="found"></pre><script>document.getElementById("f").onload = () => setTimeout(() => {'
        'document.getElementById("found").textContent = '
        'document.getElementById("f").contentDocument.getElementById("probe").textContent; }, 50)</script>',
        encoding="utf-8",
    )
    flags = (f"--window-size={width + 40},1000", "--allow-file-access-from-files", *flags)
    dom = browse(tmp_path, *flags, "--dump-dom", outer.as_uri())
    match = re.search(r'<pre id="found">(\{.*?\})</pre>', dom, re.DOTALL)
    assert match is not None, dom[-1000:]
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_renders_and_fits(tmp_path: Path, width: int) -> None:
    found = probed(tmp_path, width)
    assert found["errors"] == []
    assert found["width"] == width and found["scrolled"] <= width
    assert found["outside"] == []
    assert len(found["svgs"]) == 5
    for wide, high, paths in found["svgs"]:
        assert wide >= 300 and high >= 100 and paths >= 10


def test_light_and_dark_have_their_own_colours_and_contrast(tmp_path: Path) -> None:
    light = probed(tmp_path, 1280, "--blink-settings=preferredColorScheme=1")
    dark = probed(tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert light["bar"] == "rgb(59, 111, 181)" and dark["bar"] == "rgb(107, 159, 232)"
    for found in (light, dark):
        assert contrast(found["ink"], found["back"]) >= 7.0  # WCAG 2.2, 1.4.6


def test_a_screenshot_is_more_than_an_empty_page(tmp_path: Path) -> None:
    source = tmp_path / "report.html"
    source.write_text(page(Run.from_json(KEPT)), encoding="utf-8")
    shot = Path(SHOTS or tmp_path) / "report.png"
    browse(tmp_path, "--window-size=1280,1500", f"--screenshot={shot}", source.as_uri())
    content = shot.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (1280, 1500)
    assert len(content) > 60_000
