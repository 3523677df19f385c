"""Ranks that do nothing but exchange, until another one is lost: ``python -m support.exchanging_ranks``."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from hapi.errors import OtherRankError
from hapi.train.distributed.group import ProcessGroup
from hapi.train.distributed.launch import launched

SILENCE = 4.0
"""Seconds after which a rank counts as lost."""

if __name__ == "__main__":
    launch = launched()
    if launch is None:
        raise SystemExit("start several")
    try:
        with ProcessGroup(launch, torch.device("cpu"), silence=60) as ranks:
            print("met", flush=True)
            _set_pg_timeout(timedelta(seconds=SILENCE))
            while True:
                ranks.summed(torch.ones(1))
                time.sleep(0.01)
    except OtherRankError as error:
        print(f"rank {launch.rank}: {error}", flush=True)
        sys.exit(1)
