"""The memory that a load takes beyond its tensors, also of a model that is larger than the machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory by /proc")

PROGRAM = """
import sys

import xxhash
from support.few_pages import FewPages
from support.sparse_files import memory_peak

from hapi.repository.checksums import CHECKED_BYTES, joined
from hapi.repository.entries import TensorEntry
from hapi.repository.loading.load import load
from hapi.store.local import LocalStore

folder, count, elements = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
whole = xxhash.xxh3_64(bytes(CHECKED_BYTES))


def zeros(number, start):
    size = elements + number  # other bytes than any other tensor's
    pieces, left = divmod(2 * size, CHECKED_BYTES)
    checksum = joined([whole] * pieces + [xxhash.xxh3_64(bytes(left))] * (left > 0)).hexdigest()
    return TensorEntry(f"layers.{number}.weight", "bfloat16", (size,), f"{number:032x}", checksum, "packs/one", start)


entries = []
for number in range(count):
    entries.append(zeros(number, entries[-1].stop if entries else 64))
store = LocalStore(folder)
path = store.path_of("packs/one")
path.parent.mkdir(parents=True)
with path.open("wb") as file:
    file.truncate(entries[-1].stop)
pool = FewPages(2 * (elements + count))
tensors = [tensor for _, tensor in load(store, entries, pool=pool)]
assert [tensor.numel() for tensor in tensors] == [elements + number for number in range(count)]
assert sorted(pool.taken) == sorted(tensor.nbytes for tensor in tensors)  # each once, and nothing beside them
print(sum(tensor.nbytes for tensor in tensors), memory_peak())
"""


@pytest.mark.parametrize(
    ("count", "elements"),
    [
        pytest.param(3, 500_000_000, id="3 GB", marks=pytest.mark.slow),
        pytest.param(20, 500_000_000, id="20 GB", marks=pytest.mark.long),
        pytest.param(10_000, 1_000_000, id="20 GB in many tensors", marks=pytest.mark.long),
    ],
)
def test_a_load_takes_less_than_a_gigabyte_beyond_its_tensors(
    tmp_path: Path, count: int, elements: int, record_property: Callable[[str, object], None]
) -> None:
    """All tensors are held; the pack is a file of zeros that takes no room on the disk."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(count), str(elements)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    loaded, peak = map(int, done.stdout.split())
    record_property("memory beyond the tensors in MiB", (peak - loaded) >> 20)
    assert loaded >= 2 * count * elements
    assert loaded < peak < loaded + (1 << 30)
