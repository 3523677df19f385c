"""An object store that speaks S3 and misbehaves: honest until it is told a kind of dishonesty.

It serves a handful of objects from memory: GET (with ranges), HEAD, PUT (with "create if absent"), DELETE, and listings
in pages. A kind is a function that looks at each request first, and answers it in its own way or leaves it alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
"""Keys of a page of a listing."""
BUCKET = "bucket"
DATE = "Sat, 21 Nov 2026 00:00:00 GMT"


@dataclass
class Asked:
    """One request, and the ways to answer it."""

    method: str
    key: str
    """Empty for the bucket itself."""
    query: dict[str, str]
    span: tuple[int, int] | None
    """First byte asked for, and the one after the last."""
    headers: dict[str, str]
    body: bytes
    handler: BaseHTTPRequestHandler
    ended: threading.Event
    """Set when the store stops: whoever waits must not wait any longer."""

    @property
    def lists(self) -> bool:
        """Whether it asks for a listing."""
        return self.method == "GET" and not self.key

    @property
    def reads(self) -> bool:
        """Whether it asks for an object's bytes."""
        return self.method == "GET" and bool(self.key)

    @property
    def writes(self) -> bool:
        """Whether it puts an object."""
        return self.method == "PUT"

    @property
    def deletes(self) -> bool:
        """Whether it deletes objects, several at a time perhaps."""
        return self.method == "DELETE" or (self.method == "POST" and "delete" in self.query)

    @property
    def deleted(self) -> list[str]:
        """The keys that it deletes."""
        return re.findall(r"<Key>([^<]*)</Key>", self.body.decode()) or [self.key]

    def about(self, part: str) -> bool:
        """Whether ``part`` is in the key."""
        return part in self.key

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer; an underscore in a header's name stands for a hyphen."""
        self.head(status, Content_Length=str(len(body)), **headers)
        self.send(body)

    def head(self, status: int, **headers: str) -> None:
        """The status line and these headers."""
        self.handler.send_response(status)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        if self.method != "HEAD":
            self.handler.wfile.write(data)

    def refuse(self, status: int, code: str, message: str = "no", **headers: str) -> None:
        """An error as S3 tells one."""
        text = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self.answer(status, text.encode(), Content_Type="application/xml", **headers)

    def hang_up(self) -> None:
        """No more requests on this connection."""
        self.handler.close_connection = True

    def reset(self) -> None:
        """Break the connection off."""
        with contextlib.suppress(OSError):
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.hang_up()
        self.handler.connection.close()

    def wait(self, seconds: float = 600) -> None:
        """Do nothing for so long, or until the store stops."""
        self.ended.wait(seconds)

    def drip(self, data: bytes, seconds: float) -> None:
        """One byte after the other, so long apart."""
        for byte in data:
            if self.ended.is_set():
                return
            self.handler.wfile.write(bytes([byte]))
            self.wait(seconds)


Kind = Callable[["HostileStore", Asked], bool]
"""Answers a request dishonestly and says True, or leaves it to the honest store."""


