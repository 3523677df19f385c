"""ModelSites of the benchmark ``models``: local folders, folders that a server serves, and an OpenStack Swift."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.models.settings import HAPI, HTTP, SWIFT
from benchmarks.models.sites import Site
from benchmarks.storage.samples_served import LoopbackSwift, start_file_server
from benchmarks.testbed.bed import stop_all
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.tiers import start_server_process
from hapi.store.open import open_store


class ModelSites:
    """Sites of all groups, for the length of a ``with`` block; Swift is started when it is first used."""

    def __init__(self, bed: LooseBed, folder: Path) -> None:
        self._bed, self._folder = bed, folder
        self._stack = ExitStack()
        self._swift: LoopbackSwift | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def site(self, place: str, folder: Path) -> Site:
        """Return an empty site at ``place`` for a way that writes to ``folder``.

        Raises:
            UsageError: Swift is not installed.
        """
        folder.mkdir()
        if place != SWIFT:
            return Site(place=place, folder=str(folder))
        if self._swift is None:
            self._swift = self._stack.enter_context(LoopbackSwift(self._bed, self._folder / "swift"))
        return Site(
            place=place, folder=str(folder), url=f"{self._swift.url}/{folder.parent.name}-{folder.name}"
        )

    @contextlib.contextmanager
    def served(self, site: Site, writer: str) -> Iterator[Site]:
        """Serve a site over HTTP, if that is its place: Hapi's models by hapi-server, other files as they are."""
        if site.place != HTTP:
            yield site
            return
        token, folder = secrets.token_hex(16), Path(site.folder)
        if writer == HAPI:
            process, url = start_server_process(self._bed, folder, token, folder.parent)
        else:
            process, url = start_file_server(self._bed, folder)
        try:
            yield replace(site, url=url, token=token)
        finally:
            stop_all([process])

    def remove(self, site: Site) -> None:
        """Remove all that lies at a site."""
        folder = Path(site.folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if site.place == SWIFT:
            store = open_store(site.url)
            for info in store.list():
                store.delete(info.key)
