"""``hapi-train`` with a mechanism of planning turned off::

python -m benchmarks.split.without "link probes" --dataset images --model resnet18
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.split.ablate import MECHANISMS, Switch, set_values
from hapi.cli.train import main
from hapi.client.loading import pacing
from hapi.profiler.stages import pipeline

ALL_ON = "none (all on)"
SWITCHES: Mapping[str, Switch] = {
    **MECHANISMS,
    "pacing": set_values(pacing.RequestPacer, delay=lambda self, split: 0.0),
    "pacing lead": set_values(pacing, LONGEST_LEAD=0.0),
    "overlap norm": set_values(pipeline, OVERLAP_NORM=512.0),
}
"""Mechanisms by name. Those of requests' times do not exist in simulated worlds, so that these have none."""

if __name__ == "__main__":
    with ExitStack() as stack:
        SWITCHES[sys.argv[1]](stack)
        sys.exit(main(sys.argv[2:]))