@dataclass
class HostileStore:
    """A store at ``url``; ``objects`` by key, changed by what is put and deleted."""

    objects: dict[str, bytes]
    kind: Kind | None = None
    requests: int = 0
    url: str = ""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a kind remembers."""

    def start(self) -> None:
        """Listen on a free port of this machine."""
        self._ended = threading.Event()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                store.serve(self)

            do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients leave as they like."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; threads that wait go on and end."""
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def settings(self, patience: float = 1) -> dict[str, str]:
        """The environment in which a client comes here, and has little ``patience``."""
        seconds = {"CONNECT_TIMEOUT": 1, "READ_TIMEOUT": 0.5, "RETRY_SECONDS": 2, "REQUEST_TIMEOUT": 2}
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1", "NO_PROXY": "*", "HAPI_STORE_RETRIES": "1",
            **{f"HAPI_STORE_{name}": f"{patience * limit:g}" for name, limit in seconds.items()},
        }  # fmt: skip

    # -- answering ---------------------------------------------------------------------------------------

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        self.requests += 1
        parts = urlsplit(handler.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        span = handler.headers.get("Range")
        bounds = None
        if span is not None:
            low, _, high = span.removeprefix("bytes=").partition("-")
            bounds = (int(low), int(high) + 1)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.command, key, query, bounds, headers, body, handler, self._ended)
        with contextlib.suppress(OSError):
            if self.kind is None or not self.kind(self, asked):
                self.honest(asked)

    def honest(self, asked: Asked) -> None:
        """As S3 answers."""
        method = {"GET": self._get, "HEAD": self._get, "PUT": self._put}.get(asked.method)
        if asked.deletes:
            for key in asked.deleted:
                self.objects.pop(key, None)
            told = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in asked.deleted)
            asked.answer(200, f"<DeleteResult>{told}</DeleteResult>".encode(), Content_Type="application/xml")
        elif asked.lists:
            asked.answer(200, self.listing(asked), Content_Type="application/xml")
        elif method is None:
            asked.refuse(405, "MethodNotAllowed")
        else:
            method(asked)

    def _get(self, asked: Asked) -> None:
        data = self.objects.get(asked.key)
        if data is None:
            asked.refuse(404, "NoSuchKey")
            return
        about = {
            "Last_Modified": DATE,
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Accept_Ranges": "bytes",
        }
        if asked.span is None:
            asked.answer(200, data, **about)
        elif asked.span[0] >= len(data):
            asked.refuse(416, "InvalidRange")
        else:
            part = data[asked.span[0] : asked.span[1]]
            first = asked.span[0]
            asked.answer(
                206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(data)}", **about
            )

    def _put(self, asked: Asked) -> None:
        if asked.headers.get("if-none-match") == "*" and asked.key in self.objects:
            asked.refuse(412, "PreconditionFailed")
            return
        self.objects[asked.key] = asked.body
        asked.answer(200, ETag=f'"{hashlib.md5(asked.body).hexdigest()}"')

    def listing(self, asked: Asked, objects: dict[str, bytes] | None = None) -> bytes:
        """A page of the listing that was asked for (ListObjectsV2), of ``objects`` or those that are here."""
        known = self.objects if objects is None else objects
        prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter", "")
        after = asked.query.get("continuation-token") or asked.query.get("start-after", "")
        found: list[tuple[str, bool]] = []
        for key in sorted(known):
            if not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            folder = bool(delimiter) and delimiter in rest
            name = prefix + rest.partition(delimiter)[0] + delimiter if folder else key
            if name > after and (name, folder) not in found[-1:]:
                found.append((name, folder))
        page, more = found[:PAGE], len(found) > PAGE
        items = [common(name) if folder else content(name, len(known[name])) for name, folder in page]
        return listing_page(items, next_token=page[-1][0] if more else "")


def content(key: str, size: int) -> str:
    """An object in a listing."""
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;1&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def common(prefix: str) -> str:
    """A folder in a listing."""
    return f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"


def listing_page(items: list[str], next_token: str = "", head: str = "") -> bytes:
    """A page of a listing; ``next_token``: where the next page begins, empty for the last one."""
    following = f"<NextContinuationToken>{escape(next_token)}</NextContinuationToken>" if next_token else ""
    truncated = "true" if next_token else "false"
    return (
        f'<?xml version="1.0"?>{head}<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>{truncated}</IsTruncated>'
        f"{''.join(items)}{following}</ListBucketResult>"
    ).encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def hostile_store(objects: dict[str, bytes], kind: Kind | None = None) -> Iterator[HostileStore]:
    """A store that is stopped whatever happens."""
    store = HostileStore(dict(objects), kind)
    store.start()
    try:
        yield store
    finally:
        store.stop()
