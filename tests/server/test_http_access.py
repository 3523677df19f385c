"""Who may ask, and which servers must not start."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from support.http_tools import EXTRACT, Known, check_problem, exchange, raw, request_bytes, served

from hapi.cli.server import main
from hapi.server.lifecycle.credentials import check_exposure
from hapi.server.settings import ListenSettings
from hapi.server.tenants.by_token import Tenants

WRONG_TOKENS = [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bear a-long-secret", "Basic a-long-secret",
                "Bearer a-long-secret ü", "Bearer " + "a" * 5000, "Bearer a-long-secre",
                "Bearer a-long-secret2"]  # fmt: skip


def test_tokens(folder: Path) -> None:
    known = Known(folder)
    with served(folder, token="a-long-secret") as server:
        for given in WRONG_TOKENS:
            headers = {} if given is None else {"Authorization": given}
            for path in (EXTRACT, "/v1/datasets", "/metrics", "/v1", "/nosuch"):
                document = known.extract() if path == EXTRACT else None
                answer = exchange(server.port, "POST" if document else "GET", path, document, headers)
                check_problem(answer, 401, "--token-file")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        odd = (
            request_bytes("/v1", b"", "GET", Connection="close")[:-2]
            + b"Authorization: Bearer \xff\xfe\x80\r\n\r\n"
        )
        assert raw(server.port, odd).startswith(b"HTTP/1.1 401 ")
        assert exchange(server.port, "GET", "/healthz").status == 200
        assert exchange(server.port, "GET", "/readyz").status == 200
        for scheme in ("bearer", "BEARER", "Bearer "):
            good = {"Authorization": f"{scheme} a-long-secret"}
            assert exchange(server.port, "GET", "/v1", headers=good).status == 200
        known.check_features(
            exchange(server.port, "POST", EXTRACT, known.extract(), good).body, [3, 39, 0, 17]
        )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, the key under a password, and an empty file."""
    made = tmp_path_factory.mktemp("keys")
    try:
        for command in (
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem",
            "openssl rsa -aes256 -passout pass:secret -in key.pem -out locked.pem",
        ):
            subprocess.run(command.split(), check=True, capture_output=True, cwd=made)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no openssl to make a certificate: {error}")
    (made / "empty").touch()
    (made / "short").write_text("1234567\n")
    return made


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(
    ("code", "word", "arguments"),
    [
        (1, "no folder", "--store KEYS/nothing"),
        (2, "nosuch", "--store nosuch://x"),
        (2, "token", "--store STORE --host 0.0.0.0"),
        (2, "token", "--store STORE --host ::"),
        (2, "token", "--store STORE --host example.org"),
        (2, "--tls-key", "--store STORE --tls-cert KEYS/cert.pem"),
        (2, "--tls-key", "--store STORE --tls-cert KEYS/cert.pem --tls-key KEYS/none.pem"),
        (2, "without a password", "--store STORE --tls-cert KEYS/cert.pem --tls-key KEYS/locked.pem"),
        (2, "no PEM certificate", "--store STORE --tls-cert KEYS/empty --tls-key KEYS/empty"),
        (2, "--token-file", "--store STORE --token-file KEYS/empty"),
        (2, "--token-file", "--store STORE --token-file KEYS/none"),
        (2, "KEYS/none", "--store STORE --tenants KEYS/none"),
        (2, "0 tenants", "--store STORE --tenants KEYS/empty"),
        (2, "abacus", "--store STORE --device abacus"),
        (2, "TAKEN", "--store STORE --port TAKEN"),
        (2, "7 characters", "--store STORE --host 0.0.0.0 --token-file KEYS/short"),
        (2, "file descriptors", "--store STORE --max-connections 1000000"),
    ],
)
def test_servers_that_must_not_start(
    folder: Path,
    keys: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    word: str,
    arguments: str,
) -> None:
    monkeypatch.delenv("HAPI_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [
            a.replace("STORE", str(folder)).replace("KEYS", str(keys)).replace("TAKEN", port)
            for a in arguments.split()
        ]
        assert main([*([] if "--port" in given else ["--port", "0"]), *given]) == code
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1 and output.err.startswith("hapi-server: error: ")
    assert word.replace("TAKEN", port).replace("KEYS", str(keys)) in output.err


@pytest.mark.parametrize(
    ("host", "token", "certificate", "warnings"),
    [
        ("127.0.0.1", "short-one", None, 0),
        ("::1", "x", None, 0),
        ("localhost", None, None, 0),
        ("0.0.0.0", "12345678", None, 2),
        ("0.0.0.0", "1234567890abcdef", None, 1),
        ("example.org", "1234567890abcdef", "cert.pem", 0),
        ("::", "12345678", "cert.pem", 1),
    ],
)
def test_warnings_before_others_can_listen(
    host: str, token: str | None, certificate: str | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = Tenants(token=token)
    check_exposure(ListenSettings(host=host, tls_cert=certificate, tls_key=certificate), tenants)
    assert len(caplog.records) == warnings
    assert ("TLS" in caplog.text) == (host == "0.0.0.0")
    assert token is None or token not in caplog.text
