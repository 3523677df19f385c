"""The YAML file of settings on a command line, and the settings that a command would run with."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from hapi.cli.shared.common import tell
from hapi.config.fields import every_field, flat, variable_of
from hapi.config.settings import Loaded
from hapi.errors import UsageError

_SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""End of a variable by which Kubernetes tells of a service."""


def add_settings_file(parser: argparse.ArgumentParser, dest: str) -> None:
    """Declare the file of settings, by position or as ``--config``, and ``--print-config``."""
    parser.add_argument(dest, nargs="?", help="YAML file with any of the settings below; flags win over it")
    parser.add_argument("--config", metavar="FILE", help="the same file, as a flag")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings as such a file, and end"
    )


def settings_file(args: argparse.Namespace, dest: str) -> str | None:
    """Return the file that was given; :class:`UsageError` for two of them."""
    first: str | None = getattr(args, dest)
    second: str | None = args.config
    if first is not None and second is not None:
        raise UsageError(f"--config {second}: a file of settings is given already, {first}; give one of them")
    return first if second is None else second


def tell_unknown_variables(program: str, cls: type[Any], environment: Mapping[str, str], prefix: str) -> None:
    """Tell a person of variables that begin as those of the settings ``cls`` do, and are none of them."""
    known = {variable_of(f, prefix): f.name for f in every_field(cls)}
    by_name = {prefix + name.upper().replace(".", "_"): variable for variable, name in known.items()}
    for name in sorted(n for n, text in environment.items() if n.startswith(prefix) and text):
        if name in known or _SERVICE_LINK.fullmatch(name.removeprefix(prefix)):
            continue
        close = by_name.get(name) or next(iter(difflib.get_close_matches(name, known, 1, 0.6)), None)
        hint = f"did you mean {close}?" if close else f"{program} --help lists the settings"
        tell(program, f"{name} in the environment is no setting, and is not read; {hint}")


def print_settings(loaded: Loaded[Any]) -> None:
    """Print settings as YAML that the command reads again; those that kept their default are comments."""
    for name, value in flat(loaded.value).items():
        given = any(origin == name or origin.startswith(f"{name}.") for origin in loaded.origins)
        text = yaml.safe_dump({name: _plain(value)}, sort_keys=False).rstrip("\n")
        print(text if given else "\n".join(f"# {line}" for line in text.splitlines()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value
