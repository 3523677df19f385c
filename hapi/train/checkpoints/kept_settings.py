"""Settings that a checkpoint keeps, so that ``--resume`` alone goes on as the training began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi.client.early_checks import is_fixed
from hapi.client.settings import SessionSettings
from hapi.config.fields import flag_of, flat, settings_fields
from hapi.config.settings import Loaded
from hapi.config.values import SettingsReader, node_of
from hapi.errors import ConflictError, UsageError
from hapi.models.zoo.names import is_checkpoint
from hapi.train.checkpoints.checkpoint_files import existing
from hapi.train.checkpoints.resuming import BY_MEANING, FOLLOWING, FREE
from hapi.train.outputs.run_folder import REPORT_FILE
from hapi.train.settings import TrainingSettings, TrainSettings

OF_ONE_PROCESS = frozenset(("resume", "init_from", "checkpoint"))
"""Settings that are not kept: the training has begun, and its checkpoint is where it was found."""
ALTERNATIVES = ({"server", "store"},)
"""Settings of which the kept ones count only where none of them is given."""
DEPENDENTS = (
    ("offload", ("off", "host"), ("offload_dir",)),
    ("cache", ("off",), ("cache_dir", "cache_size", "cache_codec", "cache_memory")),
)
"""A setting, values of it, and the settings that have no effect with these."""
PATHS = (
    "store",
    "output",
    "token_file",
    "ca_file",
    "cache_dir",
    "offload_dir",
    "profile",
    "save_profile",
    "report",
    "html",
    "trace",
)
"""Settings that name a file or folder; they are kept as from the root, so that a run goes on from any folder."""
FILES_OR_WORDS = ("weights", "class_weights")
"""Settings that name a file, or one of a few words."""


def settings_to_keep(session: SessionSettings, training: TrainingSettings, dataset: str) -> dict[str, Any]:
    """Return the settings that are not the defaults, as a file of settings would have them; no secret is a setting.

    Args:
        session: settings of the session.
        training: settings of the trainer; those for the session in it do not count.
        dataset: name of the dataset, also where it is the only one of its store, which may get others.
    """
    values = {**flat(training), **flat(session), "dataset": dataset}
    fields = {field.name: field for field in settings_fields(TrainSettings)}
    kept = {
        name: [_from_root(name, one) for one in value]
        if isinstance(value, tuple)
        else _from_root(name, value)
        for name, value in values.items()
        if name in fields.keys() - OF_ONE_PROCESS and value != fields[name].default
    }
    if training.output is None:
        return {**kept, "output": None}
    if kept.get("report") == _from_root("report", str(Path(training.output, REPORT_FILE))):
        del kept["report"]  # it follows from the folder, which may be moved
    return kept


def _from_root(name: str, value: Any) -> Any:
    """The setting's value, from the root of the file system if it is a path from the working directory."""
    if not isinstance(value, str) or "://" in value or value.startswith(("memory:", "~")):
        return value
    if name in PATHS or (name in FILES_OR_WORDS and (Path(value).is_file() or is_checkpoint(value))):
        return str(Path(value).absolute())
    return value


@dataclass(frozen=True)
class KeptSettings:
    """Settings that a checkpoint has kept."""

    source: str
    """The checkpoint's file."""
    values: Mapping[str, Any]
    """Those that are not the defaults, by name."""


def read_kept(path: str) -> KeptSettings | None:
    """Return the settings in the newest checkpoint that can be read; None where there is none, or it has none.

    Args:
        path: the newest checkpoint's file (:mod:`hapi.train.checkpoints.checkpoint_files`).

    Raises:
        UsageError: there are checkpoints, and none can be read.
    """
    try:
        files = existing(path)
    except OSError:
        return None  # said by the trainer, which reads them for the layers
    damage: UsageError | None = None
    for file in files:
        from hapi.train.checkpoints.checkpoint import read_document

        try:
            values = read_document(str(file), "--resume:", mapped=True)["settings"]
        except UsageError as error:
            damage = damage or error
            continue
        except KeyError:
            return None
        return KeptSettings(str(file), values) if isinstance(values, Mapping) else None
    if damage is not None:
        raise damage
    return None


def with_kept(loaded: Loaded[TrainSettings], kept: KeptSettings) -> Loaded[TrainSettings]:
    """Return the settings with the kept ones where none is given.

    Raises:
        ConflictError: a setting is given that would make another training of it.
        ConfigError: a kept setting is unknown here, or its value is.
    """
    given = {name: value for name, value in flat(loaded.value).items() if name in loaded.origins}
    _check_unchanged(loaded, given, kept)
    shadowed = {other for group in ALTERNATIVES if group & given.keys() for other in group} | set(
        _idle(given)
    )
    beneath = {
        name: value for name, value in kept.values.items() if name not in given and name not in shadowed
    }
    value = SettingsReader(kept.source).read(TrainSettings, node_of({**beneath, **given}, quoted=True), {})
    return Loaded(value=value, origins={**dict.fromkeys(beneath, kept.source), **loaded.origins})


def _idle(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings that have no effect beside those of ``given``, and so are refused unless they were only kept."""
    for name, values, others in DEPENDENTS:
        if given.get(name) in values:
            yield from others
    if "split" in given and is_fixed(given["split"]):
        yield from ("profile", "save_profile", "objective")
    if "output" in given and given["output"] is None:
        yield from ("log", "push")
    if given.get("store") is not None:
        yield from ("ca_file", "token_file")


def _check_unchanged(loaded: Loaded[TrainSettings], given: Mapping[str, Any], kept: KeptSettings) -> None:
    defaults = {field.name: field.default for field in settings_fields(TrainSettings)}
    for name, value in given.items():
        if name in FOLLOWING | FREE | BY_MEANING:  # by meaning: compared when data and layers are known
            continue
        before = kept.values.get(name, defaults[name])
        if (list(value) if isinstance(value, tuple) else value) != (
            list(before) if isinstance(before, tuple) else before
        ):
            raise ConflictError(
                loaded.as_given(
                    f"{flag_of(name)} {value}: {kept.source} belongs to another job: its {name} is {before!r}, this "
                    f"one's {value!r}; leave it out to go on (only {', '.join(sorted(FOLLOWING))} may change)"
                )
            )
