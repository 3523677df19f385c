"""SIGHUP against a running server: tenants, tokens and certificate change, and what runs goes on."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.certificates import self_signed
from support.harness import DIGITS_JOB, ServerProcess, losses, report_of, server, start_train, train
from support.http_tools import EXTRACT, Answer, Known, check_problem, exchange, make_store, until
from support.proxy import gated

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def logged(log: Path, **wanted: object) -> list[dict[str, Any]]:
    """Lines of the log that have these fields."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]


def told(log: Path, count: int = 1, **wanted: object) -> list[dict[str, Any]]:
    """The same once there are so many: a thread of the server's writes them, after the answers."""
    until(lambda: len(logged(log, **wanted)) >= count, 20, f"a line with {wanted}")
    return logged(log, **wanted)


class Reloading:
    """A server with a file of tenants that is changed under it."""

    def __init__(self, process: ServerProcess, log: Path) -> None:
        self.process, self.log = process, log

    def reload(self) -> dict[str, Any]:
        """Send SIGHUP; the new line of the audit that tells of it."""
        before = len(logged(self.log, audit="reload"))
        self.process.process.send_signal(signal.SIGHUP)
        until(lambda: len(logged(self.log, audit="reload")) > before, 20, "a line about the reload")
        return logged(self.log, audit="reload")[-1]

    def ask(self, token: str, path: str = "/v1", body: Any = None) -> Answer:
        method = "GET" if body is None else "POST"
        return exchange(self.process.port, method, path, body, bearer(token))


@contextmanager
def reloading(folder: Path, tmp_path: Path, *arguments: str, **env: str) -> Iterator[Reloading]:
    log = tmp_path / "log"
    with server(folder, *arguments, log=log, **env) as process:
        yield Reloading(process, log)


def test_tenants_and_tokens_change_while_requests_run(folder: Path, tmp_path: Path) -> None:
    known, tenants, token = Known(folder), tmp_path / "tenants.yaml", tmp_path / "token"
    tenants.write_text("vision: {token: vision-first}\nleaving: {token: leaving-secret}\n")
    token.write_text("operators-first")
    arguments = (
        "--tenants", str(tenants), "--token-file", str(token), "--send-timeout", "1h", "--slow-reader-rate", "0",
    )  # fmt: skip
    ids = [n % 40 for n in range(1200)]  # more bytes than a connection holds that nobody reads
    with reloading(folder, tmp_path, *arguments) as running:
        unread = []
        for name in ("vision-first", "leaving-secret"):
            connection = http.client.HTTPConnection("127.0.0.1", running.process.port, timeout=240)
            connection.request("POST", EXTRACT, json.dumps(known.extract(ids)).encode(), bearer(name))
            unread.append(connection)
        at_work = lambda: running.ask("operators-first", "/v1/status").json()["queue"]["running"]  # noqa: E731
        until(lambda: at_work() == 2, 30, "two running requests")
        tenants.write_text("vision: {token: vision-second, weight: 3}\ncoming: {token: coming-secret}\n")
        token.write_text("operators-second")
        line = running.reload()
        assert line["level"] == "info" and line["tenants"] == ["coming", "default", "vision"]
        for old in ("vision-first", "leaving-secret", "operators-first"):
            check_problem(running.ask(old), 401, "the token is wrong")
        for new in ("vision-second", "coming-secret", "operators-second"):
            assert running.ask(new).status == 200
        for connection in unread:
            response = connection.getresponse()
            assert response.status == 200
            known.check_features(response.read(), ids)
            connection.close()
        running.ask("vision-second", EXTRACT, known.extract())
        until(lambda: served(running) == {"coming": 0, "default": 0, "vision": 2}, 20, "counts that go on")
        assert running.process.stop() == 0


