"""One benchmark as the command line sees it: its options, and what it found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks.cli.options import JSON, Option, known_models

if TYPE_CHECKING:
    from benchmarks.testbed.bed import Bed
    from benchmarks.testbed.cells import Results

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one benchmark."""

    table: Sequence[str]
    """Lines for a person."""
    conditions: Mapping[str, Any]
    document: dict[str, Any]
    """Content of ``--json``."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Rows of ``--csv``."""
    draw: Callable[[str], None] | None = None
    """Writes the figure to a path."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A sub-command."""

    name: str
    help: str
    options: Sequence[Option]
    run: Callable[[argparse.Namespace], Outcome | None]
    """Measures; None when nothing is left to print."""
    tells: bool = True
    """False: it only adds to its file of results, which others read."""

    def configure(self, benchmarks: Any) -> None:
        """Add it to the sub-parsers ``benchmarks``."""
        parser = benchmarks.add_parser(self.name, help=self.help.replace("%", "%%"))
        for add in (*self.options, *([JSON] if self.tells else [])):
            add(parser)
        parser.set_defaults(run=self.run)


class Measurement(Protocol):
    """The result of a benchmark that makes its own document."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Conditions under which it was measured, as lines."""

    def table(self) -> list[str]:
        """Lines of the table."""

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""


def outcome_of(result: Measurement) -> Outcome:
    """``result`` as it tells of itself."""
    return Outcome(table=result.table(), conditions=result.conditions, document=result.to_json())


def recorded_outcome(
    records: Iterable[Mapping[str, Any]],
    table: list[str],
    rows: list[dict[str, Any]],
    draw: Callable[[str], None],
    **document: Any,
) -> Outcome:
    """The outcome of a benchmark with a file of ``records``; its document has ``document`` in front."""
    from benchmarks.testbed.conditions import recorded_conditions

    found = recorded_conditions(records)
    whole = {**document, "table": table, "rows": rows, "conditions": found}
    return Outcome(table=table, conditions=found, document=whole, rows=rows, draw=draw)


def tell(line: str) -> None:
    """Print a line about the progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def with_given(settings: T, args: argparse.Namespace, **flags: str) -> T:
    """``settings`` with the fields of which ``flags`` names the argument, where that was given.

    A list becomes a tuple; the names of models are checked, and each is taken once.
    """
    given: dict[str, Any] = {}
    for field, name in flags.items():
        value = getattr(args, name)
        if value is None:
            continue
        given[field] = tuple(value) if isinstance(value, list) else value
        if field == "models":
            given[field] = known_models(value)
        elif field == "model":
            given[field] = known_models([value])[0]
    return replace(settings, **given)  # type: ignore[type-var]


def bed_and_results(
    args: argparse.Namespace, settings: Any, found: Mapping[str, Any] | None = None
) -> tuple[Bed, Results]:
    """The test bed, and the results that are there already.

    ``found``: further conditions; None for the settings as the grid.
    """
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import conditions
    from benchmarks.testbed.loose import LooseBed, choose_bed

    bed = choose_bed(args.no_bed)
    head = {**conditions(), **({"grid": asdict(settings)} if found is None else found)}
    limited = isinstance(bed, LooseBed)
    return bed, Results(Path(args.results), {**head, "test_bed": bed.describe(), "limited": limited})
