"""The live status page at ``/``: one file without data, which asks ``/v1/status`` every two seconds.

The browser is told to run and load nothing but what is in the file: script and style are named by their hashes in the
Content-Security-Policy, so that even a name with markup in it could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("status.html")


@cache
def page() -> bytes:
    """Return the HTML file."""
    return _FILE.read_bytes()


@cache
def page_headers() -> Mapping[str, str]:
    """Return the headers that it is served with."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script"),
        "style-src": _hashes("style"),
        "img-src": "data:",  # the empty icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",  # it asks for a token
    }
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(element: str) -> str:
    """Hashes of all elements of this name in the file, as a policy names them (CSP level 3, section 2.3.1)."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page(), re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
