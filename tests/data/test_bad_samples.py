"""Bad samples of a source: the first ends the packing, or all are left out and counted."""

from __future__ import annotations

import io
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.manifest import Manifest
from hapi.data.verify import verify_dataset
from hapi.errors import DataError, UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.skipped import LISTED_BAD, Skipped
from hapi.ingest.sources.base import Source
from hapi.ingest.sources.open import open_source
from hapi.ingest.sources.torchvision import TorchvisionSource
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

SKIP = PackOptions(shard_bytes=4096, skip_bad=True)


def photo(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


CONTENTS = [photo(n) for n in range(30)]
CUT = (4, 17)
"""Sound at the beginning only: seen by who decodes."""
BAD = {3: b"no image", 9: b"", 29: b"\xff\xd8\xff"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, content in enumerate(CONTENTS):
        data = BAD.get(number, content[:-100] if number in CUT else content)
        path = tmp_path / f"class{number % 3}" / f"{number:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return tmp_path


@pytest.fixture
def store() -> ObjectStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def names(source: Source) -> list[int]:
    return [int(source.describe(n).rpartition("/")[2][:2]) for n in range(source.count)]


def packed(source: Source, store: ObjectStore, options: PackOptions, **more: Any) -> tuple[Manifest, Skipped]:
    skipped = Skipped()
    return pack(source, store, "d", options, on_skipped=skipped.add, **more), skipped


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("decode", [False, True])
def test_bad_samples_are_left_out_and_counted(
    folder: Path, store: ObjectStore, decode: bool, workers: int
) -> None:
    source = open_source(str(folder))
    manifest, skipped = packed(source, store, replace(SKIP, decode=decode, workers=workers))
    bad = {*BAD, *(CUT if decode else ())}
    left = [n for n in names(source) if n not in bad]
    assert manifest.count == len(left) and manifest.skipped == skipped.count == len(bad)
    assert sorted(int(line.partition(".jpg")[0][-2:]) for line in skipped.lines) == sorted(bad)
    dataset = find_dataset(store, "d")
    samples = dataset.read(np.arange(len(left)))
    for position, number in enumerate(left):
        stored = CONTENTS[number][:-100] if number in CUT else CONTENTS[number]
        assert bytes(samples.sample(position)) == stored and samples.labels[position] == number % 3
    assert verify_dataset(store, "d").sound
    summary = describe(store, "d")
    assert summary is not None and summary.skipped == len(bad)


def test_the_first_ends_the_packing_and_the_users_word_goes_on(folder: Path, store: ObjectStore) -> None:
    source = open_source(str(folder))
    with pytest.raises(
        DataError, match=r"\.jpg.*repair or remove it and begin anew \(--restart\), or pass --skip-bad"
    ):
        packed(source, store, replace(SKIP, skip_bad=False))
    manifest, skipped = packed(source, store, SKIP)
    assert manifest.count == 27 and skipped.count == 3


class Stopping(Source):
    """A source that is interrupted when a sample is asked for."""

    def __init__(self, source: Source, stop: int) -> None:
        self.__dict__.update(source.__dict__)
        self._source, self._stop = source, stop

    def sample(self, number: int) -> bytes | memoryview:
        if number == self._stop:
            raise KeyboardInterrupt
        return self._source.sample(number)

    def describe(self, number: int) -> str:
        return self._source.describe(number)

    def content_key(self) -> bytes:
        return self._source.content_key()


@pytest.mark.parametrize("stop", [8, 15, 22, 29])
def test_an_interrupted_packing_knows_what_it_left_out(folder: Path, store: ObjectStore, stop: int) -> None:
    source = open_source(str(folder))
    whole, all_skipped = packed(source, open_store(f"memory://{uuid.uuid4().hex}"), SKIP)
    with pytest.raises(KeyboardInterrupt):
        packed(Stopping(source, stop), store, replace(SKIP, workers=1))
    went_on: list[tuple[int, int, int]] = []
    manifest, skipped = packed(source, store, SKIP, on_start=lambda *known: went_on.append(known))
    assert went_on[0][0] == source.count and 0 < went_on[0][1] <= stop
    assert manifest.version == whole.version and skipped == all_skipped and manifest.skipped == skipped.count


def test_without_the_users_word_the_shards_that_lack_something_are_packed_again(
    folder: Path, store: ObjectStore
) -> None:
    source = open_source(str(folder))
    with pytest.raises(KeyboardInterrupt):
        packed(Stopping(source, 29), store, replace(SKIP, workers=1))
    with pytest.raises(DataError, match="repair or remove it"):
        packed(source, store, replace(SKIP, skip_bad=False))


def test_nothing_but_bad_samples(tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / "a").mkdir()
    for number in range(25):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"not one sample can be used; .*0\.png"):
        packed(open_source(str(tmp_path)), store, SKIP)


@pytest.mark.parametrize("number", [0, 4, 15, 29])
@pytest.mark.parametrize("trouble", ["missing", "damaged", "cut off"])
def test_torchvision_files_that_are_bad(
    tmp_path: Path, store: ObjectStore, number: int, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept as files or made PNG: the sample is named, and left out when the user says so."""
    for n, content in enumerate(CONTENTS):
        path = tmp_path / f"class{n // 10}" / f"{n:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    text = f"torchvision:ImageFolder:root={tmp_path}"
    found = datasets.ImageFolder(str(tmp_path))
    monkeypatch.setattr("torchvision.datasets.ImageFolder", lambda root: found)
    bad = Path(found.samples[number][0])
    if trouble == "missing":
        bad.unlink()
    else:
        bad.write_bytes(b"no image" if trouble == "damaged" else CONTENTS[number][:-100])
    for as_files in (True, False):
        if not as_files:
            monkeypatch.setattr(TorchvisionSource, "_image_files", lambda self, count: None)
        source = open_source(text)
        options = replace(SKIP, decode=True)
        with pytest.raises(DataError, match=rf"torchvision:ImageFolder, sample {number}: .*--skip-bad"):
            packed(source, store, replace(options, skip_bad=False), replace=True, restart=True)
        manifest, skipped = packed(source, store, options, replace=True, restart=True)
        assert manifest.count == 29 and skipped.count == 1
        kinds = {bytes(find_dataset(store, "d").read([k]).data[:2]) for k in range(29)}
        assert kinds == {b"\xff\xd8" if as_files else b"\x89P"}


def test_many_are_counted_and_some_named() -> None:
    skipped = Skipped()
    for number in range(50):
        skipped.add(Skipped(1, [f"sample {number}"]))
    told = skipped.messages()
    assert len(told) == LISTED_BAD + 1 and told[-1] == "left out: 30 more"
    assert Skipped(*skipped.to_json()) == skipped  # type: ignore[arg-type]


def test_what_cannot_be_noted_down_is_refused_before_anything_is_replaced(
    tmp_path: Path, store: ObjectStore
) -> None:
    def arrays(x: np.ndarray[Any, Any]) -> Source:
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(len(x)))
        return open_source(str(tmp_path / "a.npz"))

    pack(arrays(np.zeros((2, 6, 6), dtype=np.uint8)), store, "d")
    with pytest.raises(UsageError, match=r"a\.npz cannot be packed: transform\.crop: .* got 5000"):
        pack(arrays(np.zeros((1, 5000, 5000), dtype=np.uint8)), store, "d", replace=True)
    assert verify_dataset(store, "d").sound
    with pytest.raises(UsageError, match=r"a\.npz cannot be packed: shape of its samples"):
        pack(arrays(np.zeros((1, (1 << 24) + 1), dtype=np.float16)), store, "d", replace=True)
    assert verify_dataset(store, "d").sound


def test_decoding_finds_what_cannot_be_resized(tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (2_500, 1)).save(tmp_path / "a" / "strip.png")
    Image.new("RGB", (25, 25)).save(tmp_path / "a" / "x.png")
    source = open_source(str(tmp_path))
    for preprocess in ("none", "uint8", "float32"):
        options = PackOptions(decode=True, preprocess=preprocess)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"strip\.png: an image of 2500 x 1 is too long .*--skip-bad"):
            pack(source, store, preprocess, options)
