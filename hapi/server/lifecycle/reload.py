"""SIGHUP: tenants, tokens and certificate are read again, while requests go on.

What is read must be good as a whole: otherwise all that was there stays, and one line of the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from contextlib import suppress

from hapi.errors import HapiError
from hapi.process.threads import Threads
from hapi.server.http.app import Application
from hapi.server.http.response_stream import outcome
from hapi.server.lifecycle import audit
from hapi.server.lifecycle.credentials import read_credentials
from hapi.server.settings import ListenSettings

log = logging.getLogger("hapi.server")

REFUSED = "not reloaded: all stays as it was"


class Reload:
    """Keeps a server's credentials as new as their files were at the last SIGHUP. For the main thread."""

    def __init__(self, listen: ListenSettings) -> None:
        """Read the files of ``listen`` for the first time; errors are those of :func:`read_credentials`.

        A SIGHUP from before that waits for :meth:`run`.
        """
        self._listen = listen
        self._asked = asyncio.Event()
        signal.signal(signal.SIGHUP, lambda *_: self.want())
        self.credentials = read_credentials(listen)
        """The newest good ones."""
        self._reader = Threads(1, "hapi-reload")
        self.tls = self.credentials.tls
        """For listening sockets: each handshake takes the newest certificate. None for plain HTTP."""
        if self.tls is not None:
            self.tls.sni_callback = self._choose  # called in every handshake, also without a name

    def want(self) -> None:
        """Read again soon; several times before that are one."""
        self._asked.set()

    async def run(self, application: Application) -> None:
        """Read whenever it is asked for, and let ``application`` serve by what was read, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                self.credentials = await outcome(self._reader.submit(read_credentials, self._listen))
            except HapiError as error:
                log.error(REFUSED, extra={"audit": "reload", "error": str(error)})
            except Exception:  # the next one must be heard, whatever was wrong with this one
                with suppress(MemoryError):
                    log.exception(REFUSED)
            else:
                self._use(application)

    def close(self) -> None:
        """Stop the thread that reads."""
        self._reader.close()

    def _use(self, application: Application) -> None:
        application.change_tenants(self.credentials.tenants)
        application.service.providers.use_token(self.credentials.token)
        application.board.validity = self.credentials.validity
        audit.administered("reload", **told_tenants(application), tls=self.tls is not None)

    def _choose(
        self, shaking: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext
    ) -> None:
        newest = self.credentials.tls
        if newest is not None and newest is not first:
            shaking.context = newest


def told_tenants(application: Application) -> dict[str, object]:
    """Return the tenants for a line of the audit: the first hundred names, and how many there are."""
    tenants = application.tenants
    names = [] if tenants.open else sorted(tenant.name for tenant in tenants.all)
    return {"tenants": names[:100], "tenants_in_all": len(names)}
