"""Where settings for S3 come from, and in which order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import UsageError
from hapi.store.connect import StoreTimeouts
from hapi.store.s3 import S3Settings, profile_credentials, s3_settings

KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}
CREDENTIALS = """
[default]
aws_access_key_id = DEFAULT
aws_secret_access_key = d%d=
[lab]
aws_access_key_id = LAB
aws_secret_access_key = l
aws_session_token = t
[half]
aws_access_key_id = HALF
[lab-admin]
aws_access_key_id = OLD
aws_secret_access_key = o
[vault]
aws_access_key_id = VAULT
aws_secret_access_key = v
"""
CONFIG = """
[default]
region = eu-north-1
[profile lab]
region = eu-west-3
endpoint_url = https://lab.example/
s3 =
    max_concurrent_requests = 20
    addressing_style = virtual
[profile corporate]
sso_session = corp
[profile lab-admin]
role_arn = arn:aws:iam::1:role/admin
source_profile = lab
[profile vault]
credential_process = /usr/bin/vault
"""


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing but a home folder that has Amazon's files."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    return {"HOME": str(tmp_path)}


def key_of(settings: S3Settings) -> str | None:
    return None if settings.keys is None else settings.keys.access_key


def test_environment_before_profile(home: dict[str, str]) -> None:
    settings = s3_settings({**home, **KEYS, "AWS_DEFAULT_REGION": "a", "AWS_REGION": "b"})
    assert (key_of(settings), settings.region, settings.origin) == ("AKIA", "b", "keys of the environment")
    assert "s3cr3t" not in repr(settings)
    settings = s3_settings(home)
    assert settings.keys is not None and settings.keys.secret_key == "d%d="
    assert (key_of(settings), settings.region, settings.endpoint) == ("DEFAULT", "eu-north-1", None)


def test_a_profile_with_all_there_is(home: dict[str, str]) -> None:
    settings = s3_settings({**home, "AWS_PROFILE": "lab"})
    assert settings.config("photos") == {
        "region": "eu-west-3", "endpoint": "https://photos.lab.example", "virtual_hosted_style_request": True,
        "skip_signature": False, "access_key_id": "LAB", "secret_access_key": "l", "session_token": "t",
    }  # fmt: skip
    assert settings.origin == "profile 'lab'"
    by_path = s3_settings({**home, "AWS_PROFILE": "lab", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "no"})
    assert by_path.config("photos")["endpoint"] == "https://lab.example"
    named = s3_settings({**home, "AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "https://photos.x:9000"})
    assert named.config("photos")["endpoint"] == "https://photos.x:9000"


def test_files_elsewhere(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c").write_text("[default]\naws_access_key_id=C\naws_secret_access_key=c\n")
    assert key_of(s3_settings({**home, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c")})) == "C"


def test_the_endpoint_for_s3_before_the_general_one(home: dict[str, str]) -> None:
    both = {"AWS_ENDPOINT_URL": "https://all.example", "AWS_ENDPOINT_URL_S3": "https://s3.example"}
    assert s3_settings({**home, **both}).endpoint == "https://s3.example"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:80"])
def test_plain_http_on_this_machine(endpoint: str) -> None:
    assert s3_settings({**KEYS, "HOME": "/nowhere", "AWS_ENDPOINT_URL": endpoint}).allow_http


def test_plain_http_elsewhere_when_allowed() -> None:
    environment = {**KEYS, "HOME": "/nowhere", "AWS_ENDPOINT_URL": "http://store.example"}
    assert s3_settings({**environment, "AWS_ALLOW_HTTP": "true"}).allow_http
    with pytest.raises(UsageError, match="AWS_ALLOW_HTTP=true"):
        s3_settings(environment)


def test_machines_that_are_given_credentials() -> None:
    """On Amazon's own the machine is asked; elsewhere only where it says that it is given some."""
    assert s3_settings({"HOME": "/nowhere"}).keys is None
    elsewhere = {"HOME": "/nowhere", "AWS_ENDPOINT_URL": "https://store.example"}
    assert s3_settings({**elsewhere, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}).keys is None
    public = s3_settings({**elsewhere, "AWS_SKIP_SIGNATURE": "1"})
    assert public.anonymous and public.config("b")["skip_signature"]
    with pytest.raises(UsageError, match=r"no credentials .* /nowhere/.aws/credentials"):
        s3_settings(elsewhere)


