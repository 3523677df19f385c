"""Settings of an S3 store: endpoint, region, addressing and credentials, from their usual places.

The places and their order are those of Amazon's own tools: the environment, then a profile in
``~/.aws/credentials`` and ``~/.aws/config``, then the credentials of the machine itself (container, web
identity, instance), for which obstore asks. A profile whose keys come from elsewhere (single sign-on, an
assumed role, a process) is left to obstore's provider over boto3, which is loaded for such a profile only.
Plain keys are read here: the same files have region, endpoint and addressing, and boto3 is 36 MB and 0.9 s to import.
Those of a file are read again while the store is open, because whatever renews them rewrites the file.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
from collections.abc import Mapping
from configparser import ConfigParser, Error
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hapi.errors import UsageError
from hapi.paths import read_bounded

if TYPE_CHECKING:
    from obstore.store import S3Credential

DEFAULT_REGION = "us-east-1"
"""Default region; most stores that are not Amazon's expect it too."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_MACHINE = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
_MAX_FILE_BYTES = 1 << 20
_BEFORE_KEYS = ("role_arn", "sso_session", "sso_start_url")
_AFTER_KEYS = ("login_session", "credential_process")
"""Settings of a profile that has its keys from elsewhere, by whether its own keys go before."""
_LIFETIME = timedelta(minutes=5)
"""Time for which obstore keeps credentials. It asks again five minutes before the end: at nearly every request, but
at most ten times a second. boto3 renews what ends within ten minutes; a file is read again.
"""


@dataclass(frozen=True, kw_only=True)
class S3Keys:
    """Credentials and their origin (for messages)."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    origin: str
    in_file: bool = False
    """They are a profile's, whose file may be rewritten."""


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Settings that differ from one S3 store to another; without ``endpoint`` Amazon's of the region."""

    endpoint: str | None
    region: str
    virtual_hosts: bool
    """The bucket is part of the host's name instead of the path's first part."""
    allow_http: bool
    anonymous: bool
    keys: S3Keys | None
    """None: unsigned requests, or credentials from :attr:`profile` or of the machine."""
    profile: str | None = None
    """The profile whose keys come from elsewhere, see :func:`profile_credentials`."""

    @property
    def origin(self) -> str:
        """Origin of the credentials, in words."""
        if self.anonymous:
            return "unsigned, by AWS_SKIP_SIGNATURE"
        if self.profile is not None:
            return f"credentials of profile {self.profile!r}"
        return self.keys.origin if self.keys is not None else "credentials of this machine"

    def config(self, bucket: str) -> dict[str, Any]:
        """Return these settings in obstore's form."""
        config: dict[str, Any] = {
            "region": self.region,
            "virtual_hosted_style_request": self.virtual_hosts,
            "skip_signature": self.anonymous,
        }
        if self.endpoint is not None:
            config["endpoint"] = _with_bucket(self.endpoint, bucket) if self.virtual_hosts else self.endpoint
        if self.keys is not None:
            config["access_key_id"] = self.keys.access_key
            config["secret_access_key"] = self.keys.secret_key
            if self.keys.session_token is not None:
                config["session_token"] = self.keys.session_token
        return config


