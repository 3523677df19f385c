"""The live page of a real server process with work under way, in a real browser.

``HAPI_SCREENSHOTS`` names a folder to keep the pictures in; docs/status.png is one of them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.browser_tools import BROWSER, Browser, Tab, contrast
from support.harness import ServerProcess, server
from support.http_tools import EXTRACT, Known, exchange, make_store, request_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BROWSER, reason="no Chromium here: apt-get install chromium (scripts/test does, as root)"
    ),
]
TENANTS = {"vision": 2, "lab": 1, "students": 1}
HOSTILE = '<img src=x onerror="document.title=1"><b>&amp;</b>'
OUTSIDE = """(() => { const width = document.documentElement.clientWidth;
  return [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") || e.matches(".scroll"))
    .filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.tagName + "." + e.className); })()"""
COLOURS = """(() => {
  const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
  const pairs = [["body", "body"], ["section", "section"], [".sub", "section"], ["th", "section"], [".sub", "body"]];
  return pairs.map(([ink, back]) => [of(ink, "color"), of(back, "backgroundColor")]); })()"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(make_store(tmp_path_factory.mktemp("store")))


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}-secret"}


@pytest.fixture(scope="module")
def running(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with requests of three tenants: some whose clients read slowly, and more than may run."""
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text("".join(f"{t}: {{token: {t}-secret, weight: {w}}}\n" for t, w in TENANTS.items()))
    limits = (
        "--tenants",
        str(path),
        "--device-memory",
        "32MiB",
        "--cos-batch",
        "16",
        "--max-running",
        "3",
        "--send-timeout",
        "600",
        "--slow-reader-rate",  # else the slow one is dropped after 30 s, in the middle of the tests
        "0",
    )
    with server(known.store.url, *limits) as process, ExitStack() as stack:
        stop = threading.Event()
        threads = [
            threading.Thread(
                target=_busy, args=(process.port, known.extract(list(range(40)) * 8, split=10), tenant, stop)
            )
            for tenant in ("vision", "vision", "lab", "lab")
        ]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join(240) for thread in threads])
        stack.callback(stop.set)
        stack.enter_context(_slow_reader(process.port, known, "students"))
        yield process


def _busy(port: int, document: dict[str, Any], tenant: str, stop: threading.Event) -> None:
    while not stop.is_set():
        exchange(port, "POST", EXTRACT, document, bearer(tenant))


def _slow_reader(port: int, known: Known, tenant: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    body = json.dumps(known.extract([n % 40 for n in range(60_000)], split=10)).encode()
    sock.sendall(request_bytes(EXTRACT, body, X_Request_Id="slow1", **bearer(tenant)))
    sock.settimeout(240)
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield started
    started.close()


def enter(tab: Tab, token: str) -> None:
    """Give the token as a person does."""
    tab.run(
        f"document.getElementById('token').value = {json.dumps(token)}; document.querySelector('#ask button').click()"
    )


def signed_in(tab: Tab) -> None:
    tab.until("!document.getElementById('ask').hidden")
    enter(tab, "lab-secret")
    tab.until("!document.getElementById('data').hidden")


def shots(tmp_path: Path) -> Path:
    return Path(os.environ.get("HAPI_SCREENSHOTS") or tmp_path)


def row(request: str) -> str:
    return f"[...document.querySelectorAll('#running tr')].map(r => r.innerText).find(t => t.startsWith('{request}'))"


def test_a_server_that_goes_and_comes_back(known: Known, browser: Browser) -> None:
    state = "document.getElementById('state').textContent"
    with server(known.store.url) as first, browser.tab(first.url) as tab:
        tab.until(f"{state} === 'Serving.'")  # without a token, as the server wants none
        first.kill()
        tab.until(f"{state}.startsWith('The server does not answer')")
        assert "Trying again" in tab.text("#state") and "cpu" in tab.text("#devices")
        assert tab.run("document.getElementById('data').className") == "stale"
        second = first.restarted()
        try:
            tab.until(f"{state} === 'Serving.'")
            assert tab.run("document.getElementById('data').className") == ""
        finally:
            second.kill()
        assert tab.complaints == []


def test_it_wants_a_token_and_then_shows_what_runs(running: ServerProcess, browser: Browser) -> None:
    with browser.tab(running.url) as tab:
        tab.until("document.getElementById('state').textContent === 'This server wants a token.'")
        assert tab.run("document.getElementById('data').hidden")
        enter(tab, "nobodys-secret")
        tab.until("document.getElementById('state').textContent.startsWith('That token is not one')")
        enter(tab, "lab-secret")
        found = tab.until(f"{row('slow1')}?.endsWith('send') && {row('slow1')}").split("\t")
        assert found[1:8] == ["students", "resnet18", "digits", "10 layer3.1", "cpu", "16", found[7]]
        assert re.fullmatch(r"\d+ of 60000", found[7])
        tab.until("document.querySelectorAll('#running tbody tr').length === 3")
        assert "Serving." in tab.text() and "weights in use" in tab.text("#devices")
        lines = tab.text("#tenants").splitlines()
        assert sorted(line.split("\t")[0] for line in lines[1:]) == sorted(TENANTS)
        assert tab.run(
            "document.getElementById('ask').hidden && document.getElementById('token').value === ''"
        )
        assert tab.run("Object.keys(localStorage).length === 0 && document.cookie === ''")
        served = "[...document.querySelectorAll('#tiles div')].find(e => e.innerText.startsWith('served')).innerText"
        before = tab.run(served)
        tab.until(f"{served} !== {json.dumps(before)}", 60)  # it lives
        tab.call("Page.reload")
        tab.until(row("slow1"))  # the tab still knows the token
        assert tab.complaints == []


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 1000, "light"), (400, 1600, "dark")])
def test_it_fits_and_can_be_read(
    running: ServerProcess, browser: Browser, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    with browser.tab(running.url, width, height, scheme) as tab:
        signed_in(tab)
        tab.until(row("slow1"))
        tab.until("document.querySelectorAll('#running tbody tr').length === 3")
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run(OUTSIDE) == []
        for ink, back in tab.run(COLOURS):
            assert contrast(ink, back) >= 4.5  # WCAG 2.2, 1.4.3
        content = tab.screenshot(shots(tmp_path) / f"status-{width}.png")
        assert struct.unpack(">II", content[16:24]) == (width, height)
        assert len(content) > 30_000
        assert tab.complaints == []


def test_memory_can_be_told_apart_without_colours(running: ServerProcess, browser: Browser) -> None:
    with browser.tab(running.url) as tab:
        signed_in(tab)
        tab.until(row("slow1"))
        parts = tab.run(
            "[...document.querySelectorAll('.bar i')].map(e => [getComputedStyle(e).backgroundImage, e.style.width])"
        )
        assert len({image for image, _ in parts}) == 3  # each has a pattern of its own
        assert all(0 <= float(width.removesuffix("%")) <= 100 for _, width in parts)
        legend = tab.text(".legend")
        for name in ("weights in use", "weights kept for later", "reserved for forward passes"):
            assert re.search(rf"{name} [\d.]+ (B|KiB|MiB)", legend), legend


def test_markup_in_a_name_is_text(running: ServerProcess, browser: Browser, known: Known) -> None:
    with browser.tab(running.url) as tab:
        signed_in(tab)
        answer = exchange(
            running.port, "POST", EXTRACT, known.extract([1]) | {"split_name": HOSTILE}, bearer("lab")
        )
        assert answer.status == 422  # its text names the layer's name as the client has it
        tab.until(f"document.getElementById('errors').innerText.includes({json.dumps(HOSTILE)})")
        status = exchange(running.port, "GET", "/v1/status", headers=bearer("lab")).json()
        # In one go: an answer that is under way would be shown in its place.
        texts = "[...['#running', '#tenants'].map(s => document.querySelector(s).innerText)"
        shown = f"clearTimeout(timer); show({json.dumps(_all_hostile(status))})"
        of_running, of_tenants, marked = tab.run(
            f"{shown}; {texts}, document.querySelectorAll('img, b').length]"
        )
        assert of_running.count(HOSTILE) >= 6 and of_tenants.count(HOSTILE) == 1
        assert marked == 0
        assert tab.run("document.title") == "Hapi server"
        assert tab.complaints == []


def _all_hostile(status: dict[str, Any]) -> dict[str, Any]:
    """Every string of a status replaced by markup, and one request, tenant and error in it."""
    one = {**status["running"][0], "stages": [HOSTILE]} if status["running"] else {}
    shortened = {**status, "running": [one], "tenants": status["tenants"][:1], "errors": status["errors"][:1]}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: replaced(v) for k, v in value.items()}
        if isinstance(value, list):
            return [replaced(v) for v in value]
        return HOSTILE if isinstance(value, str) else value

    found: dict[str, Any] = replaced(shortened)
    return found


def test_it_may_not_be_framed_nor_load_anything(running: ServerProcess, browser: Browser) -> None:
    with browser.tab(running.url) as tab:
        tab.until("!document.getElementById('ask').hidden")
        blocked = """(async () => { const seen = [];
          addEventListener("securitypolicyviolation", e => seen.push(e.effectiveDirective));
          const add = (name, set) => { const e = document.createElement(name); set(e); document.body.append(e); };
          add("script", e => e.textContent = "document.title = 'changed'");
          add("img", e => e.src = location.origin + "/v1");
          add("style", e => e.textContent = "body { display: none }");
          add("iframe", e => e.src = location.href);
          await fetch("http://127.0.0.2:9/").catch(() => 0);
          for (let n = 0; n < 600 && new Set(seen).size < 5; n++) await new Promise(done => setTimeout(done, 50));
          return [...new Set(seen)].sort(); })()"""
        directives = tab.run(blocked)
        assert directives == ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
        assert tab.run("document.title") == "Hapi server"


def test_the_picture_of_the_documents(
    running: ServerProcess, browser: Browser, known: Known, tmp_path: Path
) -> None:
    """docs/status.png: HAPI_SCREENSHOTS=docs pytest tests/integration/test_status_page.py -k picture"""
    exchange(running.port, "POST", EXTRACT, known.extract() | {"split": 99}, bearer("lab"))
    with browser.tab(running.url, 1100, 1010) as tab:
        signed_in(tab)
        tab.until(row("slow1"))
        queued = (
            "Number([...document.querySelectorAll('#tiles div')].find(e => e.innerText.startsWith('waiting'))"
        )
        tab.until(f"{queued}.innerText.match(/\\d+/)[0]) > 0")
        content = tab.screenshot(shots(tmp_path) / "status.png")
    assert struct.unpack(">II", content[16:24]) == (1100, 1010)
    assert len(content) > 40_000
