"""``hapi-server`` under wrong use: one line, the right exit code, never a traceback."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from support.forked import ForkedProcess
from support.harness import environment, run, server
from support.http_tools import exchange

from hapi.cli import server as command
from hapi.config.fields import SettingField, every_field, flag_of, members, variable_of
from hapi.config.settings import load, overrides_of
from hapi.server.settings import ServerSettings

pytestmark = pytest.mark.usefixtures("logging_as_before")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, the one line on stderr) of a server that does not start."""
    try:
        code = command.main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("hapi-server: error: ")
    return code, captured.err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--port", "70000"], "--port: expected a number from 0 to 65535, got '70000'"),
        (["--port", "http"], "--port: expected an integer from 0 to 65535, got 'http'"),
        (["--port", "9" * 5000], "--port"),
        (["--threads", "0"], "--threads: expected a number from 1 to 1024, got '0'"),
        (["--cos-batch", "-3"], "--cos-batch"),
        (["--max-queued", "1e7"], "--max-queued"),
        (["--model-cache", "4 elephants"], "elephants"),
        (["--drain-seconds", "nan"], "--drain-seconds: expected a number from 0 to 86400, got 'nan'"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--max-layer-bytes", "0"], "--max-layer-bytes: expected a number from 1 to"),
        (["--max-model-bytes", "8G"], "ambiguous"),
        (["--max-frame-bytes=-1MiB"], "negative"),
        (["--max-response-bytes", "lots"], "--max-response-bytes"),
        (["--max-request-seconds", "0"], "--max-request-seconds: expected a number from 0.001 to 86400"),
        (["--max-request-seconds", "nan"], "expected a number from 0.001 to 86400, got 'nan'"),
        (["--send-timeout", "inf"], "expected a number from 0.001 to 86400, got 'inf'"),
        (["--log-level", "loud"], "--log-level"),
        (["--device", "tpu"], "expected auto, cpu, cuda"),
        (["--host", "0.0.0.0"], "give a token"),
        (["--host", "not a host"], "give a token"),
        (["--tls-cert", "x.pem"], "belong together"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "x.pem"),
        (["--token-file", "/nowhere"], "--token-file /nowhere: cannot be read: No such file"),
        (["nothing.yaml"], "nothing.yaml: cannot read the settings file: No such file"),
        (["nothing.yaml", "surplus"], "unknown argument surplus"),
        (
            ["--cos-batch", "4", "--batching", "auto"],
            "--cos-batch: is the fixed COS batch, so --batching has no effect",
        ),
        (["--decode-processes", "-1"], "--decode-processes: expected a number from 0 to 256"),
    ],
)
def test_wrong_use(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    match: str,
) -> None:
    monkeypatch.delenv("HAPI_TOKEN", raising=False)
    code, line = refused(capsys, "--store", str(tmp_path), *arguments)
    assert code == 2 and match in line
    assert len(line) < 6000


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without flags a server runs with the settings' own defaults; each flag changes its own."""
    started: list[ServerSettings] = []

    def note(settings: ServerSettings) -> int:
        started.append(settings)
        return 0

    monkeypatch.setattr("hapi.server.lifecycle.run.run_server", note)
    limits: dict[str, tuple[str, Any]] = {
        "max_model_bytes": ("3GiB", 3 << 30),
        "max_layer_bytes": ("5MiB", 5 << 20),
        "max_frame_bytes": ("7MB", 7_000_000),
        "max_response_bytes": ("123", 123),
        "max_request_seconds": ("1.5", 1.5),
        "send_timeout": ("0.25", 0.25),
        "slow_reader_rate": ("0", 0),
        "slow_reader_seconds": ("12", 12.0),
        "drain_seconds": ("0", 0.0),
        "decode_processes": ("3", 3),
        "max_queued": ("1k", 1000),
        "model_cache": ("1GiB", 1 << 30),
        "device": ("cpu,cpu", "cpu,cpu"),
        "port": ("0", 0),
        "log_level": ("warning", "warning"),
    }
    flags = [f"--{name.replace('_', '-')}={text}" for name, (text, _) in limits.items()]
    assert command.main(["--store", str(tmp_path)]) == 0
    assert command.main(["--store", str(tmp_path), *flags]) == 0
    for name, (text, _) in limits.items():
        monkeypatch.setenv(f"HAPI_SERVER_{name.upper()}", text)
    assert command.main(["--store", str(tmp_path)]) == 0
    file = tmp_path / "server.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, (text, _) in limits.items()))
    for name in limits:
        monkeypatch.delenv(f"HAPI_SERVER_{name.upper()}")
    assert command.main([str(file), "--store", str(tmp_path)]) == 0
    plain = ServerSettings(store=str(tmp_path))
    changed = replace(plain, **{name: value for name, (_, value) in limits.items()})
    assert started == [plain, changed, changed, changed]


