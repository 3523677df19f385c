"""The bearer token of a server and of its clients."""

from __future__ import annotations

import os

from hapi.errors import UsageError
from hapi.paths import open_file

VARIABLE = "HAPI_TOKEN"
MAX_TOKEN_BYTES = 4096
"""Longest token: it must fit a header beside others."""


def read_token(token_file: str | None) -> str | None:
    """Return the bearer token from ``token_file``, or from ``HAPI_TOKEN``, or None.

    Raises :class:`UsageError` for a file that cannot be read, and for text that cannot be a token.
    """
    if token_file is None:
        origin, token = VARIABLE, os.environ.get(VARIABLE, "").strip()
        if not token:
            return None
    else:
        origin = f"--token-file {token_file}"
        try:
            with open_file(token_file) as file:
                token = file.read(MAX_TOKEN_BYTES + 1).decode("ascii", "replace").strip()
        except OSError as error:
            raise UsageError(f"{origin}: cannot be read: {error.strerror or error}") from None
    if (
        not token
        or len(token) > MAX_TOKEN_BYTES
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise UsageError(f"{origin}: expected one token of printable ASCII without spaces")
    return token
