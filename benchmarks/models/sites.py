"""ModelSites where a model lies, as a client's process uses them: a local folder, a server, an object store."""

from __future__ import annotations

import io
import urllib.parse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.models.content import Tensors
from benchmarks.models.formats import Format, Source
from benchmarks.models.settings import HTTP, LOCAL
from benchmarks.models.shapes import ModelShape
from hapi.errors import TransportError
from hapi.store.open import open_store


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the models of one group of cells lie."""

    place: str
    folder: str
    """Local folder; over HTTP that of the server."""
    url: str = ""
    """The object store's or the server's."""
    token: str = ""


class Keeper(ABC):
    """One way of keeping a model at one site."""

    @abstractmethod
    def store(self, shape: ModelShape, name: str, tensors: Tensors) -> None:
        """Write a model so that it is there after a power failure."""

    @abstractmethod
    def load(self, name: str, into: Tensors) -> Tensors:
        """Load the tensors of which ``into`` has the names; return those that hold the bytes."""

    def stages(self, name: str, into: Tensors) -> dict[str, float]:
        """Return the seconds of the low-level operations of a load, each done alone (DStore, section 6.5)."""
        raise NotImplementedError


class FileKeeper(Keeper):
    """A file of another way: on the disk, or downloaded whole into memory."""

    def __init__(self, site: Site, form: Format) -> None:
        self._site, self._form = site, form
        self._store = open_store(site.url) if site.place not in (LOCAL, HTTP) else None

    def store(self, shape: ModelShape, name: str, tensors: Tensors) -> None:
        """Write the file, or put it into the object store."""
        if self._store is None:
            self._form.save(tensors, Path(self._site.folder) / self._file(name))
        else:
            self._store.put(self._file(name), self._form.encode(tensors))

    def load(self, name: str, into: Tensors) -> Tensors:
        """Fill ``into``."""
        self._form.load(self._source(self._file(name)), into)
        return into

    def _file(self, name: str) -> str:
        return name + self._form.suffix

    def _source(self, file: str) -> Source:
        if self._site.place == LOCAL:
            return Path(self._site.folder) / file
        if self._store is None:
            return downloaded(f"{self._site.url}/{file}")
        stream = _room(self._store.size(file))
        self._store.read_into(file, 0, stream.getbuffer())
        return stream


def downloaded(url: str) -> io.BytesIO:
    """Return what a plain server of files sends, received where it stays.

    Raises:
        TransportError: the server does not send the file.
    """
    parts = urllib.parse.urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        size = answer.length
        if answer.status != 200 or size is None:
            raise TransportError(f"{url}: the server of files answered {answer.status}")
        stream = _room(size)
        view, done = stream.getbuffer(), 0
        while done < size:
            count = answer.readinto(view[done:])
            if not count:
                raise TransportError(f"{url}: ended after {done} of {size} bytes")
            done += count
        return stream
    finally:
        connection.close()


def _room(size: int) -> io.BytesIO:
    stream = io.BytesIO()
    stream.seek(size - 1)
    stream.write(b"\0")
    stream.seek(0)
    return stream
