"""A hapi-server of the wire version before this one, which knows of no other: for a process of its own.

In one that was forked, modules that have the version already are imported anew.
"""

from __future__ import annotations

import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "hapi"]:
    del sys.modules[name]

from hapi.wire import frames  # noqa: E402

frames.WIRE_VERSION -= 1
frames.OLDEST_VERSION = frames.WIRE_VERSION
for made in (frames.data_frame, frames.end_frame, frames.error_frame):
    made.__defaults__ = (*(made.__defaults__ or ())[:-1], frames.WIRE_VERSION)
frames.agreed_version = lambda named: frames.WIRE_VERSION

if __name__ == "__main__":
    from hapi.cli.server import main

    sys.exit(main())
