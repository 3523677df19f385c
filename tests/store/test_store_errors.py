"""What S3 stores answer when they do not give what was asked, and what people are told then.

A small server answers as the stores do; what OpenStack Swift itself says is in ``tests/integration/test_swift*.py``.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import UnauthenticatedError

from hapi.errors import (
    HapiError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
    TransportError,
    UsageError,
    from_problem,
)
from hapi.store.connect import Connection
from hapi.store.error_mapping import store_error
from hapi.store.open import open_store
from hapi.store.remote import RANGE_TRIES


class Answers:
    """Answers every request with the same status, headers and body; counts them."""

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.cut = 200, dict[str, str](), b"", 0
        self.requests, self.signed = 0, ""
        answers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answers.requests += 1
                answers.signed = f"{self.headers['Authorization']} {self.headers['X-Amz-Security-Token']}"
                self.send_response(answers.status)
                for name, value in {"Content-Length": str(len(answers.body)), **answers.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answers.body[: len(answers.body) - answers.cut])
                self.close_connection = bool(answers.cut)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def speak_tls(self, certificate: Path, key: Path) -> None:
        """From now on, under the name localhost."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://localhost:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """A store of the one answer; this process reaches it."""
    server = Answers()
    settings = {
        "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "eu-west-1", "HAPI_STORE_RETRIES": "1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def profile(answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of profiles, of which ``elsewhere`` is chosen."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "elsewhere")
    return tmp_path / "config"


def said(kind: type[HapiError]) -> str:
    """What a read of eight bytes says."""
    with pytest.raises(HapiError) as caught:
        open_store("s3://bucket/deep").read_into("a/b", 0, memoryview(bytearray(8)))
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 400 and "Debug" not in str(caught.value)
    return str(caught.value)


def document(code: str, more: str = "") -> bytes:
    return f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>no</Message>{more}</Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (301, document("PermanentRedirect"), "refuses the region 'eu-west-1': the bucket belongs to another"),
        (400, document("AuthorizationHeaderMalformed", "<Region>us-west-2</Region>"), "belongs to us-west-2"),
        (400, document("ExpiredToken"), "session token (keys of the environment)"),
        (403, document("InvalidAccessKeyId"), "unknown access key or wrong secret key"),
        (403, document("RequestTimeTooSkewed"), "set the clock right"),
        (403, document("AccessDenied"), "rights to list the bucket and get objects"),
        (401, b"", "denies access (keys of the environment)"),
        (416, document("InvalidRange"), "shorter than it should be"),
        (418, b"<html>a teapot</html>", "418"),
    ],
)
def test_refusals(answers: Answers, status: int, body: bytes, words: str) -> None:
    answers.status, answers.body = status, body
    assert words in said(StoreError)
    assert answers.requests == 1  # no use to ask again


def test_keys_of_a_process(answers: Answers, profile: Path) -> None:
    keys = {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "s", "SessionToken": "t0k3n"}
    (profile.parent / "keys").write_text(json.dumps({**keys, "Expiration": "2999-01-01T00:00:00Z"}))
    profile.write_text(
        f"[profile elsewhere]\nregion = eu-west-1\ncredential_process = cat {profile.parent / 'keys'}\n"
    )
    answers.status, answers.body = 403, document("AccessDenied")
    assert "denies access (credentials of profile 'elsewhere')" in said(StoreError)
    assert "Credential=PROCESS/" in answers.signed and answers.signed.endswith(" t0k3n")


def test_a_login_that_has_ended(answers: Answers, profile: Path) -> None:
    profile.write_text(
        "[profile elsewhere]\nsso_session = corp\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session corp]\nsso_start_url = https://corp.example/start\nsso_region = eu-west-1\n"
    )
    text = said(StoreError)
    assert "the credentials of profile 'elsewhere' are not to be had now: SSOTokenLoadError: " in text
    assert text.endswith("log in again, for example with 'aws sso login'") and answers.requests == 0


def test_a_profile_that_cannot_be_used(profile: Path) -> None:
    profile.write_text("[profile elsewhere]\nrole_arn = arn:aws:iam::1:role/r\n")
    with pytest.raises(UsageError, match=r"profile 'elsewhere': no credentials: .*source_profile"):
        open_store("s3://bucket")


@pytest.mark.parametrize("name", ["EndpointConnectionError", "ConnectTimeoutError"])
def test_a_login_service_that_is_out_of_reach(name: str) -> None:
    error = UnauthenticatedError(f"for path External AWS credential provider: {name}: no\n\nDebug source:\nx")
    found = store_error(error, "s3://b", "k", Connection(None, origin="credentials of profile 'p'"))
    assert type(found) is StoreUnavailableError and "aws sso login" not in str(found)


def test_what_is_not_there(answers: Answers) -> None:
    answers.status, answers.body = 404, document("NoSuchKey")
    assert said(NotFoundError) == "there is no object s3://bucket/deep/a/b"
    answers.body = document("NoSuchBucket")
    assert said(NotFoundError).startswith(f"there is no bucket 'bucket' at {answers.url}")


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_a_store_that_is_not_well(answers: Answers, status: int, code: str) -> None:
    """Asked as often as was set, and told apart from a refusal on the other tier too."""
    answers.status, answers.body = status, document(code)
    message = said(StoreUnavailableError)
    assert f"the store at {answers.url} answered {status} {code} (2 times)" in message
    assert answers.requests == 2
    problem = StoreUnavailableError(message).to_problem()
    assert type(from_problem(problem, problem["status"])) is StoreUnavailableError
    assert type(from_problem({}, problem["status"])) is TransportError, "a proxy's, and no word on the store"


def test_bodies_that_end_early(answers: Answers) -> None:
    """A connection that breaks again and again in the body, and a sound answer with fewer bytes than asked for."""
    answers.status, answers.body, answers.cut = 206, b"12345678", 5
    answers.headers = {"Content-Range": "bytes 0-7/100", "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT"}
    assert "broke the connection" in said(StoreUnavailableError)
    answers.body, answers.cut = b"123", 0
    answers.headers["Content-Range"] = "bytes 0-2/100"
    answers.requests = 0
    assert "gave the bytes 0..3 when asked for 0..8" in said(StoreError)
    assert answers.requests == RANGE_TRIES
    answers.headers["Content-Range"] = "bytes 0-2/3"
    assert "3 bytes came for the range 0..8; the object is shorter" in said(StoreError)


def test_a_name_with_an_empty_part(answers: Answers) -> None:
    """Such an object cannot be read, and hides the others of its listing: one line says which it is."""
    answers.headers = {"Content-Type": "application/xml"}
    answers.body = (
        b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>deep/a//b</Key>'
        b"<LastModified>2026-11-21T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>3</Size>"
        b"<StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"
    )
    with pytest.raises(StoreError) as caught:
        open_store("s3://bucket/deep").list("a")
    assert str(caught.value) == (
        "s3://bucket/deep/a: cannot be listed: the object 'deep/a//b' there has an empty part in its name; "
        "rename or remove it, or give a narrower FOLDER that does not hold it"
    )


def test_an_instance_without_credentials(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine may be given credentials and is not."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", answers.url)
    answers.status = 403
    assert "no credentials for Amazon's S3 in eu-west-1" in said(StoreError)


def certified(folder: Path) -> tuple[Path, Path, Path]:
    """A new authority, a certificate of it for localhost, and that one's key."""
    authority, authority_key, certificate, key = (folder / name for name in ("ca", "ca.key", "crt", "key"))
    more = folder / "more"
    more.write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n")
    new = ["-newkey", "rsa:2048", "-nodes"]
    for command in (
        ["req", "-x509", *new, "-subj", "/CN=ca", "-keyout", authority_key, "-out", authority],
        ["req", *new, "-subj", "/CN=localhost", "-keyout", key, "-out", folder / "request"],
        ["x509", "-req", "-in", folder / "request", "-CA", authority, "-CAkey", authority_key, "-CAcreateserial",
         "-extfile", more, "-out", certificate],
    ):  # fmt: skip
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=240)
    return authority, certificate, key


def test_certificates(answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of an authority that nobody knows, until SSL_CERT_FILE names it."""
    try:
        authority, certificate, key = certified(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(f"no openssl to make a certificate: {error}")
    answers.speak_tls(certificate, key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", answers.url)
    assert "a certificate that is not trusted; check the endpoint, or SSL_CERT_FILE" in said(
        StoreUnavailableError
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    answers.status, answers.body = 404, document("NoSuchKey")
    assert "there is no object" in said(NotFoundError)


def test_credentials_in_the_url_are_not_repeated() -> None:
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID") as caught:
        open_store("s3://key:secret@bucket/x")
    assert "key:secret" not in str(caught.value)
