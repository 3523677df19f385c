"""A private server process for a store on this machine, without any setup."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence

from hapi.errors import UsageError
from hapi.process.child_server import ChildServer
from hapi.store.open import open_store


class EmbeddedServer:
    """``hapi-server`` on a free loopback port, ended with this process whatever happens to it.

    Another user of this machine cannot use it: it wants a token made for it.
    """

    def __init__(
        self,
        store: str,
        *,
        allow_models: Sequence[str] = (),
        threads: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server, and wait until it listens.

        Args:
            store: a store's URL.
            allow_models: factories of models that it may call.
            threads: of its forward passes; None for its own choice.
            meanwhile: called while it starts, which takes seconds of another processor.

        Raises:
            UsageError: the store cannot be used by two processes, or there is no room for the server's log.
            TransportError: the server did not start.
        """
        if store.startswith("memory:"):
            raise UsageError("--store memory: lives in one process; give a folder or an object store's URL")
        # A URL that cannot be is said so before anything is started.
        self.on_local_disk = open_store(store).local_path("any") is not None
        """True where the store is a folder, so that its samples are on this machine already."""
        self.token = secrets.token_hex(16)
        try:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process below
        except OSError as error:
            raise UsageError(
                f"no room for the embedded server's log: {error.strerror or error}; free some, or set TMPDIR"
            ) from None
        # A line of the log for each request would fill the disk: the file has no name and no end.
        arguments = ["--store", store, "--tell-store", "--log-level", "warning"]
        if threads is not None:
            arguments += ["--threads", str(threads)]
        for name in allow_models:
            arguments += ["--allow-model", name]
        try:
            self._child = ChildServer(
                arguments,
                title="embedded server",
                environment={"HAPI_TOKEN": self.token},
                stderr=self._log,
                last_output=self._logged,
                meanwhile=meanwhile,
            )
        except BaseException:
            self._log.close()
            raise
        self.url = self._child.url

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    def check(self) -> None:
        """Raise :class:`HapiError` with the server's last output when it has ended."""
        self._child.check()

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End the server and wait for it."""
        self._child.close()
        self._log.close()
