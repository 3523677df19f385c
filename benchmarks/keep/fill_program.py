"""Epochs of a session without any training, until its cache is full; prints what the session says of its fill.

python -m benchmarks.keep.fill_program '{"store": "store", "model": "resnet18", "cache": "on"}'

The argument holds settings of a session. One JSON line on standard output has the fill and the seconds of the epochs.
"""

from __future__ import annotations

import json
import sys
import time

from hapi.allocator import keep_freed_memory
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.config.settings import checked


def main(document: str) -> None:
    """Run the epochs of the settings in ``document``, or as many as the fill needs."""
    keep_freed_memory()
    settings = checked(SessionSettings(**json.loads(document)))
    seconds, kept, fill = [], [], None
    with Session.open(settings) as session:
        for epoch in range(settings.epochs):
            began = time.monotonic()
            for _ in session.epoch(epoch):
                pass  # as fast as features come
            seconds.append(time.monotonic() - began)
            kept.append(session.last.kept.kept)
            fill = session.keeping.to_json()["fill"]
            if fill is not None and fill["seconds"] is not None:
                break
    print(json.dumps({"fill": fill, "epochs": seconds, "kept": kept}))


if __name__ == "__main__":
    main(sys.argv[1])
