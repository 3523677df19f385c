"""Datasets by their address: made from files, or indexed where they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace as with_changes

from hapi.data.manifest import Manifest
from hapi.data.replaced import KEEP_OLD_SECONDS
from hapi.errors import UsageError
from hapi.ingest.in_place.discover import Folder, find_folder
from hapi.ingest.in_place.indexer import IndexOptions, index_folder
from hapi.ingest.labels.file import label_file
from hapi.ingest.labels.options import LabelOptions, WantedKind, column_names
from hapi.ingest.pack import Progress, Start
from hapi.ingest.pack import pack as pack_source
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.skipped import Skipped
from hapi.ingest.sources.base import Source
from hapi.ingest.sources.open import SourceOptions, open_source
from hapi.store.open import open_store, split_address
from hapi.wire.references import TransformSpec

__all__ = ("index", "open_source_for", "pack")


def open_source_for(
    source: str | os.PathLike[str],
    address: str,
    *,
    labels: LabelOptions | None = None,
    classes: Sequence[str] | None = None,
    download: bool = False,
) -> Source:
    """Open the source that :func:`pack` reads for the dataset at ``address``; the store is never part of it.

    Args:
        source: see :func:`pack`.
        address: STORE/NAME.
        labels: a file of labels, and how it is read.
        classes: the names of all classes in the order of their labels.
        download: let torchvision fetch missing files.

    Raises:
        UsageError: the source cannot be used.
    """
    objects = open_store(split_address(address)[0]).local_path("datasets")
    text = os.fspath(source)
    if text.startswith("~"):
        text = os.path.expanduser(text)  # noqa: PTH111  a source need not be a path
    options = SourceOptions(
        **({} if labels is None else vars(labels)),
        classes=None if classes is None else tuple(classes),
        download=download,
        store=None if objects is None else objects.parent,
    )
    return open_source(text, options)


def pack(
    source: str | os.PathLike[str] | Source,
    address: str,
    options: PackOptions | None = None,
    *,
    image_size: int | None = None,
    labels: str | os.PathLike[str] | None = None,
    label: str | Sequence[str] | None = None,
    label_file_column: str | None = None,
    label_kind: WantedKind = "auto",
    skip_unmatched: bool = False,
    classes: Sequence[str] | None = None,
    download: bool = False,
    replace: bool = False,
    restart: bool = False,
    force_lock: bool = False,
    keep_old: float = KEEP_OLD_SECONDS,
    on_start: Start = lambda total, samples, size: None,
    on_progress: Progress = lambda samples, size: None,
    on_skipped: Callable[[Skipped], None] = lambda skipped: None,
) -> Manifest:
    """Make a dataset in a store from files, as ``hapi pack`` does. An unfinished packing of the same goes on.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> (packed := hapi.pack("dots.npz", "store/dots")).count, packed.classes
    (6, ('0', '1', '2'))

    Args:
        source: a folder of images with one folder for each class, a .npy, .npz or .safetensors file,
            ``torchvision:NAME``, ``sklearn:digits`` or ``sklearn:photos``; or an open :class:`Source`.
        address: STORE/NAME, such as ``store/flowers`` or ``s3://bucket/flowers``.
        options: what is packed and how.
        image_size: side in pixels of the square input of a model, instead of ``options.transform``.
        labels: a table of files and labels beside a folder (CSV, TSV, JSON-lines, Parquet), or the labels of an array
            (``.npy``, text): a path, the URL of an object, or its key in the store.
        label: the table's columns that are the label, with commas between or as a sequence; None: the only other one.
        label_file_column: the table's column of files; None: by its name, otherwise the first.
        label_kind: ``single``, ``multi``, ``regression``, or ``auto`` by the values.
        skip_unmatched: leave out files without a row, and rows without a file.
        classes: the names of all classes in the order of their labels.
        download: let torchvision fetch missing files.
        replace: replace the dataset of this name; readers see the old one until the new one is whole.
        restart: throw an unfinished packing away.
        force_lock: take the lock of another writer that is known to be dead.
        keep_old: seconds for which a replaced version stays readable.
        on_start: told all samples, and samples and bytes that an earlier run completed.
        on_progress: told samples and bytes since its last call.
        on_skipped: told the samples that were left out, with ``options.skip_bad``.

    Raises:
        ConflictError: the name is taken, is being packed, or is half packed from something else.
        DataError: a bad sample, unless ``options.skip_bad``.
        UsageError: the source, the address or an option cannot be used.
    """
    url, name = split_address(address)
    store = open_store(url)
    table = LabelOptions(
        labels=None if labels is None else label_file(labels, store), label_columns=column_names(label),
        label_file_column=label_file_column, label_kind=label_kind, skip_unmatched=skip_unmatched,
    )  # fmt: skip
    source = _opened(source, address, table, classes, download)
    if image_size is not None:
        sized = _sized(image_size, source.transform, None if options is None else options.transform)
        options = with_changes(options or PackOptions(), transform=sized)
    return pack_source(
        source, store, name, options,
        replace=replace, restart=restart, force_lock=force_lock, keep_old=keep_old,
        on_start=on_start, on_progress=on_progress, on_skipped=on_skipped,
    )  # fmt: skip


def _opened(
    source: str | os.PathLike[str] | Source,
    address: str,
    labels: LabelOptions,
    classes: Sequence[str] | None,
    download: bool,
) -> Source:
    if not isinstance(source, Source):
        return open_source_for(source, address, labels=labels, classes=classes, download=download)
    if labels != LabelOptions() or classes is not None or download:
        raise UsageError("labels, classes and download are for a source by name; this one is open already")
    return source


def _sized(side: int, own: TransformSpec | None, given: TransformSpec | None) -> TransformSpec:
    if given is not None:
        raise UsageError("image_size and a transform: give one of them")
    sized = TransformSpec.for_image_size(side)
    return with_changes(own or TransformSpec(), resize=sized.resize, crop=sized.crop)


def index(
    folder: str | Folder,
    address: str,
    options: IndexOptions | None = None,
    *,
    format: str | None = None,
    replace: bool = False,
    restart: bool = False,
    force_lock: bool = False,
    keep_old: float = KEEP_OLD_SECONDS,
    on_start: Callable[[int, int], None] = lambda samples, size: None,
    on_progress: Progress = lambda samples, size: None,
    on_skipped: Callable[[Skipped], None] = lambda skipped: None,
) -> Manifest:
    """Make a dataset of shards or images that lie in the store already, without a copy, as ``hapi index`` does.

    >>> import hapi, pathlib, PIL.Image
    >>> for kind in ("cat", "dog"):
    ...     pathlib.Path("store/pets", kind).mkdir(parents=True)
    ...     PIL.Image.new("RGB", (32, 32)).save(f"store/pets/{kind}/1.png")
    >>> indexed = hapi.index("pets", "store/pets-indexed")
    >>> indexed.count, indexed.classes
    (2, ('cat', 'dog'))

    Args:
        folder: key prefix inside the store, also with a pattern (``wds/train-*``); ``.`` for the whole store.
        address: STORE/NAME, such as ``s3://bucket/flowers``.
        options: fields, labels, classes and the transform.
        format: ``webdataset``, ``mds``, ``tfrecord`` or ``objects``; None: by the objects' names.
        replace: replace the dataset of this name.
        restart: throw an unfinished indexing away.
        force_lock: take the lock of another writer that is known to be dead.
        keep_old: seconds for which a replaced version stays readable.
        on_start: told samples and bytes that an earlier run completed.
        on_progress: told samples and bytes since its last call.
        on_skipped: told the samples that were left out, with ``options.skip_bad``.

    Raises:
        ConflictError: the name is taken, or is being written.
        DataError: a bad sample, unless ``options.skip_bad``.
        NotFoundError: nothing lies in the folder.
        UsageError: the folder is of no known format, or of several.
    """
    url, name = split_address(address)
    store = open_store(url)
    found = find_folder(store, folder, format) if isinstance(folder, str) else folder
    indexed = index_folder(
        store, name, found, options or IndexOptions(),
        replace=replace, restart=restart, force_lock=force_lock, keep_old=keep_old,
        on_start=on_start, on_progress=on_progress,
    )  # fmt: skip
    on_skipped(indexed.skipped)
    return indexed.manifest
