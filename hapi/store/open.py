"""The store at a URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from hapi.errors import UsageError
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.wire.references import given_model, given_name

LOCAL_SCHEMES = ("", "file")
REMOTE_SCHEMES = ("memory", "s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")


def open_store(url: str) -> ObjectStore:
    """The store at ``url``: a folder path, ``file://``, ``memory://NAME``, ``s3://``, ``gs://`` or ``az://``.

    >>> import hapi
    >>> store = hapi.open_store("store")
    >>> store.put("notes/first", b"some bytes")
    >>> store.get("notes/first")
    b'some bytes'

    Nothing is contacted yet. S3 settings come from the usual ``AWS_*``
    environment and profiles (``s3.py``), GCS and Azure from theirs, timeouts and retries from ``HAPI_STORE_*``
    (``connect.py``). All ``memory://NAME`` of one name in one process are one store.
    """
    if not url or "\0" in url:
        raise UsageError(
            "the store's URL is empty or has a NUL in it; give a folder, s3://BUCKET/PREFIX, ..."
        )
    scheme = url.split("://", 1)[0].lower() if "://" in url else ""
    if scheme in LOCAL_SCHEMES:
        return LocalStore(_folder(url) if scheme else url)
    if scheme in REMOTE_SCHEMES:
        from hapi.store.remote import RemoteStore  # obstore is loaded only by those who need it

        return RemoteStore(url)
    raise UsageError(
        f"store {url[:200]!r}: unknown scheme {scheme!r}; use a folder, file://, memory://, s3://, gs:// or az://"
    )


def _folder(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError(f"store {url[:200]!r}: write file:///absolute/folder")
    return unquote(parts.path)


def split_address(address: str) -> tuple[str, str]:
    """``STORE/NAME`` as the store's URL and the checked name; :class:`UsageError` when it is neither.

    A slash at its end, as a shell completes a folder's name, means nothing.
    """
    store, name = _split(address)
    return store, given_name(name, f"{address[:200]!r}")


def split_model_address(address: str) -> tuple[str, str]:
    """``STORE/NAME[@REF]`` as the store's URL and the checked reference to a pushed model; see
    :func:`split_address`.
    """
    store, reference = _split(address)
    return store, given_model(reference, f"{address[:200]!r}")


def _split(address: str) -> tuple[str, str]:
    store, slash, name = address.rstrip("/").rpartition("/")
    scheme, separator, path = store.partition("://")
    if not slash or (store.endswith(":/") or (separator and not path and scheme not in ("file", "memory"))):
        raise UsageError(
            f"{address[:200]!r} is not STORE/NAME; for example store/flowers or s3://bucket/flowers"
        )
    return store or "/", name
