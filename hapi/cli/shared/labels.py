"""Flags for a file of labels, of ``hapi pack`` and ``hapi index`` alike."""

from __future__ import annotations

import argparse
from typing import Any

from hapi.ingest.labels.file import label_file
from hapi.ingest.labels.options import WANTED_KINDS, LabelOptions, column_names
from hapi.ingest.labels.table import FILE_COLUMNS
from hapi.store.base import ObjectStore


def configure_labels(group: Any, *, labels_of: str, metavar: str, label_of: str) -> None:
    """Declare the flags.

    Args:
        group: parser or group of its arguments.
        labels_of: end of the help of ``--labels``: the files that are no table.
        metavar: of ``--label``.
        label_of: beginning of the help of ``--label``.
    """
    group.add_argument("--labels", metavar="FILE",
                       help="a table of files and labels (CSV, TSV, JSON-lines, Parquet), also at a URL "
                       f"(s3://bucket/labels.csv) or by its key in STORE; or {labels_of}")  # fmt: skip
    group.add_argument("--label", metavar=metavar, help=label_of)
    group.add_argument("--label-file-column", metavar="COLUMN",
                       help=f"the table's column of files (default: {', '.join(FILE_COLUMNS)}, or the "
                       "first)")  # fmt: skip
    group.add_argument("--label-kind", choices=WANTED_KINDS, default="auto",
                       help="one class, several (columns of 0 and 1, or 'a;b' in one), or numbers (default: by the "
                       "values)")  # fmt: skip
    group.add_argument("--skip-unmatched", action="store_true",
                       help="leave out files without a row, and rows without a file; else the first ends "
                       "the command")  # fmt: skip


def label_options(args: argparse.Namespace, columns: str | None, store: ObjectStore) -> LabelOptions:
    """Return what the flags say of labels.

    Args:
        args: the parsed flags.
        columns: the table's columns as ``--label`` gives them.
        store: store of the dataset, which may have the file.
    """
    return LabelOptions(
        labels=None if args.labels is None else label_file(args.labels, store),
        label_columns=column_names(columns),
        label_file_column=args.label_file_column,
        label_kind=args.label_kind,
        skip_unmatched=args.skip_unmatched,
    )
