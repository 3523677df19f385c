"""What a hostile store may do: kinds of dishonesty by name, and which commands must then not succeed."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from dataclasses import dataclass

from support.hostile_store import DATE, Asked, HostileStore, Kind

COMMANDS = ("ls", "verify", "pack", "serve", "mount")
ESCAPES = "\x1b]0;owned\x07\x1b[31mred\r\n"


@dataclass(frozen=True)
class Misdeed:
    """A kind, by its name, and the commands that cannot do their work then."""

    name: str
    kind: Kind
    stops: tuple[str, ...]
    says: str = ""
    """Words that the line of each stopped command has."""


MISDEEDS: list[Misdeed] = []


def misdeed(name: str, *stops: str, says: str = "") -> Callable[[Kind], Kind]:
    """Register a kind; without ``stops`` every command must come through."""

    def register(kind: Kind) -> Kind:
        MISDEEDS.append(Misdeed(name, kind, stops, says))
        return kind

    return register


def is_data(asked: Asked) -> bool:
    """Whether it asks for bytes of the dataset that is there."""
    return asked.reads and asked.about("/small/") and asked.about("shard-")


def is_manifest(asked: Asked) -> bool:
    return asked.reads and asked.key.endswith("small/manifest.json")


READERS = ("verify", "serve", "mount")

# -- time ------------------------------------------------------------------------------------------------


@misdeed("never answers", *COMMANDS, says="did not answer in time")
def never_answers(store: HostileStore, asked: Asked) -> bool:
    asked.wait()
    asked.hang_up()
    return True


@misdeed("head drips", *COMMANDS)
def head_drips(store: HostileStore, asked: Asked) -> bool:
    asked.drip(b"HTTP/1.1 200 OK\r\n" * 100, 0.1)
    asked.hang_up()
    return True


def body_after_head(store: HostileStore, asked: Asked) -> bytes:
    """The bytes that were asked for, after the head that announces them; none when it is no read of a part."""
    if not is_data(asked) or asked.span is None:
        return b""
    first, stop = asked.span
    whole = store.objects[asked.key]
    asked.head(206, Content_Length=str(stop - first), Last_Modified=DATE, ETag='"1"',
               Content_Range=f"bytes {first}-{stop - 1}/{len(whole)}")  # fmt: skip
    return whole[first:stop]


@misdeed("body drips", *READERS)
def body_drips(store: HostileStore, asked: Asked) -> bool:
    if not (body := body_after_head(store, asked)):
        return False
    asked.drip(body, 0.2)
    asked.hang_up()
    return True


@misdeed("answers the listing only", "ls", *READERS, "pack")
def only_lists(store: HostileStore, asked: Asked) -> bool:
    if asked.lists:
        return False
    return never_answers(store, asked)


# -- broken connections ----------------------------------------------------------------------------------


@misdeed("resets at once", *COMMANDS)
def resets(store: HostileStore, asked: Asked) -> bool:
    asked.reset()
    return True


@misdeed("resets in the body", *READERS)
def resets_in_the_body(store: HostileStore, asked: Asked) -> bool:
    if not (body := body_after_head(store, asked)):
        return False
    asked.send(body[: len(body) // 2])
    asked.reset()
    return True


@misdeed("speaks no HTTP", *COMMANDS)
def no_http(store: HostileStore, asked: Asked) -> bool:
    asked.handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n" + ESCAPES.encode())
    asked.hang_up()
    return True


@misdeed("no length, HTTP/1.0", "ls", *READERS, "pack")
def no_length(store: HostileStore, asked: Asked) -> bool:
    if not asked.reads or asked.key not in store.objects or asked.span is not None:
        return False
    data = store.objects[asked.key]
    asked.handler.wfile.write(
        b"HTTP/1.0 200 OK\r\nLast-Modified: " + DATE.encode() + b'\r\nETag: "1"\r\n\r\n' + data
    )
    asked.hang_up()
    return True


# -- lengths and ranges ----------------------------------------------------------------------------------


def _ranged(asked: Asked, data: bytes, first: int, total: int, length: int | None = None) -> None:
    asked.head(206, Content_Length=str(len(data) if length is None else length), Last_Modified=DATE, ETag='"1"',
               Content_Range=f"bytes {first}-{first + len(data) - 1}/{total}")  # fmt: skip
    asked.send(data)


@misdeed("body ends early", *READERS)
def short_body(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    data = store.objects[asked.key][slice(*asked.span)]
    asked.head(206, Content_Length=str(len(data)), Last_Modified=DATE, ETag='"1"',
               Content_Range=f"bytes {asked.span[0]}-{asked.span[1] - 1}/{len(store.objects[asked.key])}")  # fmt: skip
    asked.send(data[: len(data) // 2])
    asked.hang_up()
    return True


@misdeed("range is shorter", *READERS)
def short_range(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    data = store.objects[asked.key][slice(*asked.span)]
    _ranged(asked, data[:-10], asked.span[0], len(store.objects[asked.key]))
    return True


@misdeed("another range", *READERS)
def other_range(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    whole = store.objects[asked.key]
    data = whole[slice(*asked.span)]
    _ranged(asked, data, asked.span[0] + 64, len(whole) + 64)
    return True


@misdeed("bytes of another range", *READERS)
def bytes_of_other_range(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    whole = store.objects[asked.key]
    length = asked.span[1] - asked.span[0]
    _ranged(asked, (whole + whole)[asked.span[0] + 64 :][:length], asked.span[0], len(whole))
    return True


@misdeed("ignores ranges", *READERS)
def ignores_ranges(store: HostileStore, asked: Asked) -> bool:
    if not asked.reads or asked.span is None or asked.key not in store.objects:
        return False
    asked.answer(200, store.objects[asked.key], Last_Modified=DATE, ETag='"1"')
    return True


@misdeed("range without end", *READERS)
def endless_range(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    asked.head(206, Transfer_Encoding="chunked", Last_Modified=DATE, ETag='"1"',
               Content_Range=f"bytes {asked.span[0]}-{asked.span[1] - 1}/100000")  # fmt: skip
    _endless(asked)
    return True


def _endless(asked: Asked) -> None:
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    while not asked.ended.is_set():
        asked.handler.wfile.write(chunk)


@misdeed("manifest without end", "ls", *READERS)
def endless_manifest(store: HostileStore, asked: Asked) -> bool:
    if not is_manifest(asked):
        return False
    asked.head(200, Transfer_Encoding="chunked", Last_Modified=DATE, ETag='"1"')
    _endless(asked)
    return True


@misdeed("manifest of a gigabyte", "ls", *READERS)
def huge_manifest(store: HostileStore, asked: Asked) -> bool:
    if not is_manifest(asked):
        return False
    asked.head(200, Content_Length=str(1 << 30), Last_Modified=DATE, ETag='"1"')
    for _ in range(1 << 10):
        asked.send(b" " * (1 << 20))
    return True


@misdeed("manifest of 2^60 bytes", "ls", *READERS)
def absurd_length(store: HostileStore, asked: Asked) -> bool:
    if not is_manifest(asked):
        return False
    asked.head(200, Content_Length=str(1 << 60), Last_Modified=DATE, ETag='"1"')
    asked.send(b" " * 1000)
    asked.hang_up()
    return True


@misdeed("two lengths", *COMMANDS)
def two_lengths(store: HostileStore, asked: Asked) -> bool:
    asked.handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello, ")
    asked.hang_up()
    return True


@misdeed("lies about sizes", "verify", "serve", "mount")
def wrong_sizes(store: HostileStore, asked: Asked) -> bool:
    if asked.method != "HEAD" or asked.key not in store.objects or not asked.about("/small/"):
        return False
    asked.head(200, Content_Length=str(len(store.objects[asked.key]) * 1000), Last_Modified=DATE, ETag='"1"')
    return True


@misdeed("sizes of 2^62 bytes", "verify", "serve", "mount")
def absurd_sizes(store: HostileStore, asked: Asked) -> bool:
    if asked.method != "HEAD" or asked.key not in store.objects or not asked.about("/small/"):
        return False
    asked.head(200, Content_Length=str(1 << 62), Last_Modified=DATE, ETag='"1"')
    return True


# -- content ---------------------------------------------------------------------------------------------


@misdeed("content changes from read to read", *READERS)
def changing_content(store: HostileStore, asked: Asked) -> bool:
    if not is_data(asked) or asked.span is None:
        return False
    random.seed(store.requests)
    data = random.randbytes(asked.span[1] - asked.span[0])
    _ranged(asked, data, asked.span[0], len(store.objects[asked.key]))
    return True


@misdeed("shards are swapped", *READERS)
def swapped_shards(store: HostileStore, asked: Asked) -> bool:
    if asked.writes or not (asked.about("shard-00000") or asked.about("shard-00001")):
        return False
    there, here = (
        ("shard-00000", "shard-00001") if asked.about("shard-00000") else ("shard-00001", "shard-00000")
    )
    asked.key = asked.key.replace(there, here)
    return False


@misdeed("index ends early", *READERS)
def truncated_index(store: HostileStore, asked: Asked) -> bool:
    if (
        asked.key.endswith("small/manifest.json")
        or not asked.key.endswith("index.safetensors")
        or asked.writes
    ):
        return False
    store.objects[asked.key] = store.objects[asked.key][:5000]
    return False


@misdeed("index of another length by its own words", *READERS)
def lying_index(store: HostileStore, asked: Asked) -> bool:
    if not asked.key.endswith("index.safetensors") or asked.span is None:
        return False
    data = b"\xff" * 7 + b"\x7f" + store.objects[asked.key][8:]
    _ranged(asked, data[slice(*asked.span)], asked.span[0], len(data))
    return True


@misdeed("compressed without being asked", "ls", *READERS)
def gzipped(store: HostileStore, asked: Asked) -> bool:
    if not is_manifest(asked):
        return False
    asked.answer(
        200, gzip.compress(store.objects[asked.key]), Content_Encoding="gzip", Last_Modified=DATE, ETag='"1"'
    )
    return True


@misdeed("another ETag each time")
def changing_etag(store: HostileStore, asked: Asked) -> bool:
    if not asked.reads or asked.key not in store.objects:
        return False
    data = store.objects[asked.key]
    first, stop = asked.span or (0, len(data))
    part = data[first:stop]
    place = {"Content_Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"} if asked.span else {}
    asked.answer(206 if asked.span else 200, part, ETag=f'"{store.requests}"', Last_Modified=DATE, **place)
    return True


@misdeed("no times and no ETags", *READERS)
def no_marks(store: HostileStore, asked: Asked) -> bool:
    if asked.method not in ("GET", "HEAD") or asked.lists or asked.key not in store.objects:
        return False
    asked.answer(200, store.objects[asked.key])
    return True


# -- refusals --------------------------------------------------------------------------------------------


@misdeed("403 for everything", *COMMANDS, says="denies access")
def forbidden(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(403, "AccessDenied", ESCAPES)
    return True


@misdeed("404 for everything", *COMMANDS)
def missing(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(404, "NoSuchBucket", ESCAPES)
    return True


@misdeed("404 for what it lists", "ls", *READERS)
def lists_what_is_not_there(store: HostileStore, asked: Asked) -> bool:
    if asked.lists or not asked.about("/small/") or asked.method not in ("GET", "HEAD"):
        return False
    asked.refuse(404, "NoSuchKey")
    return True


@misdeed("429 for everything", *COMMANDS)
def too_many(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(429, "SlowDown", Retry_After="0")
    return True


@misdeed("500 for everything", *COMMANDS, says="answered 500")
def internal(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(500, "InternalError", ESCAPES)
    return True


@misdeed("503 and come back in thirty years", *COMMANDS, says="answered 503")
def unavailable(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(503, "SlowDown", Retry_After=str(10**9))
    return True


@misdeed("clock is wrong", *COMMANDS, says="clock")
def skewed(store: HostileStore, asked: Asked) -> bool:
    asked.refuse(403, "RequestTimeTooSkewed")
    return True


@misdeed("error of a megabyte with escapes", *COMMANDS)
def huge_error(store: HostileStore, asked: Asked) -> bool:
    asked.answer(400, (ESCAPES * 100_000).encode(), Content_Type="text/html")
    return True


@misdeed("status 299 and nothing", *COMMANDS)
def strange_status(store: HostileStore, asked: Asked) -> bool:
    asked.answer(299)
    return True


@misdeed("304 for objects", "ls", *READERS, "pack")
def not_modified(store: HostileStore, asked: Asked) -> bool:
    if not asked.reads:
        return False
    asked.head(304, ETag='"1"')
    return True


# -- redirects -------------------------------------------------------------------------------------------


@misdeed("redirects to itself", *COMMANDS)
def circle(store: HostileStore, asked: Asked) -> bool:
    asked.answer(307, Location=store.url + asked.handler.path)
    return True


@misdeed("redirects to a file", *COMMANDS)
def to_a_file(store: HostileStore, asked: Asked) -> bool:
    asked.answer(302, Location="file:///etc/passwd")
    return True
