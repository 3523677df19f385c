"""Messages of errors for clients, which may be other tenants: without the store's address and other contents.

The log keeps every message whole, under the request's id.
"""

from __future__ import annotations

import re
from typing import TypeVar

from hapi.errors import HapiError
from hapi.text import printable

E = TypeVar("E", bound=HapiError)

_ADDRESS = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>,;)]*")
_OWN = "(?:v1|healthz|readyz|metrics)"
_PATH = re.compile(rf"(?<![\w/.~<-])(?:~\w*)?/(?!{_OWN}\b)[\w.@%+~-]+(?:/[\w.@%+~-]*)+")
"""An absolute path of two parts or more, but for those of the HTTP interface; ``</b>`` in a client's text is none."""

_QUOTED = re.compile(rf"""(['"])(?:~\w*)?/(?!{_OWN}\b)[^'"]+\1""")
"""An absolute path in quotes, which may have blanks, and one part only."""


class Disclosure:
    """Turns errors into those that clients are told."""

    def __init__(self, store_url: str) -> None:
        """Hide ``store_url``."""
        self._store = sorted(
            {store_url, printable(store_url, len(store_url) * 8)} - {""}, key=len, reverse=True
        )

    def of(self, error: E, *, everything: bool = False) -> E:
        """Return ``error`` with the message for a client; ``everything``: as it is, for the store's owner."""
        if everything:
            return error
        disclosed = type(error).__new__(type(error), self._text(error))
        disclosed.__dict__.update(error.__dict__)
        return disclosed

    def _text(self, error: HapiError) -> str:
        if error.outside is not None:
            return error.outside
        text = str(error)
        for url in self._store:
            text = text.replace(url, "the store")
        text = _QUOTED.sub(r"\1(a path)\1", _ADDRESS.sub("(an address)", text))
        return _PATH.sub("(a path)", text)
