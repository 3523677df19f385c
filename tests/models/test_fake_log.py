"""Lines of torch on fake tensors, kept back in one thread at a time."""

from __future__ import annotations

import logging
import threading

import pytest

from hapi.models.fake_log import without_fake_log

NAME = "torch._subclasses.fake_tensor"


def test_lines_of_other_threads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(NAME)
    with caplog.at_level(logging.WARNING, NAME), without_fake_log():
        logger.warning("own")
        other = threading.Thread(target=logger.warning, args=("another's",))
        other.start()
        other.join()
    assert caplog.messages == ["another's"]


def test_ends_in_any_order_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger, first, second = logging.getLogger(NAME), without_fake_log(), without_fake_log()
    before = list(logger.filters)
    for step in (first.__enter__, second.__enter__):
        step()
    first.__exit__(None, None, None)
    with caplog.at_level(logging.WARNING, NAME):
        logger.warning("still kept back")
        second.__exit__(None, None, None)
        logger.warning("logged")
    assert caplog.messages == ["logged"] and logger.filters == before and not logger.disabled
