"""A store that answers late, wrongly, halfway or not at all: the same result, or one clear line.

A proxy stands between ``hapi-server`` and Swift; nothing happens before the server is up.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import ServerProcess, hapi, losses, report_of, server, train
from support.swift_tools import JOB, ONE, SERVER, SPLIT, FaultProxy, Swift

from hapi.errors import HapiError, StoreError
from hapi.store.open import open_store

pytestmark = pytest.mark.slow
FAULTS = tuple(
    answer
    for fault in ("late", "503", "reset", "500", "cut", "less")
    for answer in (fault, "pass", "pass", "pass", "pass")
)


@contextlib.contextmanager
def behind(swift: Swift) -> Iterator[tuple[ServerProcess, FaultProxy]]:
    """A server, and the proxy through which it reaches the store."""
    with contextlib.closing(FaultProxy(swift.port)) as proxy:
        env = {**swift.environment, "AWS_ENDPOINT_URL": proxy.url, "HAPI_STORE_RETRIES": "2"}
        with server(ONE, *SERVER, "--tell-store", **env) as running:
            yield running, proxy


def test_faults_change_no_result(packed: Swift, undisturbed: list[float], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with behind(packed) as (running, proxy):
        proxy.faults = FAULTS
        train(*JOB, "--split", SPLIT, "--server", running.url, "--report", str(report))
        assert losses(report_of(report)) == undisturbed
        assert set(proxy.happened) == set(FAULTS), proxy.happened


def test_faults_that_stay_end_with_one_line(packed: Swift) -> None:
    """An absent store is waited for as long as ``--patience`` says, a refusal is not."""
    with behind(packed) as (running, proxy):
        for fault, said in (("503", "answered 503 InternalError (3 times)"), ("403", "denies access")):
            proxy.faults = (fault,)
            job = (*JOB, "--split", "0", "--server", running.url)
            done = train(*job, "--patience", "2" if fault == "503" else "200", code=1)
            errors = [line for line in done.stderr.splitlines() if line.startswith("hapi-train: error: ")]
            assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
            assert said in errors[0] and f"{ONE}/datasets/digits/" in errors[0] and proxy.url in errors[0]
    assert proxy.happened["503"] >= 6 and proxy.happened["403"] >= 5


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "guess"}, "does not accept the keys of the environment"),
    "key": ({"AWS_ACCESS_KEY_ID": "hapi:nobody"}, "does not accept the keys of the environment"),
    "rights": (
        {"AWS_ACCESS_KEY_ID": "hapi:stranger", "AWS_SECRET_ACCESS_KEY": "strange"},
        "denies access (keys of the environment)",
    ),
    "region": ({"AWS_REGION": "eu-west-1"}, "'eu-west-1': it belongs to us-east-1; set AWS_REGION"),
    "https": ({"AWS_ENDPOINT_URL": "https://127.0.0.1:{port}"}, "does not speak TLS"),
    "endpoint": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:{closed}"}, "refuses connections"),
    # Too long a name to be asked of any network.
    "name": (
        {"AWS_ENDPOINT_URL": f"http://{'x' * 64}.invalid", "AWS_ALLOW_HTTP": "true"},
        "has an unknown host name",
    ),
    "name for TLS": (
        {"AWS_ENDPOINT_URL": f"https://{'x' * 64}.invalid"},
        "has an unknown host name",
    ),
    "half": ({"AWS_SECRET_ACCESS_KEY": ""}, "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"),
    "http": (
        {"AWS_ENDPOINT_URL": "http://store.example"},
        "is plain http, which anybody on the way can read and change: use https://, or set AWS_ALLOW_HTTP=true",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_settings(swift: Swift, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Every call of a store says the same in one line, as far as the store says anything (not to HEAD)."""
    changes, said = WRONG[which]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        places = {"port": swift.port, "closed": closed.getsockname()[1]}
        settings = {**swift.environment, "HAPI_STORE_RETRIES": "0", "NO_PROXY": "*", **changes}
        for name, value in settings.items():
            monkeypatch.setenv(name, value.format(**places))
        errors = []
        for call in ("ping", "get", "put", "list"):
            arguments = {"get": ("a/b",), "put": ("a/b", b"1")}.get(call, ())
            with pytest.raises(HapiError) as caught:
                getattr(open_store("s3://hapi/x"), call)(*arguments)
            errors.append(str(caught.value))
    assert all(said in error and len(error) < 300 for error in errors), errors


def test_a_bucket_that_is_not_there(swift: Swift, tmp_path: Path) -> None:
    """Said by commands and by the server at its start, in one line."""
    said = f"there is no bucket 'nobucket' at {swift.environment['AWS_ENDPOINT_URL']}"
    done = hapi("ls", "s3://nobucket/x", code=1, **swift.environment)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    log = tmp_path / "log"
    with pytest.raises(AssertionError), server("s3://nobucket/x", log=log, **swift.environment):
        pass
    assert said in log.read_text() and "Traceback" not in log.read_text()


def test_a_profile(swift: Swift, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys, region and endpoint from files of Amazon's tools."""
    for name in swift.environment:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {swift.environment['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {swift.environment['AWS_SECRET_ACCESS_KEY']}\n"
        "[stale]\naws_access_key_id = hapi:tester\naws_secret_access_key = old\n"
    )
    (tmp_path / "config").write_text(
        "".join(
            f"[profile {name}]\nregion = us-east-1\nendpoint_url = {swift.environment['AWS_ENDPOINT_URL']}\n"
            for name in ("lab", "stale")
        )
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store("s3://hapi/profile")
    store.put("x", b"1")
    assert store.get("x") == b"1"
    store.delete("x")
    monkeypatch.setenv("AWS_PROFILE", "stale")
    with pytest.raises(StoreError, match="does not accept the profile 'stale'"):
        open_store("s3://hapi/profile").get("x")
