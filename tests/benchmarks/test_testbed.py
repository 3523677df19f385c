"""The two-tier test bed: made, used, re-tuned and always removed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed import testbed
from benchmarks.testbed.bed import Cores
from benchmarks.testbed.signals import ended_in_order, no_interrupts
from benchmarks.testbed.testbed import ADDRESS, TestBed, why_not
from hapi.errors import UsageError

needs_bed = pytest.mark.skipif(why_not() is not None, reason=f"no test bed here: {why_not()}")

SOFTIRQS = Path("/proc/softirqs")

# Sends and receives some bytes, printing bits per second and the core that the receiver ran on.
SENDER = """
import socket, sys
listening = socket.create_server((sys.argv[1], 5000)); print("ready", flush=True)
connection, _ = listening.accept()
connection.sendall(bytes(int(sys.argv[2])))
connection.close()
"""
RECEIVER = """
import os, socket, sys, time
start, total = time.perf_counter(), 0; connection = socket.create_connection((sys.argv[1], 5000))
while piece := connection.recv(1 << 20): total += len(piece)
print(total * 8 / (time.perf_counter() - start), *os.sched_getaffinity(0))
"""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    if why_not() is None:
        assert [name for name in testbed.beds() if f"-{os.getpid()}-" in name] == []


def transfer(bed: TestBed, size: int) -> tuple[float, list[str]]:
    sender = bed.start(
        "server", [sys.executable, "-c", SENDER, ADDRESS["server"], str(size)], stdout=subprocess.PIPE
    )
    assert sender.stdout is not None and sender.stdout.readline() == "ready\n"
    receiver = bed.start(
        "client", [sys.executable, "-c", RECEIVER, ADDRESS["server"]], stdout=subprocess.PIPE
    )
    rate, *cores = receiver.communicate(timeout=240)[0].split()
    assert sender.wait(240) == 0
    return float(rate), cores


def timers_of_queues() -> int:
    """How often a queue of this machine went on sending after it had waited, all processors together."""
    lines = SOFTIRQS.read_text().splitlines()
    return sum(int(count) for line in lines if "NET_TX" in line for count in line.split()[1:])


def check_rate(bed: TestBed, size: int, least: float, most: float) -> list[str]:
    """The cores of a receiver. What else this machine does only makes transfers slower: one of several is not."""
    rates = []
    while not rates or (rates[-1] <= least and len(rates) < 20):
        rate, cores = transfer(bed, size)
        rates.append(rate)
    assert least < max(rates) < most, rates
    return cores


@pytest.mark.slow
@needs_bed
@pytest.mark.skipif(not SOFTIRQS.exists(), reason="the system does not count them")
def test_the_link_does_not_cut_what_tcp_hands_down_in_one_piece() -> None:
    """It did, and a timer for each packet of 1500 bytes took a third of the server's core from its forward passes."""
    for bandwidth, size in ((10e6, 1_875_000), (160e6, 8_000_000)):
        with TestBed(bandwidth) as bed:
            counts = []
            while not counts or (
                counts[-1] >= size // 8_000 and len(counts) < 10
            ):  # others may have links, too
                before = timers_of_queues()
                transfer(bed, size)
                counts.append(timers_of_queues() - before)
            assert counts[-1] < size // 8_000, f"{counts} at {bandwidth:.0f} bit/s"


@pytest.mark.slow
@needs_bed
def test_the_link_has_its_bandwidth_and_the_tiers_their_cores() -> None:
    with TestBed(50e6) as bed:
        cores = check_rate(bed, 3_000_000, 35e6, 60e6)
        assert bed.cores is not None and [int(c) for c in cores] == list(bed.cores.client)
        bed.set_bandwidth(200e6)
        check_rate(bed, 8_000_000, 120e6, 240e6)
        assert bed.bandwidth == 200e6 and str(bed.cores.client) in bed.describe()
        bed.set_bandwidth(None)
        bed.set_bandwidth(None)
        check_rate(bed, 8_000_000, 240e6, math.inf)


@needs_bed
def test_processes_and_namespaces_go_with_the_bed() -> None:
    with pytest.raises(ValueError, match="in the middle"), TestBed() as bed:
        process = bed.start("server", ["sleep", "1000"])
        raise ValueError("in the middle")
    assert process.poll() is not None


HOLDER = """
import sys, time
from benchmarks.testbed.testbed import TestBed
with TestBed(1e6) as bed:
    print(bed.start("client", ["sleep", "1000"]).pid, flush=True)
    while True:  # a signal that comes just before a sleep is seen after it
        time.sleep(0.1)
"""


def holder() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_gone(pid: int) -> bool:
    for _ in range(4800):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@needs_bed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_bed(number: signal.Signals) -> None:
    process, sleeper = holder()
    process.send_signal(number)
    process.communicate(timeout=240)
    assert is_gone(sleeper)
    assert not [name for name in testbed.beds() if f"-{process.pid}-" in name]


@pytest.mark.slow
@needs_bed
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    process, sleeper = holder()
    process.kill()
    process.wait(240)
    assert [name for name in testbed.beds() if f"-{process.pid}-" in name]
    with TestBed():
        assert not [name for name in testbed.beds() if f"-{process.pid}-" in name]
    assert is_gone(sleeper)
    assert process.stdout is not None
    process.stdout.close()


LOOSE_HOLDER = """
import time
from benchmarks.testbed.loose import LooseBed
with LooseBed("a test") as bed:
    print(bed.start("client", ["sleep", "1000"]).pid, flush=True)
    while True:  # a signal that comes just before a sleep is seen after it
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_a_loose_bed_started(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOSE_HOLDER],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    assert process.stdout is not None
    sleeper = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=240)
    assert process.returncode == 128 + number and is_gone(sleeper)


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
            with no_interrupts():
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_root_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(UsageError, match="no test bed on this machine: network namespaces need root"),
        TestBed(),
    ):
        pass


def test_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(UsageError, match="two processor cores"):
        Cores.split_machine()
