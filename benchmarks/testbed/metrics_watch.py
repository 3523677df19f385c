"""A server's memory over time, from its ``/metrics``: a process that prints one JSON line every 100 ms.

``python -m benchmarks.testbed.metrics_watch URL``; it ends with its standard input. It runs on a tier of the test
bed, since the server may be out of reach from elsewhere. ``at`` is the system's monotonic clock, which all
processes share.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import urllib.error
import urllib.request

EVERY_SECONDS = 0.1
GAUGES = {
    "used": "hapi_device_memory_bytes",
    "weights": "hapi_model_cache_bytes",
    "out_of_memory": "hapi_out_of_memory_caught_total",
}
"""Name in a line to name of the metric."""
_TIMEOUT_SECONDS = 10.0


def read_gauges(text: str) -> dict[str, float]:
    """The metrics in a page of them, by their short names, summed over labels; absent ones are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        for short, gauge in GAUGES.items():
            if name.partition("{")[0] == gauge:
                found[short] = found.get(short, 0.0) + float(value)
    return found


def main() -> None:
    """Print until standard input ends; a server that does not answer is left out of the lines."""
    request = urllib.request.Request(f"{sys.argv[1]}/metrics")
    request.add_header("Authorization", f"Bearer {os.environ['HAPI_TOKEN']}")
    while True:
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                line = {"at": began, **read_gauges(answer.read().decode())}
            print(json.dumps(line), flush=True)
        except (OSError, urllib.error.URLError):
            print(json.dumps({"at": began}), flush=True)
        left = max(0.0, began + EVERY_SECONDS - time.monotonic())
        if select.select([sys.stdin], [], [], left)[0]:
            return


if __name__ == "__main__":
    main()
