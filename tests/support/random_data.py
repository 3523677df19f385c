"""The datasets of drawn jobs: images of many modes, formats and sizes, digits, tables of labels, and arrays."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from support.formats_tools import tar
from support.harness import hapi

SIDE = "32"
"""Side of the models' input where a job names no other."""
CLASSES = ("ascii", "mit leerzeichen", "größe", "日本", "-dash")
"""Folders of the photographs: names that a file system, a shell or an encoding could trip over."""


@dataclass(frozen=True)
class Data:
    """A dataset of the store, by its name."""

    name: str
    count: int
    kind: str = "single"
    """Its labels: single, multi or regression."""
    images: bool = True
    """Whether samples are encoded images, which may be resized and transformed at random."""
    classes: int = 5


DATA = (
    Data("digits", 61, classes=10),
    Data("photos", 47),
    Data("indexed", 47),
    Data("shards", 47),
    Data("table", 47, classes=3),
    Data("numbers", 47, kind="regression", classes=1),
    Data("several", 47, kind="multi", classes=3),
    Data("arrays", 40, images=False, classes=4),
    Data("few", 3, classes=2),
    Data("one", 1, classes=1),
    Data("alike", 20, classes=1),
)


def picture(number: int) -> Image.Image:
    """Return a picture that tells its number, of a mode and size that the number chooses."""
    random = np.random.default_rng(number)
    width, height = int(random.integers(20, 90)), int(random.integers(20, 90))
    pixels = random.integers(0, 90, (height, width, 3)) + np.array([number * 53 % 160, number * 31 % 160, 40])
    image = Image.fromarray(pixels.astype(np.uint8))
    mode = ("RGB", "L", "P", "RGBA", "CMYK", "1", "LA", "RGB")[number % 8]
    if mode == "P":
        return image.convert("P", palette=Image.Palette.ADAPTIVE)
    return image.convert(mode)


def encoded(number: int) -> tuple[str, bytes]:
    """Return the extension and the bytes of a picture's file."""
    image, data = picture(number), io.BytesIO()
    extension = {"CMYK": "jpg", "RGB": "jpg" if number % 2 else "webp", "L": "jpeg"}.get(image.mode, "png")
    options: dict[str, object] = {}
    if image.mode == "P":
        options["transparency"] = 0
    if extension == "jpg" and image.mode == "RGB":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 1 + number % 8  # type: ignore[index]  # turned or mirrored
    image.save(data, {"jpg": "JPEG", "jpeg": "JPEG"}.get(extension, extension.upper()), **options)
    return extension, data.getvalue()


def write_photos(folder: Path, count: int) -> None:
    """Write photographs into a folder of each class."""
    for number in range(count):
        extension, data = encoded(number)
        path = folder / CLASSES[number % len(CLASSES)] / f"{number:03}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_store(root: Path) -> Path:
    """Make a store with all of :data:`DATA` below ``root``."""
    store, photos, sized = root / "store", root / "photos", ("--image-size", SIDE)
    hapi("pack", "sklearn:digits", f"{store}/digits", *sized, "--limit", "61")
    write_photos(photos, 47)
    hapi("pack", str(photos), f"{store}/photos", *sized, "--shard-size", "64KiB")
    shutil.copytree(photos, store / "raw")
    hapi("index", "raw", f"{store}/indexed", *sized)
    (store / "tars").mkdir()
    for shard in range(3):
        members = []
        for number in range(shard, 47, 3):
            extension, data = encoded(number)
            members += [(f"{number:03}.{extension}", data), (f"{number:03}.cls", b"%d" % (number % 5))]
        (store / "tars" / f"{shard}.tar").write_bytes(tar(members))
    hapi("index", "tars", f"{store}/shards", *sized)
    _tables(root, store, sized)
    labels = np.arange(40) % 4
    pixels = np.random.default_rng(0).normal(size=(40, 3, 32, 32)).astype(np.float32)
    np.savez(root / "arrays.npz", x=pixels + labels[:, None, None, None], y=labels)
    hapi("pack", str(root / "arrays.npz"), f"{store}/arrays")
    for name, limit in (("few", 3), ("one", 1), ("alike", 20)):
        folder = root / name
        for number in range(limit):
            extension, data = encoded(number)
            path = folder / f"class {number % 2 if name == 'few' else 0}" / f"{number}.{extension}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        hapi("pack", str(folder), f"{store}/{name}", *sized)
    return store


def _tables(root: Path, store: Path, sized: tuple[str, str]) -> None:
    """Pack the photographs with labels from a table: words, numbers, and several for each."""
    names = sorted(str(path.relative_to(root / "photos")) for path in (root / "photos").rglob("*.*"))
    column: dict[str, Callable[[int], str]] = {
        "table": lambda number: "abc"[number % 3],
        "numbers": lambda number: f"{number / 47 - 0.5:.4f}",
        "several": lambda number: ",".join(str(number // bit % 2) for bit in (1, 2, 4)),
    }
    for name, value in column.items():
        labels = "x,y,z" if name == "several" else "label"
        lines = [f"path,{labels}", *(f"{path},{value(number)}" for number, path in enumerate(names))]
        (root / f"{name}.csv").write_text("\n".join(lines), encoding="utf-8")
        table = ("--labels", str(root / f"{name}.csv"), "--label-file-column", "path", "--label", labels)
        hapi("pack", str(root / "photos"), f"{store}/{name}", *sized, *table)
