"""``hapi verify`` for a pushed model: every tensor is read and compared with the digest of its push."""

from __future__ import annotations

from collections.abc import Callable

from hapi.errors import DataError, NotFoundError
from hapi.models.graph.digest import ContentDigest
from hapi.repository.manifest import ModelManifest, manifest_key, model_prefix
from hapi.repository.repository import LOCK_NAME, open_model
from hapi.repository.weights_file import TensorEntry
from hapi.store.base import ObjectStore
from hapi.store.damage import BLOCK_BYTES, Damage, Progress, VerifyReport
from hapi.store.locking.locks import is_lock_object

REMEDY = "push the model again with --replace"


def verify_model(
    store: ObjectStore,
    name: str,
    *,
    on_damage: Callable[[Damage], None] = lambda damage: None,
    on_start: Callable[[ModelManifest], None] = lambda manifest: None,
    on_progress: Progress = lambda tensors, size: None,
) -> VerifyReport:
    """Check ``model.json``, the weights' size and every tensor.

    The report's ``samples`` are tensors.

    Args:
        store: where the model lies.
        name: its name there.
        on_damage: told each finding.
        on_start: told the manifest, before tensors are read.
        on_progress: told tensors and bytes since its last call.

    Returns:
        A report with all findings.

    Raises:
        NotFoundError: there is no such model.
        StoreError: the store itself fails.
    """
    report = VerifyReport(name, remedy=REMEDY, on_damage=on_damage)
    try:
        manifest = open_model(store, name).manifest
    except DataError as error:
        report.add(Damage(manifest_key(name), str(error)))
        return report
    report.version = manifest.digest
    on_start(manifest)
    problem = _problem_of_size(store, manifest)
    if problem is not None:
        report.add(Damage(manifest.weights_key, problem))
    for entry in manifest.tensors.values() if problem is None else ():
        if _digest(store, manifest.weights_key, entry, report, on_progress) != entry.digest:
            position = f"tensor {entry.name!r}, bytes {entry.start}..{entry.stop}"
            report.add(Damage(manifest.weights_key, f"{position}: fails its digest"))
    for info in store.list(model_prefix(name)):
        known = info.key in (manifest_key(name), manifest.weights_key)
        if not known and not is_lock_object(info.key, f"{model_prefix(name)}/{LOCK_NAME}"):
            report.add(
                Damage(info.key, f"belongs to nothing ({info.size} bytes); it can be removed", extra=True)
            )
    return report


def _problem_of_size(store: ObjectStore, manifest: ModelManifest) -> str | None:
    try:
        size = store.size(manifest.weights_key)
    except NotFoundError:
        return "missing, with all tensors"
    whole = max((entry.stop for entry in manifest.tensors.values()), default=size)
    return None if size >= whole else f"has {size} bytes instead of {whole}"


def _digest(
    store: ObjectStore, key: str, entry: TensorEntry, report: VerifyReport, on_progress: Progress
) -> str:
    """Digest of a stored tensor, read piece by piece; the report and ``on_progress`` are told of each."""
    digest = ContentDigest()
    for start in range(entry.start, entry.stop, BLOCK_BYTES):
        block = memoryview(bytearray(min(BLOCK_BYTES, entry.stop - start)))
        store.read_into(key, start, block)
        digest.update(block)
        report.size += len(block)
        on_progress(0, len(block))
    report.samples += 1
    on_progress(1, 0)
    return digest.hexdigest()
