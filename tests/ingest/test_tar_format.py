"""WebDataset's tar shards: what is in them is found as tarfile finds it, and damage is an error or a bad sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.formats_tools import image, samples, shard_of, tar

from hapi.errors import DataError
from hapi.ingest.formats import shard as shard_module
from hapi.ingest.formats import webdataset
from hapi.ingest.formats.shard import Bad, Fields, Found
from hapi.ingest.formats.tar import members

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def scan(data: bytes, fields: Fields | None = None) -> list[Found | Bad]:
    return list(webdataset.scan(shard_of(data), fields or Fields()))


def problems(data: bytes, fields: Fields | None = None) -> list[str]:
    return [f"{item.name}: {item.problem}" for item in scan(data, fields) if isinstance(item, Bad)]


_names = st.lists(
    st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300
    ).filter(lambda name: name.strip("/") and not name.endswith("/")),
    max_size=8,
)


@given(_names, st.sampled_from(FORMS[1:]), st.sampled_from([700, 4 << 20]))
def test_members_are_those_of_tarfile(names: list[str], form: int, block: int) -> None:
    data = tar([(name, bytes([n]) * 37 * n * n) for n, name in enumerate(names)], form)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        wanted = [(info.name, info.offset_data, info.size) for info in archive]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "BLOCK_BYTES", block)
        shard = shard_of(data)
        found = list(members(shard))
        assert [(m.name.rstrip("/") or m.name, m.offset, m.size) for m in found] == wanted
        for n, member in enumerate(found):
            assert shard.read(member.offset, member.size) == bytes([n]) * 37 * n * n
        assert shard.checksum() == xxhash.xxh3_64_intdigest(data)


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_every_form_of_tar(form: int) -> None:
    folder = "a-folder-of-a-long-name/" * 4
    found = scan(tar([(f"{folder}{name}", data) for name, data in samples(range(5))], form))
    assert [(item.name, item.label) for item in found if isinstance(item, Found)] == [
        (f"{folder}{n:06d}", n % 3) for n in range(5)
    ]


def test_labels_and_images_where_the_user_says() -> None:
    def document(value: object) -> bytes:
        return json.dumps({"label": value, "kind": "cat", "n": 1}).encode()

    one, two = image(1), image(2)
    assert [
        item.label
        for item in scan(tar([("a.png", one), ("a.json", document("7"))]))
        if isinstance(item, Found)
    ] == [7]
    both = tar([("d/a.cls", b" 5\n"), ("d/a.jpg", one), ("d/a.json", document(3)), ("d/a.mask.png", two)])
    (found,) = scan(both)
    assert found == Found(1536, len(one), 5, "d/a")
    (found,) = scan(both, Fields(image="MASK.png", label="kind"))
    assert isinstance(found, Found) and (found.label, found.length) == ("cat", len(two))
    (found,) = scan(both, Fields(label=".cls"))
    assert isinstance(found, Found) and found.label == 5
    (found,) = scan(both, Fields(label="missing"))
    assert isinstance(found, Found) and found.label is None
    (found,) = scan(tar([("a.txt", b"A Cat"), ("a.webp", one)]), Fields(label="txt"))
    assert isinstance(found, Found) and found.label == "A Cat"


def test_bad_samples_are_told_and_the_others_found() -> None:
    png = image(1)
    data = tar([
        ("first.png", png), ("first.cls", b"0"),
        ("blind.cls", b"1"), ("blind.txt", b"x"),
        ("two.png", png), ("two.jpg", png), ("two.cls", b"1"),
        ("double.png", png), ("double.png", png),
        ("first.png", png), ("first.cls", b"0"),
        ("binary.png", png), ("binary.cls", b"\xff\xfe"),
        ("long.png", png), ("long.cls", b"1" * 5000),
        ("broken.png", png), ("broken.json", b"{"),
        ("listed.png", png), ("listed.json", b'{"label": [1]}'),
        ("deep.png", png), ("deep.json", b"[" * 100_000),
        ("twice.png", png), ("twice.json", b'{"label": 1, "label": 2}'),
        ("unsafe.png", png), ("unsafe.json", b'{"label": 5, "punsafe": NaN}'),
        (".hidden.png", png), ("README", b"text"), ("folder/.png", png),
        ("last.PNG", png), ("last.cls", b"2"),
    ])  # fmt: skip
    found = scan(data)
    assert [(item.name, item.label) for item in found if isinstance(item, Found)] == [
        ("first", 0),
        ("unsafe", 5),
        ("last", 2),
    ]
    lines = [f"{item.name}: {item.problem}" for item in found if isinstance(item, Bad)]
    for line, words in zip(
        lines,
        (
            "blind: it has no image (jpg, jpeg, png, webp, ppm, bmp), only .cls, .txt",
            "two: it has several images (jpg, png); name the one to take with --image",
            "double: it has two members .png",
            "first: its members lie apart, or it is there twice",
            "binary: its label .cls is no text",
            "long: its label .cls has 5000 bytes",
            "broken: its member .json is damaged",
            "listed: the field 'label' of its member .json is neither a whole number nor text",
            "deep: its member .json is damaged",
            "twice: its member .json is damaged (field 'label' is given twice)",
        ),
        strict=True,
    ):
        assert line.startswith(words)


def special(kind: bytes, **fields: object) -> bytes:
    """An archive whose image has this type."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.cls"))
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = kind, "b.png"
        info.pax_headers = {key: str(value) for key, value in fields.items()}
        archive.addfile(info)
    return buffer.getvalue()


