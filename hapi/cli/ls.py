"""``hapi ls STORE`` and ``hapi ls STORE/NAME``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hapi.data.listing import DatasetSummary, describe, list_datasets
from hapi.data.replaced import list_replaced
from hapi.errors import BadRequestError, HapiError, NotFoundError, UsageError
from hapi.repository.known.documents import KnownDocuments
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.packs.lost import pack_sizes, problem_of_packs
from hapi.repository.packs.place import pack_key
from hapi.repository.versions import (
    list_tags,
    list_versions,
    parse_reference,
    resolve,
    version_key,
)
from hapi.store.base import ObjectStore
from hapi.store.open import open_store, split_model_address
from hapi.text import MESSAGE_CHARACTERS, printable

_KIND_WORDS = {"multi": "several labels a sample", "regression": "numbers as labels"}
_MODEL_FIELDS = ("version", "architecture", "digest", "bytes", "created", "parent")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("address", metavar="STORE[/NAME]", help="a store, or one dataset or model in it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the contents of the store."""
    store = open_store(args.address)
    if not any(store.list_names(folder) for folder in ("datasets", "models")):
        detail = _detail(args.address)
        if detail is not None:
            print(json.dumps(detail, indent=1) if args.json else _lines(detail))
            return 0
    datasets = [_dataset(summary) for summary in list_datasets(store)]
    names = store.list_names("models")
    sizes = pack_sizes(store) if names else {}
    with KnownDocuments(store) as known:
        models = side_by_side(store, lambda name: _model(store, name, sizes, known), names)
    if args.json:
        print(json.dumps({"datasets": datasets, "models": models}, indent=1))
        return 0
    if not datasets and not models:
        print(f"{printable(store.url)} holds no datasets and no models")
    _print_datasets(datasets)
    _print_models(models)
    return 0


def _detail(address: str) -> dict[str, Any] | None:
    """The dataset or model at STORE/NAME; None when there is none."""
    try:
        url, name = split_model_address(address)
    except UsageError:
        return None
    store = open_store(url)
    summary = None if "@" in name else describe(store, name)
    if summary is not None:
        return {**_dataset(summary), "replaced": [str(known) for known in list_replaced(store, name)]}
    plain = name.partition("@")[0]
    if plain not in store.list_names("models") and not list_versions(store, plain):
        return None
    with KnownDocuments(store) as known:
        return _model(store, name, {}, known)


def _dataset(summary: DatasetSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "state": summary.state,
        "version": summary.version,
        "samples": summary.count,
        "labels": summary.label_kind,
        "classes": list(summary.classes),
        "bytes": summary.total_bytes,
        "shards": summary.shards,
        "in_place": None if summary.in_place is None else asdict(summary.in_place),
        "skipped": summary.skipped,
        "kind": summary.kind,
        "transform": None if summary.transform is None else summary.transform.to_json(),
        "source": summary.source,
        "created": summary.created,
        "packing": summary.packing,
        "problem": summary.problem,
    }


def _model(
    store: ObjectStore, reference: str, sizes: Mapping[str, int], known: KnownDocuments
) -> dict[str, Any]:
    """A version of a pushed model (the latest without any) as far as it concerns a listing.

    Args:
        store: where it lies.
        reference: NAME or NAME@WANTED.
        sizes: bytes of packs by key, as they are listed; others are asked for.
        known: reads its description.
    """
    try:
        address = parse_reference(reference)
    except BadRequestError as error:
        return {"name": reference, "state": "damaged", "problem": str(error)}
    name, versions = address.name, list_versions(store, address.name)
    if not versions:
        return {"name": name, "state": "incomplete"}
    try:
        document = known.read(version_key(name, resolve(store, address)))
        tags = {tag.name: tag.version for tag in list_tags(store, name).values()}
    except NotFoundError:
        raise
    except (ValueError, HapiError) as error:
        return {"name": name, "state": "damaged", "problem": str(error)}
    fields = {key: document.get(key) for key in _MODEL_FIELDS}
    problem = problem_of_packs(store, _places(document), sizes)
    state = {"state": "whole"} if problem is None else {"state": "damaged", "problem": problem}
    return {"name": name, **state, **fields, "versions": versions, "tags": tags}


def _places(document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Pack and first byte of each tensor of a version: where these cannot be read, its users say what is damaged."""
    with suppress(TypeError, ValueError, LookupError):
        keys = [pack_key(pack) for pack in document["packs"]]
        for _, _, pack, start in document["tensors"]:
            yield keys[pack], int(start)


def _print_datasets(datasets: Sequence[dict[str, Any]]) -> None:
    rows = []
    for d in datasets:
        if d["state"] == "whole":
            size = f"{d['bytes'] / 1e6:.1f} MB"
            state = "whole, being replaced" if d["packing"] else "whole"
            if d["in_place"] is not None:
                state += f", {_in_place(d['in_place'])}"
            if d["labels"] != "single":
                state += f", {_KIND_WORDS[d['labels']]}"
            if d["skipped"]:
                state += f", {d['skipped']} left out"
            rows.append(
                [d["name"], d["version"][:12], str(d["samples"]), str(len(d["classes"])), size, d["kind"],
                 _short_transform(d["transform"]), state]
            )  # fmt: skip
        else:
            note = d["problem"] or "run the same 'hapi pack' or 'hapi index' again to finish it"
            rows.append([d["name"], "-", "-", "-", "-", "-", "-", f"{d['state']}: {note}"])
    _table(["DATA SET", "VERSION", "SAMPLES", "CLASSES", "SIZE", "KIND", "INPUT", "STATE"], rows)


def _print_models(models: Sequence[dict[str, Any]]) -> None:
    rows = []
    for m in models:
        size = f"{m['bytes'] / 1e6:.1f} MB" if isinstance(m.get("bytes"), int) else "-"
        state = m["state"] if "problem" not in m else f"{m['state']}: {m['problem']}"
        digest = str(m.get("digest") or "-")[:12]
        tags = ", ".join(f"{tag}={version}" for tag, version in m.get("tags", {}).items()) or "-"
        version = str(m.get("version") or "-")
        rows.append([m["name"], version, tags, str(m.get("architecture") or "-"), digest, size, state])
    _table(["MODEL", "VERSION", "TAGS", "ARCHITECTURE", "DIGEST", "SIZE", "STATE"], rows)


def _table(header: list[str], rows: list[list[str]]) -> None:
    if not rows:
        return
    shown = [header, *([printable(cell, MESSAGE_CHARACTERS) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _in_place(found: dict[str, Any]) -> str:
    """Location of the shards of an indexed dataset."""
    return f"in place: {found['folder'] or '.'}, {found['format']}"


def _short_transform(transform: dict[str, Any] | None) -> str:
    return "as stored" if transform is None else f"{transform['crop']} of {transform['resize']}"


def _lines(detail: dict[str, Any]) -> str:
    width = max(len(key) for key in detail)
    shown = {key: value for key, value in detail.items() if value not in (None, False)}
    if "in_place" in shown:
        shown["in_place"] = _in_place(shown["in_place"]).removeprefix("in place: ")
    if isinstance(shown.get("classes"), list):
        names = shown["classes"]
        shown["classes"] = (
            f"{len(names)}: {', '.join(map(printable, names[:10]))}{', ...' if len(names) > 10 else ''}"
        )
    if "replaced" in shown:
        shown["replaced"] = (
            f"kept: {', '.join(shown['replaced'])}" if shown["replaced"] else "nothing is kept"
        )
    return "\n".join(
        f"{key.ljust(width)}  {printable(value, MESSAGE_CHARACTERS)}" for key, value in shown.items()
    )
