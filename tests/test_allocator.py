"""Freed memory stays with the process, all of it, until it is given back; elsewhere and on request nothing is done."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from hapi import allocator

MIB = 1 << 20
PROGRAM = """
import json, resource, sys, threading
from hapi.allocator import (
    give_back_freed_memory, give_back_large_blocks, keep_freed_memory, keep_large_blocks
)

kept = keep_freed_memory()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def touch():
    for size in (20 << 20, 200 << 20):  # below and above the largest size that glibc keeps by itself
        bytearray(b"1") * size

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    touch()
    found["faults"], found["resident"] = faults(), resident()

found = {"kept": kept}
if len(sys.argv) > 1:
    give_back_large_blocks()
    touch()
    found["faults_between"] = faults()
    keep_large_blocks()
thread = threading.Thread(target=measure)  # not the one whose heap is the process's
thread.start()
thread.join()
give_back_freed_memory()
found["given_back"] = found["resident"] - resident()
print(json.dumps(found))
"""


def measured(*arguments: str, **environment: str) -> dict[str, int]:
    """What a process of its own finds."""
    mine = {name: value for name, value in os.environ.items() if name not in allocator.OWN}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**mine, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_freed_memory_is_there_for_what_comes_next() -> None:
    usual, kept = measured(MALLOC_ARENA_MAX="8"), measured()
    assert not usual["kept"] and kept["kept"]
    assert usual["faults"] > 10_000 and kept["faults"] < 100
    assert kept["given_back"] > 150 * MIB


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_freed_memory_is_kept_anew_when_large_blocks_were_given_back_for_a_while() -> None:
    found = measured("give back")
    assert found["kept"] and found["faults_between"] > 10_000 and found["faults"] < 100


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_ARENA_MAX": "2"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    ],
)
def test_what_the_environment_says_stands(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "_function", lambda name: pytest.fail(f"{name} was called"))
    assert not allocator.keep_freed_memory(environment)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_function", lambda name: None)
    assert not allocator.keep_freed_memory({})
    allocator.give_back_freed_memory()


def test_an_option_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def mallopt(option: int, value: int) -> int:
        asked.append(option)
        return int(option != -8)

    monkeypatch.setattr(allocator, "_function", lambda name: mallopt)
    assert not allocator.keep_freed_memory({"GLIBC_TUNABLES": "glibc.rtld.nns=4"})
    assert sorted(asked) == [-8, -4, -2, -1]
