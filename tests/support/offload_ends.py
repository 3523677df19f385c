"""A script that trains in children of its own, each of which ends in another way, as scripts do: at the module's level.

``python offload_ends.py FOLDER END...`` prints each end and the exit code that came of it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from support.offload_loops import groups_of, offloaded, plain, tied_model, train

STEPS = 3
IN_ORDER = {
    "last-line": 0,
    "exit-0": 0,
    "exit-none": 0,
    "exit-after-caught": 0,
    "closed-then-exit-1": 1,
}
"""Ends that remove the files, and their exit codes."""
OUT_OF_ORDER = {
    "error": 1,
    "exit-1": 1,
    "exit-text": 1,
    "raised-exit": 1,
    "caught-exit-then-raised": 1,
    "interrupted": 130,
    "terminated-143": 143,
    "terminated-0": 0,
    "terminated": -signal.SIGTERM,
    "killed": -signal.SIGKILL,
    "left-at-once": 0,
    "kept-by-close": 0,
}
"""Ends that keep them: a preempted job, and one that fails, goes on from there."""


def job(folder: Path) -> Any:
    """Train some steps, and return the optimiser."""
    model = tied_model()
    optimizer = offloaded(model, torch.optim.AdamW(groups_of(model), lr=1e-2), folder)
    train(model, optimizer, range(STEPS), plain)
    return optimizer


def leave(code: int) -> None:
    """Let SIGTERM end the process with a code, as jobs on a cluster do, and send it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as first:  # what a first step loads, children have
        job(Path(first)).close()
    gc.collect()
    gc.freeze()  # a collection in each child would copy all pages
    folder, *ends = sys.argv[1:]
    end = ""
    for name in ends:
        child = os.fork()
        if not child:
            end = name
            break
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    if end:
        optimizer = job(Path(folder) / end)
    if end == "exit-0":
        sys.exit(0)
    elif end == "exit-none":
        sys.exit()
    elif end == "exit-after-caught":
        try:
            sys.exit(1)
        except SystemExit:
            sys.exit(0)
    elif end == "closed-then-exit-1":
        optimizer.close()
        sys.exit(1)
    elif end == "error":
        raise RuntimeError(end)
    elif end == "exit-1":
        sys.exit(1)
    elif end == "exit-text":
        sys.exit("a line on what is wrong")
    elif end == "raised-exit":
        raise SystemExit(1)
    elif end == "caught-exit-then-raised":
        try:
            sys.exit(0)
        except SystemExit:
            raise SystemExit(1) from None
    elif end == "interrupted":
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(130)
    elif end.startswith("terminated-"):
        leave(int(end.removeprefix("terminated-")))
    elif end == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    elif end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "left-at-once":
        os._exit(0)
    elif end == "kept-by-close":
        optimizer.close(remove=False)