def served(running: Reloading) -> dict[str, int]:
    document = running.ask("operators-second", "/v1/status").json()
    return {tenant["name"]: tenant["served"] for tenant in document["tenants"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [("vision: {token: short}", "tenants.yaml: vision: token: expected at least 8"),
     ("vision: {token", "not YAML"),
     ("", "has 0 tenants"),
     (None, "cannot read the settings file: No such file")],
)  # fmt: skip
def test_a_bad_file_changes_nothing(folder: Path, tmp_path: Path, text: str | None, said: str) -> None:
    tenants, token = tmp_path / "tenants.yaml", tmp_path / "token"
    tenants.write_text("vision: {token: vision-first}\n")
    token.write_text("operators-first")
    with reloading(folder, tmp_path, "--tenants", str(tenants), "--token-file", str(token)) as running:
        token.write_text("operators-second")  # good, but it is all or nothing
        if text is None:
            tenants.unlink()
        else:
            tenants.write_text(text)
        line = running.reload()
        assert line["level"] == "error" and said in line["error"] and "\n" not in line["error"]
        assert running.ask("vision-first").status == 200 and running.ask("operators-first").status == 200
        assert running.ask("operators-second").status == 401
        tenants.write_text("vision: {token: vision-second}\n")
        assert running.reload()["level"] == "info"
        assert running.ask("vision-second").status == 200 and running.ask("vision-first").status == 401


def test_a_server_of_others_never_opens(folder: Path, tmp_path: Path) -> None:
    """Beyond loopback a reload that leaves a token to guess is refused, as at the start."""
    token = tmp_path / "token"
    token.write_text("long-enough-to-start")
    with reloading(folder, tmp_path, "--host", "0.0.0.0", "--token-file", str(token)) as running:
        token.write_text("guess")
        assert "be guessed" in running.reload()["error"]
        assert running.ask("long-enough-to-start").status == 200 and running.ask("guess").status == 401


def shown_certificate(port: int, name: str | None) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), 20)
    with context.wrap_socket(plain, server_hostname=name) as wrapped:
        assert is_well(wrapped)
        return wrapped.getpeercert(binary_form=True) or b""


def is_well(wrapped: ssl.SSLSocket) -> bool:
    wrapped.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return wrapped.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", [None, "localhost"])
