"""Renamed words stay away: one name for one thing, in the words of docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from support.parsed import ROOT, modules_of, nodes_of

TYPES = {
    "Mounted": "DatasetReader",
    "Near": "AccessHint",
    "Look": "LinkProbe or BatchSizeSearch",
    "Watch": "DriftDetector",
    "Watcher": "TrainingCallback",
    "Planning": "SplitController",
    "Prepared": "JobContext",
    "Window": "Prefetcher",
    "Ahead": "Prefetcher",
    "Order": "EpochOrder or DecodeTask",
    "Piece": "RequestSlice, SampleSlice or PartSlice",
    "Pieces": "StreamedBytes",
    "Span": "ByteRange, FieldRange, TensorRange, SampleRange, GraphSlice or StageSpan",
    "Place": "CutPoint, OpenConnection, Position or SampleLocations",
    "Places": "ShardLayout or SampleLocations",
    "Front": "FrozenPrefix",
    "FrozenRest": "FrozenSuffix",
    "Pace": "SlowReaderGuard",
    "Pacing": "RequestPacer",
    "Turn": "PassPriority",
    "Turns": "DeviceScheduler",
    "Ask": "MemoryRequest",
    "Wish": "BatchBounds",
    "Needs": "PrefixTensors",
    "Claim": "Reservation",
    "Told": "TimedFrames",
    "Ints": "IntArray",
    "IdArray": "IntArray",
}
"""Classes and type aliases, with or without a leading underscore, and what they are called now."""

WORDS = {
    "again": "revisited_groups, remedy, or by meaning",
    "patience": "retry_timeout or max_wait",
    "beside": "overhead",
    "told": "reported, or by meaning",
    "there": "server_factor, or by meaning",
    "here": "client_factor, or by meaning",
    "most": "max_..., limit or largest",
    "least": "min_... or smallest",
    "earliest": "min_split",
    "latest": "max_split or deadline",
    "boundary": "last_split",
    "rest": "suffix, remainder or others",
    "rests": "suffixes",
    "pushable": "candidate_splits",
    "alike": "merge_key, or by meaning",
    "suits": "default_shuffle",
    "near": "hint or access_hint",
    "look": "probe, search or check",
    "ask": "wanted or call",
    "turn": "priority, or by meaning",
    "turns": "scheduler, or by meaning",
    "wish": "bounds, or by meaning",
    "claim": "reserve or reservation",
    "front": "prefix",
    "fronts": "prefixes",
    "prepared": "job_context",
    "prepare": "resolve_job",
    "mounted": "reader",
    "mount": "open_dataset",
    "bread": "next_batch",
    "plant": "build_tree",
    "nobody": "ANONYMOUS",
    "freak": "OUTLIER_FACTOR",
    "evenness": "OVERLAP_NORM",
}
"""Identifiers in whole: modules, functions, parameters, variables and fields; in any case, underscores aside."""

STAY = {
    ("hapi/data/mount.py", "mount"),  # DLFS's names, which stay as aliases
    ("hapi/data/mount.py", "bread"),
    ("hapi/client/settings.py", "patience"),  # the flag
}


def names_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The identifiers that a module makes up, with their lines; those that it only uses are another one's."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias | ast.ExceptHandler | ast.MatchAs):
            name = node.asname if isinstance(node, ast.alias) else node.name
            if name is not None:
                yield name, getattr(node, "lineno", 0)


def renamed(name: str) -> str | None:
    """What ``name`` is called now, if it is one of the words."""
    bare = name.strip("_")
    return TYPES.get(bare) or WORDS.get(bare.lower() if bare.isupper() else bare)


def test_no_renamed_word_is_an_identifier() -> None:
    found = set()
    for path in modules_of("hapi", "benchmarks"):
        module = path.relative_to(ROOT)
        found |= {
            f"{module}:{line}: {name!r} is called {better} now"
            for name, line in ((module.stem, 1), *names_of(nodes_of(path)))
            if (better := renamed(name)) and (module.as_posix(), name) not in STAY
        }
    assert not found, "\n".join(sorted(found))


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_page_names_a_renamed_class() -> None:
    """Names stand in backticks on pages, alone or after a module; elsewhere the words are English."""
    words = re.compile(rf"`(?:[\w.]+\.)?_?({'|'.join(TYPES)})(?:[.(][^`]*)?`")
    found = {
        f"{page.relative_to(ROOT)}: `{word}` is called {TYPES[word]} now"
        for page in PAGES
        for word in words.findall(page.read_text(encoding="utf-8"))
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def ask(again): ...", {"ask", "again"}),
        ("class _Look: rest: int = 0", {"_Look", "rest"}),
        ("self._claims = response.prepared", {"_claims"}),
        ("from hapi.store import base as there", {"there"}),
        ('parts = {"beside": 1}  # again', {"parts"}),
    ],
)
def test_names_are_those_that_a_module_makes_up(text: str, expected: set[str]) -> None:
    assert {name for name, _ in names_of(ast.walk(ast.parse(text)))} == expected
