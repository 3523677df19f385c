"""Checked values of a settings class, read from YAML nodes; the part of :mod:`hapi.config.settings` that
reads types.

Text from flags and the environment becomes nodes too, so that every source is read by the same rules.
"""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hapi import units
from hapi.config.fields import (
    Rule,
    flag_of,
    members,
    other_names,
    settings_class,
    settings_fields,
    suggestion,
)
from hapi.errors import ConfigError, UsageError

MAX_VALUES = 100_000
"""Most values read from one file: aliases can make a small file stand for an endless one."""

_NULL_WORDS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# "010" is eight in YAML 1.1 and ten in YAML 1.2: neither is guessed.
_INTEGER = re.compile(r"[+-]?(?:0|[1-9](?:_?[0-9]){0,24})", re.ASCII)
_WHOLE_FLOAT = re.compile(r"[+-]?[1-9][0-9]*(?:\.0*)?[eE]\+?[0-9]{1,2}", re.ASCII)
_FLOAT = re.compile(
    r"[+-]?(?:[0-9](?:_?[0-9]){0,400}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII
)
_STANDARD_TAG = "tag:yaml.org,2002:"
_PLAIN_KINDS = ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "value", "merge")
_PLAIN_TAGS = frozenset(_STANDARD_TAG + kind for kind in _PLAIN_KINDS)
"""Tags that YAML gives to untagged text; the field's type decides, so they mean nothing here."""
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
_ORDER = (bool, int, float)
"""A union is tried in this order, then literals, then paths, text and tuples: the narrowest wins."""


def node_of(value: Any, quoted: bool) -> yaml.Node:
    """``value`` as a node without a place. ``quoted`` text stays text, else it is read like plain YAML."""
    if isinstance(value, Mapping):
        pairs = [(node_of(str(key), True), node_of(item, quoted)) for key, item in value.items()]
        return yaml.MappingNode(_STANDARD_TAG + "map", pairs)
    if isinstance(value, list | tuple):
        return yaml.SequenceNode(_STANDARD_TAG + "seq", [node_of(item, quoted) for item in value])
    is_text = isinstance(value, str | Path)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return yaml.ScalarNode(_STANDARD_TAG + "str", text, style='"' if is_text and quoted else None)


class _Mismatch(Exception):
    """The text is not of the type tried; another member of the union may fit."""


@dataclass(frozen=True)
class _SettingName:
    """The setting being read; ``origin`` is a flag or variable, None for the file."""

    name: str
    origin: str | None


