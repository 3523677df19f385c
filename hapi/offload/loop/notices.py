"""Lines for the user of a loop: they are seen without any set-up of logging, and once where there is one."""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

log = logging.getLogger("hapi.offload")


def notice(text: str, is_cost: bool = False) -> None:
    """Say a line on what offloading does.

    What costs time is a warning. The other lines have the level INFO, which Python shows nobody who did not set up
    logging: for them they go to standard error, as warnings do. Of several ranks only the first one speaks up.

    Args:
        text: the line.
        is_cost: whether it says that training takes longer.
    """
    is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    if is_first and not is_cost and _is_untouched():
        print(text, file=sys.stderr)
    log.log(logging.WARNING if is_cost and is_first else logging.INFO, "%s", text)


def record(text: str, is_cost: bool = False) -> None:
    """Log a line for a caller that says in words of its own what offloading costs."""
    log.info("%s", text)


def _is_untouched() -> bool:
    """Whether logging is as Python sets it up: nobody shows lines of this package, and nobody silenced them."""
    has_level = any(logging.getLogger(name).level for name in ("hapi", "hapi.offload"))
    is_silent = log.manager.disable >= logging.INFO or log.getEffectiveLevel() > logging.WARNING
    return not log.hasHandlers() and not has_level and not is_silent