def test_flags_win_over_the_environment_and_it_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[ServerSettings] = []
    monkeypatch.setattr("hapi.server.lifecycle.run.run_server", lambda s: started.append(s) or 0)
    file = tmp_path / "server.yaml"
    file.write_text("store: from-file\nmax_queued: 1\nmax_running: 1\nthreads: 1\nmodel_reuse: no\n")
    monkeypatch.setenv("HAPI_STORE", "from-environment")
    monkeypatch.setenv("HAPI_SERVER_MAX_QUEUED", "2")
    monkeypatch.setenv("HAPI_SERVER_MAX_RUNNING", "2")
    monkeypatch.setenv("HAPI_SERVER_PORT", "tcp://10.0.0.1:8099")  # as Kubernetes links a service hapi-server
    assert command.main([str(file), "--max-running", "3", "--allow-model", "a:b", "--allow-model", "c"]) == 0
    (found,) = started
    assert (found.store, found.threads, found.max_queued, found.max_running) == ("from-environment", 1, 2, 3)
    assert (found.port, found.model_reuse, found.allow_model) == (8099, False, ("a:b", "c"))


def three(field: SettingField) -> list[str]:
    """Three texts for a setting, two where it has no more; none of them its default."""
    kinds = [kind for kind in members(field.annotation) if kind is not type(None)]
    if bool in kinds:
        return ["yes", "no"]
    choices = [text for kind in kinds if get_origin(kind) is Literal for text in get_args(kind)]
    if choices:
        return [text for text in choices if text != field.default][:3]
    if int in kinds or float in kinds:
        least = math.ceil(field.rule.low or 0) + 1
        numbers = [str(least + n) for n in range(4)]
        return [text for text in numbers if float(text) != field.default][:3]
    return ["a", "b", "c"]


@pytest.mark.parametrize("field", every_field(ServerSettings), ids=lambda field: str(field.name))
def test_each_setting_has_its_place_in_file_environment_and_flags(
    field: SettingField, tmp_path: Path
) -> None:
    """A flag wins over the variable, which wins over the file, whatever the setting."""
    name, texts, file = field.name, three(field), tmp_path / "server.yaml"
    variable = variable_of(field, command.VARIABLES)

    def value(in_file: str, in_environment: str = "", flag: str = "") -> Any:
        listed = "tuple" in str(field.annotation)
        file.write_text(
            f"store: s\n{name}: {[in_file] if listed else in_file}\n"
            if name != "store"
            else f"store: {in_file}"
        )
        switch = {"yes": flag_of(name), "no": flag_of(f"no_{name}")}.get(flag, f"{flag_of(name)}={flag}")
        args = command.parser().parse_args([str(file), *([switch] if flag else [])])
        overrides = overrides_of(args, ServerSettings)
        environ = {variable: in_environment} if in_environment else {}
        return getattr(load(ServerSettings, file, overrides, environ, command.VARIABLES).value, name)

    alone = {text: value(text) for text in texts}
    assert len(set(map(str, alone.values()))) == len(texts)
    for first, second in itertools.permutations(texts, 2):
        assert value(first, second) == alone[second], variable
        assert value(first, first, second) == value(first, second, second) == alone[second]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max_queue: 4", "server.yaml:1:1: unknown key 'max_queue'; did you mean 'max_queued'?"),
        ("max-queued: 4", "server.yaml:1:1: unknown key 'max-queued'; did you mean 'max_queued'?"),
        ("threads: 0", "server.yaml:1:10: threads: expected a number from 1 to 1024, got '0'"),
        (
            "host: 0.0.0.0\nthreads: 1",
            "server.yaml:1:7: host 0.0.0.0 is reachable from other machines: give a token",
        ),
        ("tls_cert: x.pem", "belong together"),
    ],
)
def test_a_wrong_file_names_the_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, line: str
) -> None:
    monkeypatch.delenv("HAPI_TOKEN", raising=False)
    file = tmp_path / "server.yaml"
    file.write_text(text)
    code, found = refused(capsys, str(file), "--store", str(tmp_path))
    assert code == 2 and line in found


def test_a_wrong_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HAPI_SERVER_MAX_QUEUED", "many")
    code, line = refused(capsys, "--store", str(tmp_path))
    assert code == 2 and "HAPI_SERVER_MAX_QUEUED: expected an integer from 0 to 1048576, got 'many'" in line
    monkeypatch.delenv("HAPI_SERVER_MAX_QUEUED")
    monkeypatch.delenv("HAPI_STORE", raising=False)
    code, line = refused(capsys)
    assert code == 2 and "'store' is missing; set it in the file or with --store or HAPI_STORE" in line


