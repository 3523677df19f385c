"""WebDataset: tar shards; consecutive members whose names differ only behind the first dot are one sample.

The name of a sample is a member's path up to the first dot of its last part; the rest is the field
(``n01/0042.seg.png``: sample ``n01/0042``, field ``seg.png``), as in WebDataset's ``base_plus_ext``. Members
without such a name (folders, ``.hidden``) belong to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hapi.errors import UsageError
from hapi.ingest.formats.shard import Bad, Fields, Found, Label, ShardBytes, label_of
from hapi.ingest.formats.tar import Member, members
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.wire.documents import parse_document

NAME = "webdataset"
IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MEMBER_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_MAX_LABEL, _MAX_JSON = 4 << 10, 16 << 20
"""Most bytes of a label's member, and of a JSON member."""


class _WrongError(Exception):
    """Reason why a sample cannot be used."""


@dataclass
class _Sample:
    name: str
    fields: dict[str, Member] = field(default_factory=dict)
    twice: str | None = None
    """A field that is there more than once."""


def claims(base: str) -> bool:
    """Return whether this last part of a key is a tar shard's, or that of a compressed one, which is refused
    later.
    """
    return base.lower().endswith((".tar", *_COMPRESSED))


def shards_of(store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the tar shards by name; :class:`UsageError` when one is compressed."""
    for info in objects:
        if info.key.lower().endswith(_COMPRESSED):
            raise UsageError(
                f"{store.url}/{info.key} is compressed, so that samples cannot be read from the middle of it: "
                "unpack the shards, or pack the images with 'hapi pack'"
            )
    return [info for info in objects if info.key.lower().endswith(".tar")]


def scan(shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]:
    """Yield the samples of a tar shard in their order."""
    seen: set[str] = set()
    sample: _Sample | None = None
    for member in members(shard):
        match = _MEMBER_NAME.fullmatch(member.name)
        if match is None:
            continue
        name, extension = match[1], match[2].lower()
        if sample is not None and sample.name != name:
            yield _result(shard, sample, fields)
            sample = None
        if sample is None:
            sample = _Sample(name)
            if name in seen:
                sample.twice = "its members lie apart, or it is there twice"
            seen.add(name)
        elif extension in sample.fields:
            sample.twice = f"it has two members .{extension}"
        sample.fields[extension] = member
    if sample is not None:
        yield _result(shard, sample, fields)


def _result(shard: ShardBytes, sample: _Sample, fields: Fields) -> Found | Bad:
    try:
        if sample.twice is not None:
            raise _WrongError(sample.twice)
        image = _image(sample, fields.image)
        label = None if fields.unlabelled else _label(shard, sample, fields.label)
        return Found(image.offset, image.size, label, sample.name)
    except _WrongError as error:
        return Bad(sample.name, str(error))


def _image(sample: _Sample, wanted: str | None) -> Member:
    extensions = IMAGES if wanted is None else tuple(wanted.lower().lstrip(".").split(";"))
    present = [extension for extension in extensions if extension in sample.fields]
    if not present:
        raise _WrongError(f"it has no image ({', '.join(extensions)}), only {_fields(sample)}")
    if len(present) > 1:
        raise _WrongError(f"it has several images ({', '.join(present)}); name the one to take with --image")
    return _sound(sample, present[0])


def _sound(sample: _Sample, extension: str) -> Member:
    member = sample.fields[extension]
    if member.problem is not None:
        raise _WrongError(f"its member .{extension} cannot be read in place: {member.problem}")
    return member


def _label(shard: ShardBytes, sample: _Sample, wanted: str | None) -> Label:
    """The label in the member ``cls`` or in the field ``label`` of the member ``json``, or where the user says."""
    own = "cls" if wanted is None else wanted.lower().lstrip(".")
    if own in sample.fields:
        member = _sound(sample, own)
        if member.size > _MAX_LABEL:
            raise _WrongError(f"its label .{own} has {member.size} bytes")
        try:
            return label_of(shard.read(member.offset, member.size).tobytes().decode())
        except UnicodeDecodeError:
            raise _WrongError(f"its label .{own} is no text") from None
    if "json" in sample.fields:
        return _json_label(shard, _sound(sample, "json"), "label" if wanted is None else wanted)
    return None


def _json_label(shard: ShardBytes, member: Member, key: str) -> Label:
    if member.size > _MAX_JSON:
        raise _WrongError(f"its member .json has {member.size} bytes")
    try:
        # Writers of such shards write NaN for a figure that is not known.
        document = parse_document(shard.read(member.offset, member.size).tobytes(), nan=True)
    except ValueError as error:
        raise _WrongError(f"its member .json is damaged ({str(error)[:100]})") from None
    value = document.get(key) if isinstance(document, dict) else None
    if isinstance(value, str):
        return label_of(value)
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise _WrongError(f"the field {key!r} of its member .json is neither a whole number nor text")
    return value


def _fields(sample: _Sample) -> str:
    return ", ".join(f".{extension}" for extension in sorted(sample.fields))[:200]
