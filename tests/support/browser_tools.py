"""A real Chromium, steered over its DevTools protocol: a page that lives cannot be looked at with one dump."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from support.waiting import PATIENCE

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Tab:
    """One page. Calls wait for their answers; what the page complains of meanwhile is kept."""

    def __init__(self, address: str) -> None:
        self.complaints: list[str] = []
        """Exceptions, and errors and warnings on the console, those about failed requests left out."""
        self._number = 0
        self._loop = asyncio.new_event_loop()
        self._session, self._socket = self._loop.run_until_complete(self._open(address))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    async def _open(self, address: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        return session, await session.ws_connect(address, max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of one command."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), PATIENCE))

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._event(message.get("method", ""), message.get("params", {}))

    def _event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["source"] != "network":
            self.complaints.append(parameters["entry"]["text"][:500])

    def run(self, script: str) -> Any:
        """The JSON value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script[:200]}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> Any:
        """Poll until an expression is true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                raise AssertionError(f"{script} did not come true; the page: {self.text()[:2000]}")
            time.sleep(0.1)
        return value

    def text(self, of: str = "body") -> str:
        """What is to be read in an element."""
        found: str = self.run(f"document.querySelector({json.dumps(of)}).innerText")
        return found

    def window(self, width: int, height: int, *, scheme: str = "light") -> None:
        """The size in CSS pixels, and the reader's preference for light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> bytes:
        """A PNG of the window, written to ``path``."""
        content = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(content)
        return content

    def close(self) -> None:
        """Leave the page."""

        async def end() -> None:
            await self._socket.close()
            await self._session.close()

        self._loop.run_until_complete(end())
        self._loop.close()


class Browser:
    """One process; every tab has a storage of its own origin and session."""

    def __init__(self, folder: Path) -> None:
        command = [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run", "about:blank",
        ]  # fmt: skip
        with (folder.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        port = folder / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE
        while not (port.exists() and len(port.read_text().split()) == 2):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(
                    "the browser did not start: " + (folder.parent / "browser.log").read_text()
                )
            time.sleep(0.05)
        self._address = f"http://127.0.0.1:{port.read_text().split()[0]}"

    @contextmanager
    def tab(self, url: str, width: int = 1280, height: int = 1000, scheme: str = "light") -> Iterator[Tab]:
        """A new tab at ``url``."""
        request = urllib.request.Request(f"{self._address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=240) as answer:
            found = json.load(answer)
        tab = Tab(found["webSocketDebuggerUrl"])
        try:
            tab.window(width, height, scheme=scheme)
            tab.call("Page.navigate", url=url)
            tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield tab
        finally:
            tab.close()
            urllib.request.urlopen(f"{self._address}/json/close/{found['id']}", timeout=240).close()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two ``rgb()`` colours (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        parts = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
