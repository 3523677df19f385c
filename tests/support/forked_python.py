"""A program for scripts that start Python (``HAPI_PYTHON``): what it is to run is forked, as in :mod:`support.forked`.

Run as a module, this file does what the interpreter does with its arguments: ``-m``, ``-c``, ``-``, or a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from support.forked import ForkedProcess

PYTHON = "support.forked_python"
"""For a :class:`support.forked.ForkedProcess`: ``[PYTHON, "-c", code]``, as ``[sys.executable, "-c", code]``."""
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
if not os.environ.get("PYTHONPATH"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
connection.sendall(request)
pid = int.from_bytes(connection.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(connection.recv(4), "big", signed=True)
os._exit(code if code >= 0 else 128 - code)
"""


@contextlib.contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """The program in ``folder``; one without PYTHONPATH, which is to know nothing of Hapi, gets a new interpreter."""
    program, address = folder / "python", str(folder / "socket")
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        accepting = threading.Thread(target=_accept, args=(listening,), daemon=True)
        accepting.start()
        yield program
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()


def _accept(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # once it is shut down
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    with connection:
        size, ends, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            arguments, environment, folder = json.loads(file.read(int.from_bytes(size, "big")))
        files = [os.fdopen(end, mode) for end, mode in zip(ends, "rww", strict=True)]
        process = ForkedProcess(
            [PYTHON, *arguments], env=environment, stdin=files[0], stdout=files[1], stderr=files[2], cwd=Path(folder),
        )  # fmt: skip
        for file in files:
            file.close()
        connection.sendall(process.pid.to_bytes(4, "big"))
        connection.sendall(process.wait().to_bytes(4, "big", signed=True))


def _as_python(arguments: list[str]) -> None:
    first, *rest = arguments
    if first in ("-c", "-"):
        code = sys.stdin.read() if first == "-" else rest.pop(0)
        sys.argv = [first, *rest]
        exec(code, {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _as_python(sys.argv[1:])
