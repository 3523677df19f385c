"""An open S3 store whose credentials expire and are replaced: the next ones are taken without opening it again."""

from __future__ import annotations

import datetime
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hapi.errors import StoreError, StoreUnavailableError
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
from tests.support.tiny_http import TinyServer, answer, serving

DATA = b"8 bytes!"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_ANSWER_WITHIN_S = 240.0


class Accepting:
    """A store that accepts the requests signed with one access key, and finds every other one expired."""

    def __init__(self) -> None:
        self.key = "FIRST"

    def __call__(self, connection: socket.socket, request: bytes) -> bool:
        if f"Credential={self.key}/".encode() not in request:
            return answer(EXPIRED, "403 Forbidden")(connection, request)
        head = (
            f"Content-Range: bytes 0-7/{len(DATA)}",
            'ETag: "a"',
            "Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT",
        )
        return answer(DATA, "206 Partial Content", *head)(connection, request)


@pytest.fixture
def accepting() -> Accepting:
    return Accepting()


@pytest.fixture
def server(accepting: Accepting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
    """That store, which this process reaches with what ``tmp_path`` has in the places of ``~/.aws``."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("HAPI_STORE_RETRIES", "0")
    with serving(accepting) as tiny:
        monkeypatch.setenv("AWS_ENDPOINT_URL", tiny.url)
        yield tiny


def write_file(folder: Path, key: str) -> None:
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t-{key}\n"
    (folder / "credentials").write_text(text)


def write_process(folder: Path, key: str) -> None:
    """Keys of a process that end soon, so that boto3 asks for the next ones."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)
    keys = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": "t"}
    (folder / "keys").write_text(json.dumps({**keys, "Expiration": end.isoformat()}))
    (folder / "config").write_text(f"[default]\ncredential_process = cat {folder / 'keys'}\n")


def read(store: ObjectStore) -> bytes:
    buffer = bytearray(8)
    store.read_into("a", 0, memoryview(buffer))
    return bytes(buffer)


def read_in_the_end(store: ObjectStore) -> bytes:
    """What a reader gets that asks again while old keys are still in use."""
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while True:
        try:
            return read(store)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.mark.parametrize("write", [write_file, write_process])
def test_the_next_credentials(
    accepting: Accepting, server: TinyServer, tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    if write is write_process:
        pytest.importorskip("boto3")
    write(tmp_path, "FIRST")
    store = open_store("s3://bucket")
    assert read(store) == DATA
    accepting.key = "SECOND"
    with pytest.raises(StoreUnavailableError, match="has expired; get new credentials"):
        read(store)  # for a trainer: not final
    write(tmp_path, "SECOND")
    assert read_in_the_end(store) == DATA


@pytest.mark.parametrize("text", ["", "[default]\naws_access_key_id = SEC", "no ini file", None])
def test_a_file_in_the_middle_of_being_written(server: TinyServer, tmp_path: Path, text: str | None) -> None:
    """The last whole credentials go on: they often hold for minutes yet."""
    write_file(tmp_path, "FIRST")
    store = open_store("s3://bucket")
    assert read(store) == DATA
    if text is None:
        (tmp_path / "credentials").unlink()
    else:
        (tmp_path / "credentials").write_text(text)
    time.sleep(0.15)  # obstore asks no sooner than after 0.1 s
    assert read(store) == DATA


def test_keys_of_the_environment_stay(
    accepting: Accepting, server: TinyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FIRST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    store = open_store("s3://bucket")
    assert read(store) == DATA
    accepting.key = "SECOND"
    write_file(tmp_path, "SECOND")
    time.sleep(0.15)
    with pytest.raises(StoreError, match=r"keys of the environment.*has expired") as caught:
        read(store)
    assert not isinstance(caught.value, StoreUnavailableError), "nothing will renew them"
