"""The configurations of nginx and HAProxy: what they say fits the server, and the programs take them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.balancers import HAPROXY, KINDS, NGINX, command_of, program

from hapi.server.http.web_server import KEEP_ALIVE_SECONDS
from hapi.server.settings import ServerSettings
from hapi.wire import messages

DEFAULTS = ServerSettings(store="x")


def values(text: str, name: str) -> list[str]:
    """What the lines of this directive say, comments left out."""
    bare = re.sub(r"#.*", "", text)
    return [found.strip() for found in re.findall(rf"^\s*{name}\s+([^;\n]*)", bare, re.MULTILINE)]


def seconds(text: str) -> float:
    assert text.endswith("s") and text[:-1].isdigit(), text
    return float(text[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_takes_its_configuration(kind: str, tmp_path: Path) -> None:
    if program(kind) is None:
        pytest.skip(f"no {kind} here")
    command = command_of(kind, tmp_path, 18099, [18101, 18102], check=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "warn" not in said.lower(), said


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_it_is_found(kind: str, tmp_path: Path) -> None:
    """The check itself."""
    if program(kind) is None:
        pytest.skip(f"no {kind} here")
    command = command_of(kind, tmp_path, 18099, [18101, 18102], check=True)
    written = tmp_path / (NGINX if kind == "nginx" else HAPROXY).name
    wrong = (
        written.read_text()
        .replace("proxy_buffering off", "proxy_buffering of")
        .replace("mode http", "mode htp")
    )
    written.write_text(wrong)
    assert subprocess.run(command, capture_output=True, timeout=240, check=False).returncode != 0


def test_timeouts_are_above_the_servers() -> None:
    nginx, haproxy = NGINX.read_text(), HAPROXY.read_text()
    silent = [
        value
        for name in ("proxy_read_timeout", "proxy_send_timeout", "send_timeout")
        for value in values(nginx, name)
    ]
    silent += [*values(haproxy, "timeout client"), *values(haproxy, "timeout server")]
    assert len(silent) == 5
    assert all(seconds(value) >= DEFAULTS.max_request_seconds + 30 for value in silent)
    idle = [*values(nginx, "keepalive_timeout"), *values(haproxy, "timeout http-keep-alive")]
    assert len(idle) == 2 and all(seconds(value) < KEEP_ALIVE_SECONDS for value in idle)


def test_a_request_fits_and_touches_no_disk() -> None:
    nginx = NGINX.read_text()
    for name in ("client_max_body_size", "client_body_buffer_size"):
        assert values(nginx, name) == [f"{messages.MAX_REQUEST_BYTES >> 20}m"]
    assert values(nginx, "proxy_buffering") == ["off"]


def test_little_of_an_answer_waits_in_a_balancer() -> None:
    """So that a reader at the least allowed rate per client of a slow link is seen to move within the window."""
    held = int(values(HAPROXY.read_text(), "tune.sndbuf.client")[0])
    assert f"sndbuf={held >> 10}k" in values(NGINX.read_text(), "listen")[0]
    shared_link = 12_500  # bytes a second of each of ten requests that share 1 Mbit/s
    assert held / shared_link < DEFAULTS.slow_reader_seconds


def test_health_is_asked_where_servers_tell_it() -> None:
    haproxy = HAPROXY.read_text()
    assert values(haproxy, "option httpchk") == [f"GET {messages.READY_PATH}"]
    for text in (NGINX.read_text(), haproxy):
        assert messages.METRICS_PATH in text and messages.STATUS_PATH in text