def s3_settings(environment: Mapping[str, str]) -> S3Settings:
    """Return the settings for S3 from ``environment``; :class:`UsageError` for impossible ones.

    Variables: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_PROFILE``,
    ``AWS_SHARED_CREDENTIALS_FILE``, ``AWS_CONFIG_FILE``, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``,
    ``AWS_REGION``, ``AWS_DEFAULT_REGION``, ``AWS_VIRTUAL_HOSTED_STYLE_REQUEST``, ``AWS_ALLOW_HTTP`` and
    ``AWS_SKIP_SIGNATURE``; of a profile its keys or where they come from, ``region``, ``endpoint_url`` and
    ``addressing_style``.
    """
    profile = _Profile.chosen(environment)
    endpoint = _first(environment, _ENDPOINTS) or profile.values.get("endpoint_url") or None
    allow_http = _is_true(environment, "AWS_ALLOW_HTTP")
    if endpoint is not None:
        endpoint = _checked_endpoint(endpoint, allow_http)
    anonymous = _is_true(environment, "AWS_SKIP_SIGNATURE")
    virtual_hosts = _virtual_hosts(environment, profile, endpoint)
    keys = None if anonymous else _environment_keys(environment) or profile.keys()
    elsewhere = keys is None and not anonymous and profile.is_indirect
    if keys is None and not anonymous and not elsewhere:
        _check_machine(environment, endpoint, profile.credentials_file)
    return S3Settings(
        endpoint=endpoint,
        region=_first(environment, _REGIONS) or profile.values.get("region") or DEFAULT_REGION,
        virtual_hosts=virtual_hosts,
        allow_http=endpoint is not None and endpoint.startswith("http://"),
        anonymous=anonymous,
        keys=keys,
        profile=profile.name if elsewhere else None,
    )


def profile_credentials(profile: str) -> Any:
    """Return obstore's provider of the credentials of ``profile``, as boto3 finds and renews them.

    :class:`UsageError` without boto3, or when the profile cannot be used. A login that has ended shows at the first
    request.
    """
    try:
        session = importlib.import_module("boto3").Session(profile_name=profile)
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        return provider(session, ttl=_LIFETIME)
    except ImportError:
        raise UsageError(
            f"profile {profile!r} has its keys from elsewhere, which takes boto3: pip install 'hapi-split[aws]', or "
            f"put them into the environment: "
            f'eval "$(aws configure export-credentials --profile {profile} --format env)"'
        ) from None
    except Exception as error:  # botocore's, which has no class here
        text = " ".join(str(error).split())[:300]
        raise UsageError(f"profile {profile!r}: no credentials: {text}") from None


def credential_provider(settings: S3Settings, environment: Mapping[str, str]) -> Any:
    """Return obstore's provider of credentials that may be renewed while the store is open; None for any others.

    :class:`UsageError` as :func:`profile_credentials`.
    """
    if settings.profile is not None:
        return profile_credentials(settings.profile)
    if settings.keys is None or not settings.keys.in_file:
        return None
    return _FileCredentials(settings.keys, dict(environment))


class _FileCredentials:
    """A profile's keys as its file has them now; the last whole ones while it is rewritten."""

    def __init__(self, keys: S3Keys, environment: Mapping[str, str]) -> None:
        self._keys, self._environment = keys, environment

    def __call__(self) -> S3Credential:
        """Return the keys in obstore's form."""
        with contextlib.suppress(
            UsageError
        ):  # half written or gone: the store says where the last ones have expired
            self._keys = _Profile.chosen(self._environment).keys() or self._keys
        return {
            "access_key_id": self._keys.access_key,
            "secret_access_key": self._keys.secret_key,
            "token": self._keys.session_token,
            "expires_at": datetime.now(UTC) + _LIFETIME,
        }