def test_links_and_sparse_files_are_bad_samples() -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        assert problems(special(kind)) == ["a: its member .png cannot be read in place: it is a link"]
    sparse = "a: its member .png cannot be read in place: it is a sparse file, which has to be unpacked"
    assert problems(special(tarfile.GNUTYPE_SPARSE)) == [sparse]
    assert problems(special(tarfile.REGTYPE, **{"GNU.sparse.major": 1})) == [sparse]
    assert problems(special(tarfile.DIRTYPE)) == [
        "a: it has no image (jpg, jpeg, png, webp, ppm, bmp), only .cls"
    ]


def with_header(change: Callable[[bytearray], None], good_sum: bool = True) -> bytes:
    """A shard whose second header is changed, with a fitting checksum."""
    data = bytearray(tar(samples(range(3)), tarfile.GNU_FORMAT))
    second = 512 + (len(image(0)) + 511) // 512 * 512
    header = data[second : second + 512]
    change(header)
    if good_sum:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    data[second : second + 512] = header
    return bytes(data)


def _size(field: bytes) -> Callable[[bytearray], None]:
    def change(header: bytearray) -> None:
        header[124:136] = field

    return change


def _kind(kind: bytes) -> Callable[[bytearray], None]:
    def change(header: bytearray) -> None:
        header[156:157] = kind

    return change


def _long_name(header: bytearray) -> None:
    _kind(b"L")(header)
    _size(b"00020000000\0")(header)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_header(_size(b"77777777777\0")), "cut off in '000000.cls': its bytes are"),
        (with_header(_size(b"\x80" + b"\xff" * 11)), "cut off in '000000.cls': its bytes are"),
        (with_header(_size(b"\xff" * 12)), "a member whose size is no number"),
        (with_header(_size(b"-0000000001\0")), "a member whose size is no number"),
        (with_header(_size(b"12x45678901\0")), "a member whose size is no number"),
        (with_header(_kind(b"Q")), "a member of the unknown type b'Q'"),
        (with_header(_kind(b"x")), "a damaged pax header"),
        (with_header(_long_name), "a name or pax header of 4194304 bytes"),
        (with_header(_size(b"00000000002\0"), good_sum=False), "no header of a member there (its checksum"),
        (b"", "does not end as a tar archive does"),
        (b"\0" * 100, None),
        (b"x" * 511, "cut off in the header of a member at byte 0"),
        (b"\x1f\x8b" + b"x" * 600, "is compressed (gzip), so that"),
        (tar(samples(range(2))) + b"x" * 512, "no header of a member there"),
        (tar(samples(range(2))) + b"x", "cut off in the header"),
        (tar(samples(range(2))) * 2, None),
    ],
)  # fmt: skip
def test_what_is_no_whole_archive_is_one_error(data: bytes, message: str | None) -> None:
    if message is None:
        scan(data)
        return
    with pytest.raises(DataError) as raised:
        scan(data)
    assert str(raised.value).startswith("shard a.tar ") and message in str(raised.value)


def test_an_archive_behind_another_is_found() -> None:
    found = scan(tar(samples(range(2))) + b"\0" * 512 * 100 + tar(samples(range(2, 4))))
    assert [item.name for item in found if isinstance(item, Found)] == [f"{n:06d}" for n in range(4)]


_SHARD = tar([(f"{'long/' * 30}{name}", data) for name, data in samples(range(4))])
_WHOLE = scan(_SHARD)


@given(st.integers(0, len(_SHARD) - 1))
def test_a_cut_anywhere_is_never_silent(stop: int) -> None:
    try:
        found = scan(_SHARD[:stop])
    except DataError as error:
        assert "a.tar" in str(error)
    else:
        assert found == _WHOLE and not _SHARD[stop:].strip(b"\0")


@given(st.data())
def test_changed_bytes_are_found_or_leave_every_sample(data: st.DataObject) -> None:
    """An error, a bad sample, or as many samples as before: nothing else comes out, and nothing is lost."""
    damaged = bytearray(_SHARD)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(_SHARD) - 1))
        damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    try:
        found = scan(bytes(damaged))
    except DataError:
        return
    bad = sum(isinstance(item, Bad) for item in found)
    assert bad or len(found) == len(_WHOLE)


@given(st.lists(st.one_of(st.binary(max_size=600), st.just(b"\0" * 512), st.just(_SHARD[:1024])), max_size=6))
def test_any_bytes_end_in_samples_or_one_error(pieces: list[bytes]) -> None:
    try:
        scan(b"".join(pieces))
    except DataError as error:
        assert "a.tar" in str(error)