def test_a_variable_of_no_setting_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hapi.server.lifecycle.run.run_server", lambda *args, **more: 0)
    for name in ("MAX_QUEUD", "STORE", "VISION_SERVICE_HOST", "PORT_8099_TCP_ADDR", "SERVICE_PORT_HTTP"):
        monkeypatch.setenv(f"HAPI_SERVER_{name}", "1")
    assert command.main(["--store", str(tmp_path)]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("HAPI_SERVER_MAX_QUEUD in the environment is no setting, and is not read; "
                          "did you mean HAPI_SERVER_MAX_QUEUED?")  # fmt: skip
    assert second.endswith("did you mean HAPI_STORE?")


def test_allowed_factories_are_found_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hapi.server.lifecycle.run.run_server", lambda *args, **more: 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert command.main(["--store", "."]) == 0 and str(tmp_path) not in sys.path
    assert command.main(["--store", ".", "--allow-model", "mynet"]) == 0 and sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "one token"), (b"two words", "one token"), (b"\xff\xfe", "one token"), (b"x" * 5000, "one token")],
)
def test_token_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    code, line = refused(capsys, "--store", str(tmp_path), "--token-file", str(path))
    assert code == 2 and match in line


@pytest.mark.parametrize("token", ["a b", "line\nbreak", "ümlaut"])
def test_tokens_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    monkeypatch.setenv("HAPI_TOKEN", token)
    code, line = refused(capsys, "--store", str(tmp_path))
    assert code == 2 and line.startswith("hapi-server: error: HAPI_TOKEN: expected one token")
    assert token not in line


@pytest.mark.parametrize(
    ("store", "code"), [("", 2), ("ftp://x", 2), ("{}/nothing", 1), ("{}/file", 1), ("s3://", 2)]
)
def test_stores_that_are_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str, code: int
) -> None:
    monkeypatch.delenv("HAPI_STORE", raising=False)
    (tmp_path / "file").write_text("x")
    found, line = refused(capsys, "--store", store.format(tmp_path), "--port", "0")
    assert found == code, line


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = ForkedProcess(
            ["hapi.cli.server", "--store", str(tmp_path), "--port", port], stderr=subprocess.PIPE
        )
        _, errors = process.communicate()
    assert process.wait() == 2 and f"cannot listen on 127.0.0.1:{port}" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_server_runs_by_its_file_the_environment_and_flags(tmp_path: Path) -> None:
    tenants, file, store = tmp_path / "tenants.yaml", tmp_path / "server.yaml", tmp_path / "store"
    store.mkdir()
    tenants.write_text("vision: {token: vision-secret}\n")
    file.write_text(f"tenants: {tenants}\nlame_duck: 0.25s\nmax_queued: 7\nmax_running: 1\nthreads: 2\n")
    environment = {"HAPI_SERVER_MAX_QUEUED": "8", "HAPI_SERVER_MAX_RUNNING": "2"}
    with server(store, "--config", str(file), "--max-running", "3", **environment) as running:
        headers = {"Authorization": "Bearer vision-secret"}
        settings = exchange(running.port, "GET", "/v1/status", headers=headers).json()["settings"]
        assert exchange(running.port, "GET", "/v1/status").status == 401
        assert running.stop() == 0
    names = ("lame_duck", "max_queued", "max_running", "threads")  # the harness gives --threads 1
    assert [settings[name] for name in names] == [0.25, 8, 3, 1]


@contextlib.contextmanager
def ended_with_stdin(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that listens, and whose standard input is open; it ends within the block."""
    command = [sys.executable, "-m", "hapi.cli.server", "--store", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--exit-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
        yield process
        assert process.wait(240) == 0
        said = process.stderr.read()
        assert "Traceback" not in said and "Fatal" not in said


@pytest.mark.slow
def test_ctrl_c_and_a_closed_stdin(tmp_path: Path) -> None:
    with server(tmp_path, log=tmp_path.parent / "log") as running:
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(240) == 0
    with ended_with_stdin(tmp_path) as process:
        process.stdin.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_signal_while_stdin_is_open(tmp_path: Path) -> None:
    """A thread waits for the end of stdin then; it must not be in the way of the interpreter's."""
    with ended_with_stdin(tmp_path) as process:
        process.stdin.write("words that mean nothing\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        process.terminate()


@pytest.mark.slow
def test_started_with_stdin_closed(tmp_path: Path) -> None:
    """There is nobody to wait for then."""
    script = f"exec {sys.executable} -m hapi.cli.server --store {tmp_path} --port 0 --exit-with-stdin <&-"
    done = run(["bash", "-c", script], 2, 60, {})
    assert done.stderr == "hapi-server: error: --exit-with-stdin: standard input is closed already\n"