def test_a_certificate_is_renewed(folder: Path, tmp_path: Path, name: str | None) -> None:
    first, second, used = tmp_path / "first", tmp_path / "second", tmp_path / "used"
    for made in (first, second, used):
        made.mkdir()
    pairs = [self_signed(made, "DNS:localhost,IP:127.0.0.1") for made in (first, second)]
    cert, key = used / "cert.pem", used / "key.pem"

    def install(certificate: Path, its_key: Path) -> bytes:
        for source, target in ((certificate, cert), (its_key, key)):
            (used / "new").write_bytes(source.read_bytes())
            (used / "new").replace(target)
        return ssl.PEM_cert_to_DER_cert(certificate.read_text())

    old = install(*pairs[0])
    with reloading(folder, tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as running:
        port = running.process.port
        assert shown_certificate(port, name) == old
        (early,) = told(running.log, event="certificate: renew it")  # they are made for two days
        assert early["level"] == "warning" and early["problem"].startswith("expires on 2")
        install(pairs[1][0], pairs[0][1])  # a key of another certificate
        assert "--tls-cert" in running.reload()["error"]
        for broken in (b"", cert.read_bytes()[:300], b"\xff" * 100, None):
            cert.unlink()
            _ = cert.mkdir() if broken is None else cert.write_bytes(broken)
            line = running.reload()
            assert line["level"] == "error" and "--tls-cert" in line["error"] and "\n" not in line["error"]
            assert shown_certificate(port, name) == old
        cert.rmdir()
        new = install(*pairs[1])
        kept = ssl.create_default_context(cafile=str(pairs[0][0]))
        plain = socket.create_connection(("127.0.0.1", port), 20)
        with kept.wrap_socket(plain, server_hostname="localhost") as open_before:
            assert running.reload()["tls"] is True
            assert is_well(open_before), "connections that are open go on"
        assert shown_certificate(port, name) == new != old
        assert len(told(running.log, 2, event="certificate: renew it")) == 2


def test_a_token_is_rotated(folder: Path, tmp_path: Path) -> None:
    """Both are good until the old one's time is over, without a restart or another reload."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("vision: {token: vision-first}\n")
    with reloading(folder, tmp_path, "--tenants", str(tenants)) as running:
        ends = datetime.fromtimestamp(time.time() + 2, UTC)
        old = f"{{token: vision-first, expires: {ends.isoformat()}}}"
        tenants.write_text(f"vision: {{token: vision-second, more_tokens: [{old}]}}\n")
        running.reload()
        assert running.ask("vision-second").status == 200
        until(lambda: running.ask("vision-first").status == 401, 20, "the old token's end")
        assert time.time() >= ends.timestamp()
        check_problem(running.ask("vision-first"), 401, "the token expired at 20")
        assert running.ask("vision-second").status == 200
        assert told(running.log, audit="unauthorized")
        assert "tenants whose tokens have all expired" not in running.log.read_text()
        tenants.write_text(f"vision: {old}\n")
        running.reload()
        assert told(running.log, event="tenants whose tokens have all expired")[0]["tenants"] == ["vision"]


def test_a_signal_in_the_drain_changes_nothing(folder: Path, tmp_path: Path) -> None:
    with reloading(folder, tmp_path) as running:
        running.reload()
        running.process.process.send_signal(signal.SIGTERM)
        until(lambda: storm(running.process.process), 30, "the end")
        assert running.process.process.wait(240) == 0
        assert "Traceback" not in running.log.read_text()


def storm(process: Any) -> bool:
    """Send SIGHUP; whether the process has ended."""
    process.send_signal(signal.SIGHUP)
    return process.poll() is not None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("{token: vision-first, expires: 2020-01-01T00:00:00Z}", "the token expired at 2020-01-01T00:00:00Z; set "),
        ("{token: vision-first, datasets: [others]}", "there is no dataset 'digits' here"),
    ],
)  # fmt: skip
def test_a_job_that_is_shut_out_ends_in_one_line_and_goes_on_when_it_is_let_in(
    folder: Path, tmp_path: Path, changed: str, said: str
) -> None:
    tenants, token, kept = tmp_path / "tenants.yaml", tmp_path / "token", tmp_path / "kept.pt"
    tenants.write_text("vision: {token: vision-first}\n")
    token.write_text("vision-first")
    job = (
        *DIGITS_JOB, "--dataset", "digits", "--bs", "20", "--request-size", "5", "--split", "maxpool", "--epochs", "3",
        "--token-file", str(token), "--checkpoint", str(kept), "--checkpoint-every", "1", "--cache", "off",
    )  # fmt: skip
    with (
        reloading(folder, tmp_path, "--tenants", str(tenants), "--cos-batch", "5") as running,
        gated(running.process.port, 12) as gate,
    ):
        shut_out = start_train(*job, "--server", gate.url)
        gate.wait()
        tenants.write_text(f"vision: {changed}\n")
        running.reload()
        gate.open()
        output, _ = shut_out.communicate(240)
        lines = [line for line in output.splitlines() if line.startswith("hapi-train: error:")]
        assert shut_out.wait() in (1, 2) and len(lines) == 1 and said in lines[0], output
        assert "Traceback" not in output and kept.exists()
        tenants.write_text("vision: {token: vision-second}\n")
        token.write_text("vision-second")
        running.reload()
        reports = [tmp_path / f"{name}.json" for name in ("whole", "resumed")]
        train(*job[:-6], "--cache", "off", "--server", running.process.url, "--report", str(reports[0]))
        train(*job, "--resume", "--server", running.process.url, "--report", str(reports[1]))
    assert losses(report_of(reports[1])) == losses(report_of(reports[0]))
