"""The container file: its steps run in a clean root, where a server starts that is not root and answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.clean_root import instructions, prepare, started
from support.http_tools import exchange, make_store

from hapi.cli.server import parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
CONTAINER = FOLDER / "Containerfile"
TOKEN = "a-token-of-the-test"


def test_the_context_is_what_is_copied() -> None:
    """Nothing else of the tree is sent to the daemon, least of all an environment of gigabytes."""
    first, *passed = (FOLDER / "Containerfile.dockerignore").read_text().splitlines()
    copied = {
        word for name, words in instructions(CONTAINER) if name == "COPY" for word in words.split()[:-1]
    }
    assert first == "*" and {line.removeprefix("!") for line in passed if line.startswith("!")} == copied


def test_every_variable_of_a_step_is_known() -> None:
    known = {
        word.split("=")[0] for name, words in instructions(CONTAINER) if name == "ARG" for word in [words]
    }
    used = {part.split('"')[0] for name, words in instructions(CONTAINER) if name == "RUN"
            for part in words.split("$")[1:]}  # fmt: skip
    assert used <= known


@pytest.mark.slow
def test_the_entry_point_is_a_command_with_these_flags(capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = json.loads(dict(instructions(CONTAINER))["ENTRYPOINT"])
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*arguments, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {program} ")


def builder() -> str | None:
    """A program here that builds images, and whose daemon, if it needs one, answers."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], capture_output=True, check=False).returncode
        ):
            return name
    return None


@pytest.mark.long
@pytest.mark.skipif(builder() is None, reason="no docker or podman here that could build")
def test_an_image_is_built() -> None:
    program = builder() or ""
    subprocess.run([program, "build", "-f", str(CONTAINER), "-t", "hapi-server-test", str(ROOT)], check=True)
    command = [program, "run", "--rm", "hapi-server-test", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage: hapi-server ")


def may_mount() -> bool:
    """Whether this user may make a root."""
    return not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not may_mount(), reason="needs the right to mount")
def test_the_steps_make_a_server_that_answers(tmp_path: Path) -> None:
    image = prepare(tmp_path / "root", ROOT)
    for name, words in instructions(CONTAINER):
        image.take(name, words, ROOT)
    store = make_store(tmp_path / "root" / "store")
    for path in (store, *store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        started(image, ["--store", "/store", "--port", "0"], {"HAPI_TOKEN": TOKEN}),
        stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("listening on http://0.0.0.0:"), (tmp_path / "log").read_text()[-2000:]
        port = int(line.rsplit(":", 1)[1])
        assert exchange(port, "GET", "/readyz").status == 200
        assert exchange(port, "GET", "/v1/datasets").status == 401
        asked = exchange(port, "GET", "/v1/datasets", headers={"Authorization": f"Bearer {TOKEN}"})
        assert [one["name"] for one in asked.json()["datasets"]] == ["digits"]
        owners = (Path("/proc") / str(server.pid) / "status").read_text().split("Uid:")[1].split()[:4]
        assert owners == [image.user] * 4 != ["0"] * 4
        own = [word.replace(":8099/", f":{port}/") for word in image.health]
        assert subprocess.run([sys.executable, *own[1:]], check=False).returncode == 0
        server.terminate()
        assert server.wait(240) == 0, "SIGTERM drains it"
    finally:
        server.kill()
        server.wait()
        log.close()
