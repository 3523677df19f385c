"""A hapi-server of the wire version before this one, which knows of no other: run in a new interpreter."""

from __future__ import annotations

import sys

from hapi.wire import frames

frames.WIRE_VERSION -= 1
frames.OLDEST_VERSION = frames.WIRE_VERSION
for made in (frames.data_frame, frames.end_frame, frames.error_frame):
    made.__defaults__ = (*(made.__defaults__ or ())[:-1], frames.WIRE_VERSION)
frames.agreed_version = lambda named: frames.WIRE_VERSION

if __name__ == "__main__":
    from hapi.cli.server import main

    sys.exit(main())
