"""Lines that torch logs of operators that fail on fake tensors: a traceback, of which the error itself says all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Keep torch from logging failures on fake tensors in this thread; those of others are logged as before."""
    own = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != own

    _LOGGER.addFilter(is_shown)
    try:
        yield
    finally:
        _LOGGER.removeFilter(is_shown)
