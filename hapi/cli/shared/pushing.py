"""Push of a run's best model at its end (``hapi-train --push STORE/NAME``)."""

from __future__ import annotations

from pathlib import Path

from hapi.cli.shared.common import say
from hapi.cli.shared.writing import lasting_store
from hapi.errors import HapiError, UsageError
from hapi.paths import check_folder
from hapi.store.local import LocalStore
from hapi.store.open import split_address
from hapi.train.outputs.run_folder import BEST_FILE, MODEL_FILE
from hapi.train.settings import TrainSettings
from hapi.units import format_bytes


def check_push(address: str | None, has_folder: bool) -> None:
    """Check, before hours of training, that a model can be pushed.

    Args:
        address: of ``--push``; None for no push.
        has_folder: whether the run leaves a folder.

    Raises:
        UsageError: the address is none, there will be no model file, or nothing can be written in that folder.
        StoreError: there is no such store.
    """
    if address is None:
        return
    if not has_folder:
        raise UsageError("--push: needs a run folder, whose model is pushed; leave --no-output out")
    store = lasting_store(split_address(address)[0])
    if isinstance(store, LocalStore):
        check_folder(store.root, "name another store with --push")


def push_best(settings: TrainSettings) -> list[str]:
    """Push the run's best model, or its last one where none is the best, and say what was moved.

    Returns a line for a push that failed; the model's file is there all the same.
    """
    if settings.push is None or settings.output is None:
        return []
    from hapi.api.pushing import push_model

    best = Path(settings.output, BEST_FILE)
    path = best if best.is_file() else Path(settings.output, MODEL_FILE)
    if not path.is_file():
        return [f"--push {settings.push}: no epoch ended, so there is no model to push"]
    try:
        pushed = push_model(str(path), settings.push)
    except HapiError as error:
        return [f"{error}; push it later: hapi push {path} {settings.push}"]
    manifest, (url, _) = pushed.model.manifest, split_address(settings.push)
    parent = f", fine-tuned from {manifest.parent}" if manifest.parent else ""
    say(
        f"pushed {path.name} as {manifest.reference!r} into {url}: {format_bytes(pushed.written)} of "
        f"{format_bytes(manifest.nbytes)} are new to the store{parent}"
    )
    return []
