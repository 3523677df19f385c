"""The time in which a server's certificate is good, so that its operator hears of the end before trainers do."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from hapi.units import format_duration

SOON_SECONDS = 14 * 86400.0
"""A certificate that ends within this time should be renewed."""
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags of DER (X.690): the version, which may be left out, and a time whose year has two digits."""


@dataclass(frozen=True)
class Validity:
    """The time in which all certificates of a chain are good, in seconds since 1970."""

    first: float
    last: float

    def problem(self, now: float) -> str:
        """Return what is wrong with it at the Unix time ``now``, or soon will be; empty for nothing."""
        if now < self.first:
            return f"not valid before {_shown(self.first)}"
        if now > self.last:
            return f"expired on {_shown(self.last)}"
        if now > self.last - SOON_SECONDS:
            return f"expires on {_shown(self.last)}, in {format_duration(self.last - now)}"
        return ""


def validity_of(pem: str) -> Validity | None:
    """Return the time in which all certificates of ``pem`` are good; None where there are none that can be read."""
    try:
        spans = [_span(ssl.PEM_cert_to_DER_cert(text)) for text in _CERTIFICATE.findall(pem)]
    except (ValueError, IndexError, OverflowError):
        return None
    return Validity(max(s.first for s in spans), min(s.last for s in spans)) if spans else None


def _span(der: bytes) -> Validity:
    """Times of one certificate (RFC 5280, 4.1): version, number, algorithm, issuer, and then its validity."""
    (_, certificate), *_ = _elements(der)
    (_, signed), *_ = _elements(certificate)
    fields = list(_elements(signed))
    _, validity = fields[4 if fields[0][0] == _VERSION else 3]
    first, last = (_time(tag, content) for tag, content in _elements(validity))
    return Validity(first, last)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements that ``der`` is made of: tag and content."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:
            digits = length - 0x80
            length, at = int.from_bytes(der[at : at + digits]), at + digits
        yield tag, der[at : at + length]
        at += length


def _time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _shown(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
