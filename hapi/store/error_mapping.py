"""Mapping of obstore's errors to one line each that says what to do.

Obstore distinguishes kinds of failure only in its text: the request, the status, the store's answer, and
(after "Debug source") the causes.
"""

from __future__ import annotations

import asyncio
import re

from obstore import exceptions

from hapi.errors import HapiError, NotFoundError, StoreError, StoreUnavailableError
from hapi.store.connect import Connection

_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure")
_OLD_TOKEN = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_WRONG_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_OTHER_RANGE = r"Requested (\d+\.\.\d+), got (\d+\.\.\d+)"
_PROVIDER = "External AWS credential provider"
"""Obstore's name for the provider of :func:`hapi.store.s3.profile_credentials`."""
_CAUSES = (
    ("ConnectionRefused", "refuses connections; check that it runs, and the endpoint"),
    ("dns error", "has an unknown host name; check the endpoint"),
    ("InvalidDnsName", "has an unknown host name; check the endpoint"),
    ("InvalidCertificate", "has a certificate that is not trusted; check the endpoint, or SSL_CERT_FILE"),
    ("InvalidContentType", "does not speak TLS; write the endpoint with http:// if it is plain"),
    ("TimedOut", "did not answer in time (HAPI_STORE_READ_TIMEOUT, _CONNECT_TIMEOUT, _REQUEST_TIMEOUT)"),
)
"""Words found in the causes, and their meaning."""


def store_error(error: BaseException, url: str, key: str, connection: Connection) -> HapiError:
    """Return the Hapi error for ``error`` of obstore.

    The message for a server's client leaves out the store's address, its operator's settings and the store's
    words.

    Args:
        error: the exception that obstore raised.
        url: the store's URL.
        key: the object; empty for the store itself.
        connection: facts for the message.
    """
    meaning = _meaning(error, url, key, connection)
    what = key or "the object store"
    if isinstance(meaning, NotFoundError):
        meaning.outside = f"{what} does not exist"
    elif isinstance(meaning, StoreUnavailableError):
        meaning.outside = (
            f"{what}: the object store is out of reach or overloaded for now; the server's log says more"
        )
    else:
        meaning.outside = f"{what}: the object store refuses or fails; the server's log says more"
    return meaning


def _meaning(error: BaseException, url: str, key: str, connection: Connection) -> HapiError:
    said, _, below = " ".join(str(error).split()).partition("Debug source:")
    code, status = _found(r"<Code>(\w+)</Code>", said), _found(r"status code: (\d{3})", said)
    address = connection.address or url
    where = f"{url}/{key}" if key else url
    if code == "NoSuchBucket":
        bucket = url.split("://", 1)[-1].split("/", 1)[0]
        return NotFoundError(
            f"there is no bucket {bucket!r} at {address}; make it there, or check the store's URL and the endpoint"
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"there is no object {where}")
    refused = _found(f"{_PROVIDER}: (.*)", said)
    if refused is not None:
        text = f"{where}: the {connection.origin} are not to be had now: {refused[:300].strip()}"
        if re.match(r"\w*(Connection|Connect|Timeout)\w*Error:", refused):
            return StoreUnavailableError(text)
        return StoreError(f"{text}; log in again, for example with 'aws sso login'")
    if "/latest/api/token" in said or "/latest/meta-data" in said:
        return StoreError(
            f"{where}: no credentials for {address}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    if code in _WRONG_REGION or status == "301" or "redirect without LOCATION" in said:
        region = _found(r"<Region>([\w-]+)</Region>", said)
        belongs = f"it belongs to {region}" if region else "the bucket belongs to another"
        return StoreError(
            f"{where}: {address} refuses the region {connection.region!r}: {belongs}; set AWS_REGION"
        )
    name = _found(r'[Pp]ath "([^"]*)"(?:: Encountered illegal| contained empty path segment)', said)
    if name is not None:
        wrong = "an empty part in its name" if "contained empty" in said else "a name that is no path"
        return StoreError(
            f"{where}: cannot be listed: the object {name[:200]!r} there has {wrong}; rename or "
            "remove it, or give a narrower FOLDER that does not hold it"
        )
    denied = _denial(code, status, connection.origin)
    if denied is not None:
        may_end = connection.renews and code in (*_OLD_TOKEN, *_WRONG_KEYS)
        return (StoreUnavailableError if may_end else StoreError)(f"{where}: {address} {denied}")
    if status == "416":
        return StoreError(f"{where}: the object is shorter than it should be")
    other = re.search(_OTHER_RANGE, said)
    if other is not None:
        return StoreError(
            f"{where}: {address} gave the bytes {other.group(2)} when asked for {other.group(1)}; "
            "the object is shorter than it should be, or something on the way is broken"
        )
    cause = _absence(said, below, code, status)
    if cause is not None:
        return StoreUnavailableError(f"{where}: the store at {address} {cause}")
    return StoreError(f"{where}: {said if len(said) <= 300 else said[:300] + '...'}")


def is_other_range(error: BaseException) -> bool:
    """Return whether the store answered a range with another one."""
    return re.search(_OTHER_RANGE, str(error)) is not None


def _denial(code: str | None, status: str | None, origin: str) -> str | None:
    """Reason why the store denies access; None for another failure."""
    if code in _WRONG_KEYS:
        return (
            f"does not accept the {origin}: unknown access key or wrong secret key; "
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if code in _OLD_TOKEN:
        return (
            f"does not accept the session token ({origin}): it is wrong or has expired; get new credentials"
        )
    if code == "RequestTimeTooSkewed":
        return "does not accept this machine's clock; set the clock right"
    if status in ("401", "403"):
        return (
            f"denies access ({origin}): they may be wrong, or may not do this; reading needs the rights "
            "to list the bucket and get objects, packing and pushing also to put and delete them"
        )
    return None


def _absence(said: str, below: str, code: str | None, status: str | None) -> str | None:
    """Reason why the store could not answer; None for another failure. The same request may succeed later."""
    tries = int(_found(r"after (\d+) retries", said) or 0) + 1
    times = f" ({tries} times)" if tries > 1 else ""
    if status == "429" or (status or "").startswith("5"):
        return f"answered {status}{f' {code}' if code else ''}{times}"
    if "HTTP error" not in said or "builder error" in said:
        return None
    for sign, meaning in _CAUSES:
        if sign in below:
            return meaning
    return f"broke the connection{times}: {said.rpartition('HTTP error: ')[2][:120].strip()}"


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


FOREIGN = (exceptions.BaseError, OSError, ValueError, asyncio.CancelledError)
"""Exceptions that obstore raises."""
