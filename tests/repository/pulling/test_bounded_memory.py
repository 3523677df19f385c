"""Models larger than the memory that pushing and pulling them may take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sparse_files import memory_peak, reset_peak, write_shards, write_sparse

from hapi.api.pushing import push_model
from hapi.repository.pulling.files import write_file, write_folder
from hapi.repository.pulling.selection import whole
from hapi.repository.sources.open import open_source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory by /proc")

MIB = 1 << 20


@pytest.mark.slow
def test_a_model_takes_the_memory_of_two_windows(tmp_path: Path) -> None:
    nbytes = write_sparse(tmp_path / "m.safetensors", {"a.weight": (80 * MIB,), "b.weight": (16 * MIB,)})
    push_model(str(tmp_path / "m.safetensors"), f"{tmp_path}/store/warm")  # imports what it needs
    before = reset_peak()
    stored = push_model(str(tmp_path / "m.safetensors"), f"{tmp_path}/store/raw").model
    pulled = write_file(stored, whole(stored), tmp_path / "back.safetensors")
    assert pulled.nbytes == nbytes == 192 * MIB
    assert memory_peak() - before < 128 * MIB


BODY = """
import sys
from pathlib import Path
from hapi.cli.main import main
assert main(sys.argv[1:]) == 0
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


LOADING = """
import sys
from pathlib import Path
from hapi.repository.opening import open_model
from hapi.store.local import LocalStore
model, room = open_model(LocalStore(sys.argv[1]), sys.argv[2]), int(sys.argv[3])
names = list(model.manifest.tensors)
while sum(model.manifest.tensors[name].nbytes for name in names) > room:
    names.pop()
tensors = dict(model.read(names))
print(sum(tensor.nbytes for tensor in tensors.values()))
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def peak_of(*arguments: str, body: str = BODY) -> tuple[int, str]:
    """Largest resident memory, in bytes, of a process that runs the command; and the line that it ends with."""
    done = subprocess.run(
        [sys.executable, "-c", body, *arguments], capture_output=True, text=True, check=True, timeout=1200
    )
    *_, line, peak = done.stdout.splitlines()
    return int(peak) << 10, line


def available_memory() -> int:
    """Bytes that the system can give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["one file", "shards"])
def test_twenty_gigabytes_pass_within_one(
    tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """Most tensors are alike and stored once, which spares the disk; each is read, hashed and pulled all the same."""
    sizes = {f"layers.{i}.weight": (10**9 // 2 + (i < 3) * i,) for i in range(20)}
    if kind == "shards":
        given = tmp_path / "given"
        given.mkdir()
        write_shards(given, sizes, 5)
    else:
        given = tmp_path / "given.safetensors"
        write_sparse(given, sizes)
    assert open_source(given).nbytes > 19.9e9
    output = tmp_path / ("back" if kind == "shards" else "back.safetensors")
    for command in (
        ("push", str(given), f"{tmp_path}/store/raw"),
        ("pull", f"{tmp_path}/store/raw", "--output", str(output)),
    ):
        peak, _ = peak_of(*command)
        record_property(f"largest memory of the {command[0]} in MiB", peak >> 20)
        assert peak < 1 << 30
    assert open_source(output).nbytes == open_source(given).nbytes
    # As much of it as the machine has room for.
    peak, loaded = peak_of(f"{tmp_path}/store", "raw", str(available_memory() * 7 // 10), body=LOADING)
    record_property("bytes loaded", int(loaded))
    record_property("memory beyond them in MiB", (peak - int(loaded)) >> 20)
    assert peak - int(loaded) < 1 << 30


@pytest.mark.slow
def test_a_folder_takes_no_more(tmp_path: Path) -> None:
    write_sparse(tmp_path / "m.safetensors", {f"a.{i}": (32 * MIB,) for i in range(8)})
    stored = push_model(str(tmp_path / "m.safetensors"), f"{tmp_path}/store/raw").model
    (tmp_path / "back").mkdir()
    before = reset_peak()
    pulled = write_folder(stored, whole(stored), tmp_path / "back", 100 * MIB)
    assert len(pulled.files) == 9 and memory_peak() - before < 128 * MIB
