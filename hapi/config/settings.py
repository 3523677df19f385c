"""Strict settings: a frozen dataclass filled from YAML, the environment and flags; errors name file and line.

A settings class is a ``@dataclass(frozen=True, kw_only=True)`` whose fields are ``str``, ``int``,
``float``, ``bool``, ``Path``, ``Literal``, unions of these with each other or ``None``, tuples of them, or
another settings class. :func:`setting` adds what a type cannot say: help, range, unit, environment variable.
A :func:`group` is another settings class whose settings stand among those of the class that has it.
The same class makes the command line (:func:`add_flags`), so that flags and files cannot drift apart.

Precedence: flag, then environment variable, then file, then default. A value is read by its *field's*
type, never guessed from its look: ``model: no`` is the text "no", and ``lr: 1e-3`` is a number.
"""

from __future__ import annotations

import argparse
import functools
import operator
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml

from hapi.config.fields import (
    Rule,
    SettingField,
    every_field,
    flag_of,
    flat,
    members,
    other_names,
    suggestion,
    variable_of,
)
from hapi.config.values import SettingsReader, node_of
from hapi.errors import ConfigError, UsageError
from hapi.paths import open_file
from hapi.units import format_bytes

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20
"""Largest settings file that is read; a larger one is surely not one."""

Unit = Literal["bytes", "bandwidth", "duration", "count"]
_UNIT_WORDS = {"bytes": "SIZE", "bandwidth": "RATE", "duration": "TIME"}


def setting(
    help: str,
    *,
    default: Any = MISSING,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    unit: Unit | None = None,
    flags: tuple[str, ...] = (),
    env: str | None = None,
    metavar: str | None = None,
    none_help: str | None = None,
) -> Any:
    """Return a dataclass field with the rules that a type cannot express.

    Args:
        help: one line for ``--help``.
        default: the default value; without one the setting is required.
        low: inclusive lower bound of a number, or of each number of a tuple.
        high: inclusive upper bound.
        above: exclusive lower bound.
        unit: the value may have a unit of :mod:`hapi.units` (``64MiB``).
        flags: flags beside ``--the-name``.
        env: an environment variable that may hold the value.
        metavar: name of the value in ``--help``.
        none_help: help of a flag ``--no-the-name``, which sets None; without one there is no such flag.
    """
    rule = Rule(
        help=help, low=low, high=high, above=above, unit=unit, flags=flags, env=env, metavar=metavar,
        none_help=none_help,
    )  # fmt: skip
    return field(default=default, metadata={"hapi": rule})


def with_other_names(cls: type[T]) -> type[T]:
    """Let a settings class be made, and read, by the other names of its flags too: ``batch_size`` for ``bs``.

    A decorator above ``@dataclass``. Only one value is kept; two of them are a ``TypeError``.
    """
    others = other_names(cls)
    made: Any = cls.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        for other in others.keys() & given.keys():
            if others[other] in given:
                raise TypeError(
                    f"{cls.__name__}: {other!r} is another name of {others[other]!r}; give one of them"
                )
            given[others[other]] = given.pop(other)
        made(self, *args, **given)

    setattr(cls, "__init__", __init__)  # noqa: B010  as mypy has it
    for other, name in others.items():
        setattr(cls, other, property(operator.attrgetter(name)))
    return cls


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[T]):
    """Settings with the origin of each."""

    value: T
    origins: Mapping[str, str]
    """Dotted name to ``exp.yaml:3:7``, a checkpoint's file, ``--lr`` or ``HAPI_SERVER``; an absent name kept its
    default."""

    def as_given(self, message: str) -> str:
        """``message`` with the file's line or the variable instead of a flag that it begins with and nobody gave.

        For what only shows later, such as a split beyond the model's layers, where just the setting is known:
        ``--freeze 99: ...`` becomes ``exp.yaml:3:9: freeze 99: ...``, or stays when the flag was given.
        """
        flag = next(iter(re.findall(r"\A--[a-z-]+", message)), "")
        for name, origin in self.origins.items():
            if flag_of(name) == flag:
                is_name = re.fullmatch(r"--.*|[A-Z][A-Z0-9_]*", origin) is not None
                source = origin if is_name else f"{origin}: {name}"
                return source + message.removeprefix(flag)
        return message


def load(
    cls: type[T],
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    prefix: str = "",
    *,
    flags: bool = True,
) -> Loaded[T]:
    """Fill ``cls`` from a YAML file, the environment and flags.

    Args:
        cls: the settings class.
        path: the file; None for no file.
        overrides: text, as flags give it, or values of the field's type, by dotted names; ``None`` means "not
            given".
        environ: environment variables.
        prefix: a setting without a variable of its own is read from that of its name after it, see
            :func:`variable_of`.
        flags: each setting has a flag, which the message of a missing one names.

    Raises:
        ConfigError: an error in the file (``exp.yaml:3:3: unknown key ...``).
        UsageError: an error in a flag or variable, or a missing setting.
    """
    known = {f.name: f for f in every_field(cls)}
    given: dict[str, tuple[str, yaml.Node]] = {}
    for name, f in known.items():
        variable = variable_of(f, prefix)
        text = (environ or {}).get(variable, "")
        if text:
            given[name] = (variable, node_of(text, quoted=False))
    for name, value in (overrides or {}).items():
        if name not in known:
            raise UsageError(f"there is no setting {name!r}{suggestion(name, known)}")
        if value is not None:
            given[name] = (flag_of(name), node_of(value, quoted=False))
    reader = SettingsReader("settings" if path is None else str(path), flags=flags)
    value = reader.read(cls, None if path is None else _compose(Path(path)), given)
    return Loaded(value=value, origins=reader.origins)


