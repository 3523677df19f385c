"""True when a server answers for its health: a process that prints one JSON line for each look.

``python -m benchmarks.load.siege_watch URL``; it ends with its standard input. ``at`` is the system's
monotonic clock, which all processes share, ``seconds`` how long the answer took: null when none came in
:data:`LIMIT_SECONDS`.
"""

from __future__ import annotations

import json
import select
import sys
import time
import urllib.error
import urllib.request

EVERY_SECONDS = 0.5
LIMIT_SECONDS = 10.0


def health_seconds(url: str) -> float | None:
    """Seconds until ``/healthz`` answered that the server lives."""
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=LIMIT_SECONDS) as answer:
            answer.read()
    except (OSError, urllib.error.URLError):
        return None
    return time.monotonic() - began


def main() -> None:
    """Print until standard input ends."""
    while True:
        began = time.monotonic()
        print(json.dumps({"at": began, "seconds": health_seconds(sys.argv[1])}), flush=True)
        left = max(0.0, began + EVERY_SECONDS - time.monotonic())
        if select.select([sys.stdin], [], [], left)[0]:
            return


if __name__ == "__main__":
    main()
