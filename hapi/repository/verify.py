"""``hapi verify`` for a pushed model: every tensor of a version is read and compared with the digest of its push.

So are the headers of its packs, by which pushes find what the store has, and of a name the versions of its tags.
"""

from __future__ import annotations

from collections.abc import Callable

from hapi.errors import DataError, NotFoundError
from hapi.models.graph.digest import ContentDigest, content_digest
from hapi.repository.entries import TensorEntry
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import read_manifest
from hapi.repository.packs.index import read_heads
from hapi.repository.packs.lost import REMEDY
from hapi.repository.packs.place import pack_id
from hapi.repository.stored import StoredModel
from hapi.repository.versions import (
    REGISTER,
    lost_tags,
    model_prefix,
    parse_reference,
    resolve,
    version_key,
)
from hapi.store.base import ObjectStore
from hapi.store.damage import BLOCK_BYTES, Damage, Progress, VerifyReport
from hapi.text import counted

Verified = set[tuple[str, int, str]]
"""Pack, first byte and digest of tensors that were found sound, and of packs' headers; models share them."""
_NAMED = 3
"""Tensors that a pack lost and that are named one by one; the others are counted."""


def verify_model(
    store: ObjectStore,
    reference: str,
    *,
    verified: Verified | None = None,
    on_damage: Callable[[Damage], None] = lambda damage: None,
    on_start: Callable[[ModelManifest], None] = lambda manifest: None,
    on_progress: Progress = lambda tensors, size: None,
) -> VerifyReport:
    """Check the manifest, the structure, the sizes and headers of packs and every tensor of a version.

    Of a name alone its tags are checked, too.

    The report's ``samples`` are tensors.

    Args:
        store: where the model lies.
        reference: NAME for its latest version, or NAME@VERSION, NAME@TAG, NAME@DIGEST.
        verified: tensors that need not be read again; those that are found sound are added.
        on_damage: told each finding.
        on_start: told the manifest, before tensors are read.
        on_progress: told tensors and bytes since its last call.

    Returns:
        A report with all findings.

    Raises:
        NotFoundError: there is no such model.
        StoreError: the store itself fails.
    """
    verified = set() if verified is None else verified
    report = VerifyReport(reference, remedy=REMEDY, on_damage=on_damage)
    address = parse_reference(reference)
    version = resolve(store, address)
    try:
        manifest = read_manifest(store, address.name, version, fresh=True)
    except DataError as error:
        report.add(Damage(version_key(address.name, version), str(error)))
        return report
    report.version = manifest.digest
    on_start(manifest)
    held = {key: _held_bytes(store, key) for key in manifest.packs}
    if None in held.values():  # unless a collection has packed them anew meanwhile
        manifest = read_manifest(store, address.name, version)
        held = {key: _held_bytes(store, key) for key in manifest.packs}
    stored = StoredModel(store, manifest)
    for key, nbytes in held.items():
        problem = _problem_of_size(manifest, key, nbytes) or _problem_of_header(
            store, key, nbytes or 0, verified
        )
        if problem is not None:
            report.add(Damage(key, problem))
    for entry in manifest.tensors.values():
        place = (entry.pack, entry.start, entry.digest)
        if entry.stop <= (held[entry.pack] or 0) and place not in verified:
            if _digest(stored, entry, report, on_progress) == entry.digest:
                verified.add(place)
            else:
                position = f"tensor {entry.name!r}, bytes {entry.start}..{entry.stop}"
                report.add(Damage(entry.pack, f"{position}: fails its digest"))
    for tag, problem in lost_tags(store, address.name).items() if address.wanted is None else ():
        report.add(Damage(f"{model_prefix(address.name)}/tags/{tag}", problem))
    _find_extra(store, address.name, report)
    return report


def _find_extra(store: ObjectStore, name: str, report: VerifyReport) -> None:
    """Report what lies among a name's versions and tags and is none of them."""
    known = tuple(f"{model_prefix(name)}/{part}/" for part in ("versions", "tags", REGISTER))
    for info in store.list(model_prefix(name)):
        if not info.key.startswith(known):
            report.add(
                Damage(info.key, f"belongs to nothing ({info.size} bytes); it can be removed", extra=True)
            )


def _held_bytes(store: ObjectStore, key: str) -> int | None:
    """Bytes of the pack; None where it is missing."""
    try:
        return store.size(key)
    except NotFoundError:
        return None


def _problem_of_size(manifest: ModelManifest, key: str, held_bytes: int | None) -> str | None:
    entries = [entry for entry in manifest.tensors.values() if entry.pack == key]
    if held_bytes is None:
        return f"missing, with {counted(len(entries), 'tensor')}"
    lost = [repr(entry.name) for entry in entries if entry.stop > held_bytes]
    if not lost:
        return None
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    whole = max(entry.stop for entry in entries)
    return f"has {held_bytes} bytes instead of {whole}; lost: {', '.join(lost[:_NAMED])}{more}"


def _problem_of_header(store: ObjectStore, key: str, held_bytes: int, verified: Verified) -> str | None:
    place = (key, 0, pack_id(key))
    head = b"" if place in verified else read_heads(store, {key: held_bytes}).get(key)
    if not head:  # found sound before, or packed anew since
        return None
    if content_digest(head[: 8 + int.from_bytes(head[:8], "little")]) != pack_id(key):
        return "its header is damaged: pushes do not find the tensors in it, and store them again"
    verified.add(place)
    return None


def _digest(stored: StoredModel, entry: TensorEntry, report: VerifyReport, on_progress: Progress) -> str:
    """Digest of a stored tensor, read piece by piece; the report and ``on_progress`` are told of each."""
    digest = ContentDigest()
    for start in range(entry.start, entry.stop, BLOCK_BYTES):
        block = memoryview(bytearray(min(BLOCK_BYTES, entry.stop - start)))
        stored.read_part(entry.name, start - entry.start, block)
        digest.update(block)
        report.size += len(block)
        on_progress(0, len(block))
    report.samples += 1
    on_progress(1, 0)
    return digest.hexdigest()