def _virtual_hosts(environment: Mapping[str, str], profile: _Profile, endpoint: str | None) -> bool:
    virtual = profile.addressing_style() == "virtual"
    if "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" in environment:
        virtual = _is_true(environment, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    if virtual and endpoint is not None and _is_address(urlsplit(endpoint).hostname or ""):
        raise UsageError(
            f"S3 endpoint {endpoint}: a bucket cannot be part of an address; give a host name, or address buckets "
            "by path (AWS_VIRTUAL_HOSTED_STYLE_REQUEST=false)"
        )
    return virtual


def _check_machine(environment: Mapping[str, str], endpoint: str | None, credentials_file: Path) -> None:
    """Check that the machine can have credentials of its own, before obstore waits for an answer."""
    if endpoint is None or _is_amazon(endpoint) or any(name in environment for name in _MACHINE):
        return
    raise UsageError(
        f"no credentials for the S3 store at {endpoint}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        f"or put them into {credentials_file} (AWS_PROFILE chooses a profile), "
        "or set AWS_SKIP_SIGNATURE=true for a public bucket"
    )


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """One profile of Amazon's files, empty when there is none of that name and none was asked for."""

    name: str
    credentials_file: Path
    values: Mapping[str, str]

    @classmethod
    def chosen(cls, environment: Mapping[str, str]) -> _Profile:
        """The one that ``environment`` names, else ``default``; :class:`UsageError` when the named one is not there."""
        home = Path(environment.get("HOME") or Path.home()) / ".aws"
        credentials_file = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
        config_file = Path(environment.get("AWS_CONFIG_FILE") or home / "config")
        asked = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
        name = asked or "default"
        credentials, config = _read(credentials_file), _read(config_file)
        section = name if name == "default" else f"profile {name}"
        if asked and name not in credentials and section not in config:
            known = {*credentials, *(s.removeprefix("profile ") for s in config)}
            raise UsageError(
                f"AWS_PROFILE={name[:80]}: neither {credentials_file} nor {config_file} has this profile; "
                f"they have: {', '.join(sorted(known)) or 'none'}"
            )
        values = {**config.get(section, {}), **credentials.get(name, {})}
        return cls(name=name, credentials_file=credentials_file, values=values)

    def keys(self) -> S3Keys | None:
        """The profile's own keys; None where it has none that count. :class:`UsageError` for half of them."""
        if any(name in self.values for name in _BEFORE_KEYS):
            return None
        access, secret = self.values.get("aws_access_key_id"), self.values.get("aws_secret_access_key")
        origin = f"profile {self.name!r}"
        if access and secret:
            token = self.values.get("aws_session_token") or None
            return S3Keys(
                access_key=access, secret_key=secret, session_token=token, origin=origin, in_file=True
            )
        if access or secret:
            missing = "aws_secret_access_key" if access else "aws_access_key_id"
            raise UsageError(f"{origin} in {self.credentials_file} has no {missing}")
        return None

    @property
    def is_indirect(self) -> bool:
        """True when its keys, where it has no own ones that count, come from elsewhere."""
        return any(name in self.values for name in (*_BEFORE_KEYS, *_AFTER_KEYS))

    def addressing_style(self) -> str:
        """``addressing_style`` of the profile, or of its nested settings for S3; "" when it has none."""
        for line in self.values.get("s3", "").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "addressing_style":
                return value.strip()
        return self.values.get("addressing_style", "")


def _read(path: Path) -> dict[str, dict[str, str]]:
    """The sections of a file of Amazon's; none when it is not there."""
    parser = ConfigParser(interpolation=None, strict=False, default_section="")
    try:
        if not path.exists():
            return {}
        parser.read_string(read_bounded(path, _MAX_FILE_BYTES, str(path)).decode())
    except (OSError, UnicodeDecodeError, Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return {name: dict(parser[name]) for name in parser.sections()}


def _environment_keys(environment: Mapping[str, str]) -> S3Keys | None:
    access, secret = (environment.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if not access and not secret:
        return None
    if not access or not secret:
        given, missing = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")[:: 1 if access else -1]
        raise UsageError(f"AWS_{given} is set and AWS_{missing} is not; they belong together")
    token = _first(environment, ("AWS_SESSION_TOKEN", "AWS_TOKEN"))
    return S3Keys(access_key=access, secret_key=secret, session_token=token, origin="keys of the environment")


def _checked_endpoint(endpoint: str, allow_http: bool) -> str:
    """``endpoint`` without a trailing slash; plain http only on this machine, or where it was allowed."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"S3 endpoint {endpoint[:200]!r}: expected https://HOST[:PORT] (AWS_ENDPOINT_URL)")
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        raise UsageError(
            f"S3 endpoint {endpoint[:200]!r} is plain http, which anybody on the way can read and change: "
            "use https://, or set AWS_ALLOW_HTTP=true"
        )
    return endpoint.rstrip("/")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_amazon(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _with_bucket(endpoint: str, bucket: str) -> str:
    """The endpoint with the bucket in front of its host, as obstore expects it for virtual hosts."""
    scheme, _, host = endpoint.partition("://")
    return endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{name}={text[:80]}: expected true or false")
