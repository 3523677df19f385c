"""An object store that speaks as much S3 as a server reads with, over a folder; objects hang and keys expire."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class HungStore:
    """Serves ``folder`` as ``s3://bucket`` on a free port; requests whose path fits a pattern in ``hang`` wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hang: set[str] = set()
        self.asked: list[str] = []
        """Paths of the requests that wait, or waited."""
        self.released = threading.Event()
        self.accepted: set[str] | None = None
        """Access keys whose requests are answered; None for all."""
        self.keys: Counter[str] = Counter()
        """Requests by the access key that they are signed with."""
        self.refused = 0
        """Those with a key that is not accepted."""
        self.over = False
        store = self

        class Handler(_Handler):
            hung_store = store

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """For a server: it waits for an hour for an answer."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "HAPI_STORE_READ_TIMEOUT": "3600",
            "HAPI_STORE_RETRIES": "0",
        }

    def release(self) -> None:
        """Let what waits go on, and nothing wait any more."""
        self.hang.clear()
        self.released.set()

    def close(self) -> None:
        self.over = True
        self.release()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hung_store: HungStore

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _answer(self, *, body: bool) -> None:
        store, parts = self.hung_store, urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").strip("/")
        if any(re.search(pattern, self.path) for pattern in store.hang):
            store.asked.append(self.path)
            store.released.wait()
        if store.over:
            self.close_connection = True
            return
        signed = access_key(self.headers)
        store.keys[signed] += 1
        if store.accepted is not None and signed not in store.accepted:
            store.refused += 1
            self._send(403, _EXPIRED, body)
            return
        if not key:
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self._send(200, _listed(store.folder, query.get("prefix", ""), "delimiter" in query), body)
            return
        path = store.folder / key
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", body)
            return
        data, span = path.read_bytes(), self.headers.get("Range")
        if span is None:
            self._send(200, data, body)
            return
        first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        extra = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}
        self._send(206, part, body, extra)

    def _send(self, status: int, data: bytes, body: bool, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(data)), "ETag": '"x"', **(extra or {}),
                   "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def access_key(headers: Message) -> str:
    """The access key that a request is signed with; empty for none."""
    found = re.search(r"Credential=([^/]+)/", headers.get("Authorization", ""))
    return found.group(1) if found else ""


def _listed(folder: Path, prefix: str, one_level: bool) -> bytes:
    keys = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    keys = [key for key in keys if key.startswith(prefix)]
    folders = set()
    if one_level:
        below = {key: key[len(prefix) :].split("/", 1) for key in keys}
        folders = {prefix + parts[0] + "/" for parts in below.values() if len(parts) > 1}
        keys = [key for key, parts in below.items() if len(parts) == 1]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"x"</ETag><Size>{(folder / key).stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for key in keys
    )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
    ).encode()


@contextmanager
def hung_store(folder: Path) -> Iterator[HungStore]:
    """A :class:`HungStore` that is ended whatever happens."""
    store = HungStore(folder)
    try:
        yield store
    finally:
        store.close()
