"""Weights in memory that processes share: contents to take, processes that take them, and what is mapped of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from hapi.models.graph.digest import content_digest, content_key
from hapi.models.shared.folder import WeightsFolder
from hapi.models.shared.weights import SharedWeights
from hapi.models.tensors import tensor_bytes

Contents = dict[str, torch.Tensor]


def contents_of(count: int, elements: int = 2000, seed: int = 0) -> Contents:
    """Float32 tensors by key of content; of equal seeds the first ones are equal."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.rand(elements, generator=random) for _ in range(count)]
    return {content_key(content_digest(tensor_bytes(t)), t): t for t in tensors}


class Source:
    """What loads contents, and counts it."""

    def __init__(self, contents: Contents, before: Callable[[int], object] = lambda number: None) -> None:
        self.contents, self.asked, self._before = contents, list[str](), before

    def __call__(self, keys: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for key in keys:
            self._before(len(self.asked))
            self.asked.append(key)
            yield key, self.contents[key].clone()


def taken(folder: Path, source: Source, budget: int | None = None) -> Contents:
    """Take all contents of ``source`` through ``folder``, and check them."""
    found = dict(SharedWeights(WeightsFolder(folder, budget)).take(source.contents, source))
    assert found.keys() == source.contents.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in source.contents.items())
    return found


def mapped_kilobytes(folder: Path, field: str, pid: int | str = "self") -> int:
    """The sum of a field of ``/proc/PID/smaps`` over all mappings of files in ``folder``."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = f" {folder}/" in line
        elif counts and line.startswith(field + ":"):
            total += int(line.split()[1])
    return total


TAKER = "import sys; from support.weight_tools import main; main(*sys.argv[1:])"
"""Code of a process that takes contents, says so with a line, and stays until its standard input ends.

Arguments: the folder, the number of contents, how many it loads before it hangs (-1: all), the budget in bytes.
"""


def main(folder: str, count: str, hangs_at: str, budget: str) -> None:
    """See :data:`TAKER`."""

    def before(number: int) -> None:
        if number == int(hangs_at):
            print("hangs", flush=True)
            sys.stdin.read()

    source = Source(contents_of(int(count)), before)
    found = taken(Path(folder), source, int(budget))
    print(f"loaded {len(source.asked)}", flush=True)
    sys.stdin.read()
    assert found
