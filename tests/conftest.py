"""For all tests: signals as a terminal gives them.

A shell that starts a job in the background lets it ignore SIGINT, and nohup SIGHUP; what ignores a signal hands that
on to the processes it starts. The tests send such signals and expect them to arrive, wherever they are run.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
