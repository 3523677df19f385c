"""Marks for the cases of a parametrized test, by their ids.

``@pytest.mark.slow_cases("a", "b")`` makes these two slow, ``slow_except("a", "b")`` all others; ``long_cases`` and
``long_except`` do the same for ``long``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MARKS = {
    f"{becomes}_{which}": (becomes, which == "cases")
    for becomes in ("slow", "long")
    for which in ("cases", "except")
}
"""Marks that name cases, to what cases become, and whether those that are named do."""


def mark_cases(items: Iterable[Any]) -> list[str]:
    """Mark those of ``items`` that such a mark speaks of; return a line for each mark that names none of them."""
    named: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for mark, (becomes, if_named) in MARKS.items():
            for found in item.iter_markers(mark):
                key = item.nodeid.partition("[")[0], mark
                named.setdefault(key, set(found.args)).discard(item.callspec.id)
                if (item.callspec.id in found.args) == if_named:
                    item.add_marker(becomes)
    return [
        f"{function}: {mark} names {sorted(missing)}, which are no cases of it"
        for (function, mark), missing in named.items()
        if missing
    ]
