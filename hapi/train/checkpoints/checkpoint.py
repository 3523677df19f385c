"""Checkpoints: the state of a training's parts and the place in the sequence, written whole or not at all."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import torch

from hapi.atomic import replacing
from hapi.client.job_context import JobContext
from hapi.data.epoch_order import Shuffle
from hapi.errors import ConflictError, HapiError, UsageError
from hapi.paths import open_file
from hapi.store.open import open_store
from hapi.train.checkpoints.checkpoint_files import existing, make_way
from hapi.train.checkpoints.resuming import Change, changes_of
from hapi.train.report import Measured, Totals

FORMAT = 10
log = logging.getLogger("hapi.client")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Position of a training: the next batch, and what the running epoch cost."""

    epoch: int = 0
    batch: int = 0
    measured: Measured = field(default_factory=Measured)
    """Measurements of the epoch so far."""

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Parse strictly; ValueError on anything that :func:`save` would not have written."""
        fields = dict(document)
        progress = cls(**{**fields, "measured": Measured.from_document(fields.get("measured", {}))})
        if not all(type(v) is int and v >= 0 for v in (progress.epoch, progress.batch)):
            raise ValueError("its progress is not made of counts")
        return progress


class Part(Protocol):
    """A part of a training with a state that a checkpoint keeps: layers, optimiser, sums."""

    def state_dict(self) -> Any:
        """Return the state: tensors, numbers, text, and dicts and lists of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state; any exception refuses it."""


@dataclass(frozen=True, eq=False)
class KeptState:
    """A state that was taken before it is saved."""

    state: Any

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Any, /) -> Any:
        """Refuse: it is only there to be saved."""
        raise TypeError("a state that was taken cannot be replaced")


OPTIONAL = ("best",)
"""Parts that a checkpoint may be without, because they do not change what is trained."""


def keep_order(job_context: JobContext, kept: Mapping[str, Any]) -> None:
    """Go on in the order of the identity that was ``kept``; one that makes no sense stays different."""
    shuffle, now = kept.get("shuffle"), job_context.order.shuffle
    try:
        found = Shuffle.parse(shuffle if isinstance(shuffle, str) else "", now)
    except UsageError:
        return
    if found != now:
        log.warning("training goes on in the checkpoint's order, %s; begun anew it would be %s", found, now)
        job_context.keep_shuffle(found)


@contextmanager
def claimed(path: str, flag: str) -> Iterator[None]:
    """Keep other jobs from writing ``path`` during the block.

    Args:
        path: the checkpoint.
        flag: its name for messages, such as ``--output runs/flowers``.

    Raises:
        ConflictError: another job writes it already.
    """
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock stays in the folder only while the job runs, and a killed job's counts for nothing.
        lock = open_store(str(target.parent)).lock(f"{target.name}.lock")
        lock.__enter__()
    except ConflictError:
        raise ConflictError(
            f"{flag}: another hapi-train is writing there; wait for it, or name another place"
        ) from None
    except (OSError, HapiError) as error:
        raise UsageError(f"{flag}: cannot be written there: {error}") from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def save(
    path: str,
    *,
    parts: Mapping[str, Part],
    progress: Progress,
    identity: dict[str, Any],
    epochs: list[dict[str, Any]],
    plan: dict[str, Any] | None,
    totals: Totals,
    network: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    keep: int = 1,
) -> None:
    """Write a checkpoint atomically: after a crash the previous one is still there.

    Args:
        path: the newest checkpoint's file; older ones are beside it (:mod:`hapi.train.checkpoints.checkpoint_files`).
        parts: what has a state, by name; the trained layers are ``trained``.
        progress: the position to resume at.
        identity: from :func:`hapi.train.checkpoints.resuming.identity_of`; compared when the file is loaded.
        epochs: reports of the finished epochs.
        plan: state of the split's choice; None without one.
        totals: costs of the whole training so far.
        network: facts from which the whole network can be built (:mod:`hapi.train.outputs.from_checkpoint`).
        settings: from :func:`hapi.train.checkpoints.kept_settings.settings_to_keep`.
        keep: checkpoints to keep, this one included.

    Raises:
        HapiError: it cannot be written.
    """
    document = {
        "format": FORMAT,
        **{name: part.state_dict() for name, part in parts.items()},
        "progress": asdict(progress),
        "identity": identity,
        "epochs": epochs,
        "plan": plan,
        "totals": asdict(totals),
        "network": None if network is None else dict(network),
        "settings": dict(settings or {}),
    }
    try:
        with replacing(path) as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
            make_way(Path(path), keep)
    except (OSError, RuntimeError) as error:
        # torch's own writer may hide the system's error under one about its archive.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise HapiError(f"--checkpoint {path}: cannot be written: {reason}") from None


class Found(NamedTuple):
    """Contents of a checkpoint beside the state of its parts, which is restored already."""

    path: Path
    progress: Progress
    epochs: list[dict[str, Any]]
    """Reports of the finished epochs."""
    totals: Totals
    changes: list[Change]
    """Settings that count from here on, and are others than in the checkpoint."""
    is_newest: bool
    """False when a newer file could not be read."""


def load_newest(
    path: str,
    *,
    parts: Mapping[str, Part],
    identity: Callable[[Mapping[str, Any]], dict[str, Any]],
    restore_plan: Callable[[Any, Progress], None],
    mapped: bool = False,
) -> Found | None:
    """Restore the newest readable checkpoint; None when there is no file at all.

    A damaged checkpoint is only a warning when an older one (``--keep``) takes its place. Errors are those of
    :func:`load`.

    Args:
        path: the newest checkpoint's file.
        parts: see :func:`load`.
        identity: from :func:`hapi.train.checkpoints.resuming.identity_of`.
        restore_plan: see :func:`load`.
        mapped: see :func:`read_document`.
    """
    try:
        files = existing(path)
    except OSError as error:
        raise UsageError(f"--resume: {path} cannot be searched for: {error.strerror or error}") from None
    first: UsageError | None = None
    for file in files:
        try:
            found = load(
                str(file),
                parts=parts,
                identity=identity,
                restore_plan=restore_plan,
                mapped=mapped,
            )
        except UsageError as error:
            first = first or error
            continue
        if first is not None:
            position = f"epoch {found.progress.epoch}, batch {found.progress.batch}"
            log.warning("%s; training goes on from the older %s: %s", first, file, position)
        return found._replace(is_newest=first is None)
    if first is not None:
        raise first
    return None


def evaluated_layers(document: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state of the layers that were validated: the moving average if the checkpoint has one.

    Args:
        document: from :func:`read_document`; KeyError or TypeError when its parts are of another form.
    """
    average = document["step"]["average"]
    return dict(document["trained"] if average is None else average["module"])


