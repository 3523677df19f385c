"""The Hugging Face hub out of reach: known within seconds, where its library would try again for most of a minute."""

from __future__ import annotations

import importlib
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROBE_SECONDS = 3.0
"""Longest wait for the first answer of the hub."""
_guard = threading.Lock()


@contextmanager
def without_retries() -> Iterator[None]:
    """Let the hub's library use its cache alone in the block, if the hub cannot be reached now."""
    constants = _constants()
    if constants is None or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield
        return
    with _guard:  # the library has one switch for the whole process
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _constants() -> Any:
    try:
        return importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return None


def _answers(url: str) -> bool:
    """Whether anything comes back from ``url``, through this machine's proxies; no name's look-up is waited for."""
    found: list[bool] = []
    probe = threading.Thread(target=lambda: found.append(_asked(url)), name="hapi-hub-probe", daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return bool(found) and found[0]


def _asked(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError as error:  # a certificate that only the hub's library trusts is an answer all the same
        return isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
    except ValueError:
        return True