def load_each(cls: type[T], path: Path) -> dict[str, T]:
    """Read a file of named settings (``NAME: {settings of cls}``), by name in the file's order.

    Raises :class:`ConfigError` with the place, as :func:`load` does.
    """
    return SettingsReader(str(path)).read_each(cls, _compose(path))


def checked(value: T) -> T:
    """Return ``value``, a settings instance made in Python, if all its fields keep their rules.

    Raises :class:`UsageError` naming the class and the field.
    """
    cls: Any = type(value)
    if not is_dataclass(value):
        raise UsageError(f"settings: expected hapi.SessionSettings or hapi.TrainSettings, got {cls.__name__}")
    document = node_of(flat(value), quoted=True)
    read_back: T = SettingsReader(cls.__name__).read(cls, document, {})
    return read_back


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], title: str | None = None) -> None:
    """Add one flag per field of ``cls`` to ``parser``; :func:`overrides_of` reads them back.

    Values stay text until :func:`load` reads them by the rules of the file. A tuple's flag may be repeated
    or hold commas; a bool has ``--name`` and ``--no-name``.
    """
    section = parser.add_argument_group(title) if title else parser
    for f in every_field(cls):
        names = (flag_of(f.name), *f.rule.flags)
        common: dict[str, Any] = {"dest": f.name, "default": None, "help": _help_of(f)}
        kinds = members(f.annotation)
        if bool in kinds and not set(kinds) - {bool, type(None)}:
            section.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
            continue
        repeats = any(
            typing.get_origin(kind) is tuple and Ellipsis in typing.get_args(kind) for kind in kinds
        )
        action = "append" if repeats else "store"
        section.add_argument(
            *names, action=action, metavar=f.rule.metavar or _metavar(kinds, f.rule.unit), **common
        )
        if f.rule.none_help is not None:
            section.add_argument(
                flag_of(f"no_{f.name}"),
                action="store_const",
                const="null",
                dest=f.name,
                help=f.rule.none_help,
            )


def overrides_of(args: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """Return the given flags of ``cls``, for :func:`load`; :class:`UsageError` for one whose text is empty."""
    found: dict[str, Any] = {}
    for f in every_field(cls):
        value = getattr(args, f.name, None)
        texts = value if isinstance(value, list) else [value]  # argparse makes [] of --flag=--
        if any(text in ("", []) or (isinstance(text, str) and not text.strip()) for text in texts):
            raise UsageError(f"{flag_of(f.name)}: the text is empty; give a value, or leave the flag out")
        if isinstance(value, list):
            value = [part.strip() for text in value for part in text.split(",") if part.strip()]
            if not value:
                raise UsageError(
                    f"{flag_of(f.name)}: there are only commas; give a value, or leave the flag out"
                )
        if value is not None:
            found[f.name] = value
    return found


def _metavar(kinds: tuple[Any, ...], unit: str | None = None) -> str:
    if unit in _UNIT_WORDS:
        return _UNIT_WORDS[unit]
    words: list[str] = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            words.extend(str(choice) for choice in typing.get_args(kind))
        elif typing.get_origin(kind) is tuple:
            words.append(_metavar(tuple(k for k in typing.get_args(kind) if k is not Ellipsis)[:1]))
        elif kind is not type(None):
            words.append({int: "N", float: "X", Path: "PATH", bool: "true|false"}.get(kind, "TEXT"))
    return "|".join(words)


def _help_of(f: SettingField) -> str:
    notes = []
    if f.required:
        notes.append("required")
    elif isinstance(f.default, tuple):
        notes.extend([f"default: {','.join(str(v) for v in f.default)}"] if f.default else [])
    elif f.default is not None:
        notes.append(f"default: {_default_of(f)}")
    if f.rule.env:
        notes.append(f"or {f.rule.env} in the environment")
    text = f.rule.help + (f" ({'; '.join(notes)})" if notes else "")
    return text.replace("%", "%%")


def _default_of(f: SettingField) -> str:
    """The default as a person would write it."""
    if isinstance(f.default, bool):
        return "yes" if f.default else "no"
    if f.rule.unit == "bytes":
        return format_bytes(f.default)
    return f"{f.default:g} s" if f.rule.unit == "duration" else str(f.default)


def _compose(path: Path) -> yaml.Node | None:
    """The root node of the one document in ``path``; ConfigError with the place for anything else."""
    try:
        with open_file(path) as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings file: {error.strerror or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is not a settings file")
    try:
        return yaml.compose(raw, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{position}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a settings file") from None
