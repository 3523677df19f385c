"""Handing of open files from a process that holds a pack to one that wants it, over a socket of its own.

    DIR/holder-PID-T     listens while its process lives

A newcomer sends the name of a pack to one after the other, and gets the file of its memory from the first that holds
it. What is behind such a file lives as long as any process has it: its maker may end, or be killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "holder-"
_MOST_NAME = 64
ANSWER_SECONDS = 5.0
"""Longest wait for a holder's answer: it may have been stopped."""


class Holders:
    """This process among those that hold packs of one folder; thread-safe. A fork of the process holds nothing."""

    def __init__(self, folder: Path) -> None:
        """Hold packs of ``folder``, which has to be there by the first :meth:`offer`."""
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, list[int]] = {}
        """Files by pack: one for each time that this process mapped it."""
        self._pid = 0
        self._name: Path | None = None

    def offer(self, pack: str, file: int) -> None:
        """Give the open file to whoever asks for ``pack``, until :meth:`withdraw`; the file is this object's then.

        Raises:
            OSError: no socket can be made; the file is closed.
        """
        try:
            with self._lock:
                if self._pid != os.getpid():
                    self._listen()
                self._files.setdefault(pack, []).append(file)
        except OSError:
            os.close(file)
            raise

    def withdraw(self, pack: str) -> None:
        """Undo an :meth:`offer` of ``pack``."""
        with self._lock:
            files = self._files.get(pack, []) if self._pid == os.getpid() else []
            file = files.pop() if files else None
            if not files:
                self._files.pop(pack, None)
        if file is not None:
            os.close(file)

    def get(self, pack: str) -> int | None:
        """Return the file of a pack from a process that holds it, this one included; None where nobody does."""
        with self._lock:
            own = self._files.get(pack) if self._pid == os.getpid() else None
            if own:
                return os.dup(own[0])
        for path in self._folder.glob(f"{_PREFIX}*"):
            if path != self._name and (found := _asked(path, pack)) is not None:
                return found
        return None

    def _listen(self) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        path, early = self._folder / f"{_PREFIX}{name}", self._folder / f"early-{name}"
        _remove_dead(self._folder)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short(early) as address:
                listening.bind(address)
            listening.listen(64)
            early.rename(path)  # before it listened, others would take it for a dead one
        except OSError:
            listening.close()
            early.unlink(missing_ok=True)
            raise
        self._files, self._pid, self._name = {}, os.getpid(), path
        weakref.finalize(self, _end, listening, path, self._pid)
        threading.Thread(
            target=_serve, args=(weakref.ref(self), listening), name="hapi-holder", daemon=True
        ).start()

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(ANSWER_SECONDS)
        pack = peer.recv(_MOST_NAME).decode("ascii", errors="replace")
        with self._lock:
            files = self._files.get(pack)
            if files:
                socket.send_fds(peer, [b"+"], files[:1])
                return
        peer.send(b"-")


def _serve(holders: weakref.ref[Holders], listening: socket.socket) -> None:
    while True:
        try:
            peer, _ = listening.accept()
        except OSError:
            return
        with peer, contextlib.suppress(OSError):
            held = holders()
            if held is None:
                return
            held._answer(peer)
            del held


def _remove_dead(folder: Path) -> None:
    """Remove the sockets of killed processes, which nobody asks any more where a living one has all packs."""
    for path in folder.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, contextlib.suppress(OSError):
            peer.setblocking(False)
            _connect(peer, path)


def _asked(path: Path, pack: str) -> int | None:
    """Ask one process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(ANSWER_SECONDS)
        try:
            _connect(peer, path)
            peer.send(pack.encode("ascii"))
            _, files, _, _ = socket.recv_fds(peer, 1, 1)
        except OSError:
            return None
    return files[0] if files else None


def _connect(peer: socket.socket, path: Path) -> None:
    """Connect to a process; a socket that nobody listens at any more is removed."""
    try:
        with _short(path) as address:
            peer.connect(address)
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield an address for a socket's path, which may be longer than an address is (108 bytes)."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _end(listening: socket.socket, path: Path, pid: int) -> None:
    """Stop listening; a fork of the process has the socket too, and leaves it as it is."""
    with contextlib.suppress(OSError):
        if os.getpid() == pid:
            path.unlink()
            listening.shutdown(socket.SHUT_RDWR)  # its thread waits in accept
    listening.close()