def read_document(path: str, what: str, *, mapped: bool = False) -> dict[str, Any]:
    """Read the file that :func:`save` wrote at ``path``; only tensors and plain values, no code is run.

    With ``mapped`` the tensors stay in the file, whose bytes were checked, and are read as they are used.

    Raises:
        UsageError: it is none, or of another version of Hapi; the message begins with ``what``.
    """
    try:
        with open_file(path) as file:
            if mapped:
                _check_bytes(file)
            source = path if mapped else file
            document: dict[str, Any] = torch.load(
                source, map_location="cpu", weights_only=True, mmap=mapped or None
            )
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}, expected {FORMAT}")
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise UsageError(f"{what} {path} is not a checkpoint of hapi-train ({_short(error)})") from None
    return document


def _check_bytes(file: BinaryIO) -> None:
    """Compare a file's sums, which torch does not where it maps; ValueError names a damaged record."""
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"its record {damaged} is damaged")


def load(
    path: str,
    *,
    parts: Mapping[str, Part],
    identity: Callable[[Mapping[str, Any]], dict[str, Any]],
    restore_plan: Callable[[Any, Progress], None],
    mapped: bool = False,
) -> Found:
    """Restore ``parts`` from the file at ``path``.

    Args:
        path: a checkpoint's file.
        parts: what has a state, by name; a part named in :data:`OPTIONAL` keeps its own where the file has none.
        identity: gives this job's identity for that of the checkpoint, whose order it may take over.
        restore_plan: given the ``plan`` of :func:`save` and the position; a ValueError refuses it.
        mapped: see :func:`read_document`.

    Raises:
        ConflictError: the checkpoint belongs to another job (model, data, seed, batch size, ...).
        UsageError: it cannot be read.
    """
    document = read_document(path, "--resume:", mapped=mapped)
    try:
        found, epochs = dict(document["identity"]), [dict(e) for e in document["epochs"]]
        progress = Progress.from_document(document["progress"])
        totals = Totals.from_document(document["totals"])
    except Exception as error:  # it may hold anything
        raise UsageError(f"--resume: {path} is not a checkpoint of hapi-train ({_short(error)})") from None
    own = identity(found)
    before, following = found.pop("following", {}), own.pop("following", {})
    different = [k for k in own if found.get(k) != own[k]]
    if different:
        key = different[0]
        if key == "dataset":
            raise ConflictError(
                f"--resume: {path} belongs to version {found.get(key)} of its dataset, and here it is {own[key]}: "
                "other data, or packed anew since; pack the same again, or begin anew in another place"
            )
        raise ConflictError(
            f"--resume: {path} belongs to another job: its {key} is {found.get(key)!r}, this one's {own[key]!r}; "
            f"leave such settings out to go on (only {', '.join(sorted(following))} may change), or give another "
            "--checkpoint"
        )
    try:
        for name, part in parts.items():
            if name in document or name not in OPTIONAL:
                part.load_state_dict(document[name])
    except (
        Exception
    ) as error:  # the right identity, the wrong content: a damaged file, or another torchvision
        raise UsageError(f"--resume: {path} does not fit the trained layers ({_short(error)})") from None
    try:
        restore_plan(document["plan"], progress)
    except (ValueError, KeyError, TypeError, HapiError) as error:
        raise UsageError(
            f"--resume: {path} has a plan that does not fit this job ({_short(error)})"
        ) from None
    changes = changes_of(before, following, progress.epoch, progress.batch)
    return Found(Path(path), progress, epochs, totals, changes, is_newest=True)


def _short(error: Exception) -> str:
    """The first sentence of what torch says at length: the next is its advice to run what is pickled there."""
    said = f"there is no {error} in it" if isinstance(error, KeyError) else str(error) or type(error).__name__
    text = said.splitlines()[0].partition(". ")[0]
    return text if len(text) <= 200 else text[:197] + "..."