class SettingsReader:
    """Reads one settings class, and remembers the origin of every value in ``origins``."""

    def __init__(self, source: str, *, flags: bool = True) -> None:
        """``flags``: settings that are not in a list have a flag each."""
        self.source, self._flags = source, flags
        self.origins: dict[str, str] = {}
        self._values = 0

    def read(
        self,
        cls: Any,
        node: yaml.Node | None,
        given: Mapping[str, tuple[str, yaml.Node]],
        prefix: str = "",
        *,
        listed: bool = False,
    ) -> Any:
        """Return an instance of a settings class.

        Args:
            cls: the class.
            node: the YAML mapping; None or null: empty.
            given: origin and value by name, from flags and the environment; they win over the file.
            prefix: of dotted names.
            listed: it is one of several, so that its settings have no flags.
        """
        entries = self._entries(cls, node, prefix)
        chosen: dict[str, Any] = {}
        for f in settings_fields(cls):
            name, nested = prefix + f.name, settings_class(f.annotation)
            if nested is not None:
                below = any(key.startswith(name + ".") for key in given)
                entry = entries.get(f.name)
                absent = entry is None or (_is_null(entry) and type(None) in members(f.annotation))
                if below or not absent:
                    chosen[f.name] = self.read(nested, None if absent else entry, given, name + ".")
                elif entry is not None:
                    chosen[f.name] = None
            elif name in given:
                origin, given_node = given[name]
                chosen[f.name] = self._value(given_node, f.annotation, f.rule, _SettingName(name, origin))
                self.origins[name] = origin
            elif f.name in entries:
                chosen[f.name] = self._value(entries[f.name], f.annotation, f.rule, _SettingName(name, None))
                self.origins[name] = self._where(entries[f.name])
            if f.required and f.name not in chosen:
                if listed or not self._flags:
                    where = self.source if node is None else self._where(node)
                    raise ConfigError(f"{where}: {name!r} is missing; set it in the file")
                variable = f" or {f.rule.env}" if f.rule.env else ""
                raise UsageError(
                    f"{self.source}: {name!r} is missing; set it in the file or with {flag_of(name)}{variable}"
                )
        try:
            return cls(**chosen)
        except UsageError as error:
            raise ConfigError(f"{self.source}: {error}") from None

    def read_each(self, cls: Any, node: yaml.Node | None) -> dict[str, Any]:
        """Instances of ``cls`` by the names under which they stand in ``node`` (None or null: none)."""
        entries = self._named(node, _SettingName("", None), "'name: settings' blocks")
        return {name: self.read(cls, value, {}, f"{name}.", listed=True) for name, value in entries.items()}

    def _entries(self, cls: Any, node: yaml.Node | None, prefix: str) -> dict[str, yaml.Node]:
        known = {f.name: f.name for f in settings_fields(cls)} | other_names(cls)
        setting = _SettingName(prefix.rstrip("."), None)
        return self._named(node, setting, "settings ('name: value' lines)", known)

    def _named(
        self,
        node: yaml.Node | None,
        setting: _SettingName,
        expected: str,
        known: Mapping[str, str] | None = None,
    ) -> dict[str, yaml.Node]:
        """Values under the names of a mapping; only ``known`` names are allowed (None: any).

        ``known`` maps them, and other names that people may write, to the settings' own names.
        """
        if node is None or _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, setting, f"expected {expected}, got {_describe(node)}")
        prefix = setting.name + "." if setting.name else ""
        entries: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, setting, f"expected a setting's name, got {_describe(key)}")
            if known is not None and key.value not in known:
                name = _shown(prefix + key.value)
                raise ConfigError(f"{self._where(key)}: unknown key {name}{suggestion(key.value, known)}")
            called = key.value if known is None else known[key.value]
            if called in entries:
                first = entries[called].start_mark
                suffix = f" (first on line {first.line + 1})" if first is not None else ""
                raise ConfigError(
                    f"{self._where(key)}: key {prefix + key.value!r} appears twice{suffix}; remove one"
                )
            entries[called] = value
        return entries

    def _value(self, node: yaml.Node, annotation: Any, rule: Rule, setting: _SettingName) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._error(node, setting, f"more than {MAX_VALUES} values in one file")
        if node.tag not in _PLAIN_TAGS:
            raise self._error(
                node, setting, f"the tag {_shown(node.tag)} is not read here; write a plain value"
            )
        kinds = members(annotation)
        if _is_null(node) and type(None) in kinds:
            return None
        tuple_kind = next((k for k in kinds if typing.get_origin(k) is tuple), None)
        if isinstance(node, yaml.ScalarNode) and not _is_null(node):
            ordered = sorted((k for k in kinds if k not in (tuple_kind, type(None))), key=_rank)
            for kind in ordered:
                try:
                    return self._scalar(node, kind, rule, setting)
                except _Mismatch:
                    continue
        if tuple_kind is not None and not isinstance(node, yaml.MappingNode) and not _is_null(node):
            return self._tuple(node, tuple_kind, rule, setting)
        raise self._error(node, setting, f"expected {_expected(kinds, rule)}, got {_describe(node)}")

    def _scalar(self, node: yaml.ScalarNode, kind: Any, rule: Rule, setting: _SettingName) -> Any:
        text: str = node.value
        if "\x00" in text:  # no path, name or URL has one, and the system's calls refuse it
            raise self._error(node, setting, "expected text without a NUL character")
        try:
            os.fsencode(text)
        except UnicodeEncodeError:  # half of a character, by an escape such as "\\ud800"
            raise self._error(
                node, setting, f"{_shown(text)} has what is no character; write it anew"
            ) from None
        if typing.get_origin(kind) is Literal:
            for choice in typing.get_args(kind):
                if text == (str(choice).lower() if isinstance(choice, bool) else str(choice)):
                    return choice
            raise _Mismatch
        if kind is str:
            return text
        if kind is Path:
            return Path(text)
        if rule.unit is not None and kind in (int, float):
            return self._bounded(self._quantity(node, kind, rule, setting), node, rule, setting)
        if node.style is not None:
            raise _Mismatch
        if kind is bool:
            if text.lower() not in _BOOLEANS:
                raise _Mismatch
            return _BOOLEANS[text.lower()]
        return self._bounded(_number(text, kind), node, rule, setting)

    def _quantity(self, node: yaml.ScalarNode, kind: Any, rule: Rule, setting: _SettingName) -> float:
        # Text without a digit ("auto") is no quantity at all: another member of the union may take it.
        if not any(c.isdigit() for c in node.value):
            raise _Mismatch
        try:
            return units.PARSERS[str(rule.unit)](node.value, "size")
        except UsageError as error:
            raise self._error(node, setting, str(error).removeprefix("size: ")) from None

    def _bounded(self, value: float, node: yaml.Node, rule: Rule, setting: _SettingName) -> float:
        if not rule.holds(value):
            raise self._error(node, setting, f"expected a number{rule.range_text()}, got {_describe(node)}")
        return value

    def _tuple(self, node: yaml.Node, kind: Any, rule: Rule, setting: _SettingName) -> tuple[Any, ...]:
        items: Sequence[yaml.Node] = node.value
        if isinstance(node, yaml.ScalarNode):
            parts = (
                [node.value] if node.style is not None else [part.strip() for part in node.value.split(",")]
            )
            items = [
                yaml.ScalarNode(node.tag, part, node.start_mark, node.end_mark, node.style) for part in parts
            ]
        kinds = typing.get_args(kind)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(items)
        if len(kinds) != len(items):
            raise self._error(node, setting, f"expected {len(kinds)} values, got {len(items)}")
        return tuple(
            self._value(item, k, rule, setting)
            if (nested := settings_class(k)) is None
            else self.read(nested, item, {}, f"{setting.name}.", listed=True)
            for item, k in zip(items, kinds, strict=True)
        )

    def _where(self, node: yaml.Node) -> str:
        mark = node.start_mark
        return self.source if mark is None else f"{self.source}:{mark.line + 1}:{mark.column + 1}"

    def _error(self, node: yaml.Node, setting: _SettingName, message: str) -> UsageError:
        if setting.origin is not None:
            return UsageError(f"{setting.origin}: {message}")
        name = f"{setting.name}: " if setting.name else ""
        return ConfigError(f"{self._where(node)}: {name}{message}")


def _number(text: str, kind: Any) -> float:
    if kind is int:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _WHOLE_FLOAT.fullmatch(text):
            return int(float(text))
        raise _Mismatch
    if kind is not float:
        raise TypeError(f"settings cannot have the type {kind!r}")
    if _FLOAT.fullmatch(text) is None:
        raise _Mismatch
    value = float(text.replace("_", ""))
    if not math.isfinite(value):
        raise _Mismatch
    return value


def _rank(kind: Any) -> int:
    if kind in _ORDER:
        return _ORDER.index(kind)
    return 3 if typing.get_origin(kind) is Literal else 4 if kind is Path else 5


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULL_WORDS


def _expected(kinds: Sequence[Any], rule: Rule) -> str:
    words = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            words.append("one of " + ", ".join(str(choice) for choice in typing.get_args(kind)))
        elif typing.get_origin(kind) is tuple:
            words.append("a list")
        elif kind is not type(None):
            bounds = rule.range_text() if kind in (int, float) else ""
            words.append(_WORDS[kind] + bounds)
    return " or ".join(words)


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if _is_null(node):
        return "nothing"
    quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
    return ("text " if quoted else "") + _shown(node.value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
