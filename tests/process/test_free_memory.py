"""The memory that is free to a process, by everything that bounds it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hapi.process import free_memory
from hapi.process.free_memory import host_free_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available; the tests add control groups."""
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    write(tmp_path / "proc", {"meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"})
    write(tmp_path / "proc/self", {"status": f"Name:\tpython\nVmSize:\t{1 << 20} kB\n", "cgroup": "0::/\n"})
    return tmp_path


def write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(str(content))


def test_what_the_machine_has(machine: Path) -> None:
    assert host_free_bytes() == 8 * GIB
    (machine / "proc/meminfo").unlink()
    assert host_free_bytes() is None


def test_groups_of_version_2_up_to_the_root(machine: Path) -> None:
    write(machine / "proc/self", {"cgroup": "0::/slice/unit\n"})
    write(machine / "groups/slice/unit", {"memory.max": "max", "memory.current": GIB})
    assert host_free_bytes() == 8 * GIB
    write(machine / "groups/slice", {"memory.max": 4 * GIB, "memory.current": 3 * GIB})
    assert host_free_bytes() == GIB
    write(machine / "groups/slice", {"memory.stat": f"anon 5\ninactive_file {GIB}\n"})
    assert host_free_bytes() == 2 * GIB
    write(machine / "groups/slice", {"memory.current": 9 * GIB})
    assert host_free_bytes() == 0


def test_groups_of_version_1_and_a_container_that_sees_its_own_as_the_root(machine: Path) -> None:
    write(machine / "proc/self", {"cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n"})
    limits = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB}
    write(machine / "groups/memory", limits)
    assert host_free_bytes() == 8 * GIB  # that number means none
    limits |= {"memory.limit_in_bytes": 2 * GIB, "memory.stat": f"total_inactive_file {GIB // 2}\n"}
    write(machine / "groups/memory", limits)
    assert host_free_bytes() == 3 * GIB // 2


def test_an_address_space_limit_counts() -> None:
    limit = 4 * GIB
    code = "from hapi.process.free_memory import host_free_bytes; print(host_free_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert 0 < int(done.stdout) < limit