def test_profiles_with_keys_from_elsewhere(home: dict[str, str]) -> None:
    """Roles and single sign-on go before a profile's own keys, a process comes after them, as for Amazon's tools."""
    for name in ("corporate", "lab-admin"):
        settings = s3_settings({**home, "AWS_PROFILE": name})
        assert (settings.keys, settings.profile) == (None, name)
        assert settings.origin == f"credentials of profile {name!r}"
        assert s3_settings({**home, **KEYS, "AWS_PROFILE": name}).profile is None
    settings = s3_settings({**home, "AWS_PROFILE": "vault"})
    assert (key_of(settings), settings.profile) == ("VAULT", None)
    elsewhere = {**home, "AWS_ENDPOINT_URL": "https://store.example", "AWS_PROFILE": "corporate"}
    assert s3_settings(elsewhere).profile == "corporate"
    assert s3_settings({**elsewhere, "AWS_SKIP_SIGNATURE": "1"}).profile is None


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"hapi-split\[aws\].*export-credentials --profile corporate"):
        profile_credentials("corporate")


WRONG = {
    "half of the keys": ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_SECRET_ACCESS_KEY is not"),
    "the other half": ({"AWS_SECRET_ACCESS_KEY": "a"}, "AWS_ACCESS_KEY_ID is not"),
    "half a profile": ({"AWS_PROFILE": "half"}, "'half' .* has no aws_secret_access_key"),
    "no such profile": (
        {"AWS_PROFILE": "nobody"},
        "they have: corporate, default, half, lab, lab-admin, vault",
    ),
    "no URL": ({**KEYS, "AWS_ENDPOINT_URL": "store:9000"}, "expected https://HOST"),
    "no host": ({**KEYS, "AWS_ENDPOINT_URL": "https://"}, "expected https://HOST"),
    "no port": ({**KEYS, "AWS_ENDPOINT_URL": "https://x:port"}, "expected https://HOST"),
    "no yes": ({**KEYS, "AWS_SKIP_SIGNATURE": "maybe"}, "AWS_SKIP_SIGNATURE=maybe: expected true or false"),
    "bucket in an address": (
        {**KEYS, "AWS_ENDPOINT_URL": "https://10.0.0.1", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        "cannot be part of an address",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_settings(home: dict[str, str], which: str) -> None:
    changes, said = WRONG[which]
    with pytest.raises(UsageError, match=said):
        s3_settings({**home, **changes})


@given(st.binary(max_size=60))
def test_files_of_any_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Settings, or one line that names the file."""
    path = tmp_path_factory.mktemp("aws") / "credentials"
    path.write_bytes(content)
    try:
        s3_settings({"HOME": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": str(path)})
    except UsageError as error:
        assert str(path) in str(error)


def test_patience() -> None:
    assert StoreTimeouts.from_environment({}) == StoreTimeouts()
    given_values = {
        "HAPI_STORE_CONNECT_TIMEOUT": "0.5", "HAPI_STORE_READ_TIMEOUT": "600", "HAPI_STORE_RETRIES": "0",
        "HAPI_STORE_RETRY_SECONDS": "3",
    }  # fmt: skip
    patience = StoreTimeouts.from_environment(given_values)
    assert patience == StoreTimeouts(connect=0.5, read=600, retries=0, retry_within=3)
    assert patience.client()["timeout"] == patience.client()["read_timeout"]
    for wrong in ("x", "-1", "nan", "1e9"):
        with pytest.raises(UsageError, match="HAPI_STORE_RETRIES="):
            StoreTimeouts.from_environment({"HAPI_STORE_RETRIES": wrong})
