"""For all tests: signals as a terminal gives them, and a cache folder of their own.

A shell that starts a job in the background lets it ignore SIGINT, and nohup SIGHUP; what ignores a signal hands that
on to the processes it starts. The tests send such signals and expect them to arrive, wherever they are run.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from hapi import allocator

if TYPE_CHECKING:
    from _typeshed import HasFileno
    from support.harness import ServerProcess

    from hapi.server.service import Service
    from hapi.wire.transport.http import Handler

# On a machine with other work a single example may take any time.
settings.register_profile("hapi", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("hapi")

# Tests make and drop more than the collector's 700 objects at a time.
gc.set_threshold(10_000, 10, 10)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What hapi keeps about this machine must neither come from the user's folder nor go there. Torch's own stays.
_cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("TORCH_HOME", str(_cache_home / "torch"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hapi-test-cache-")
# Trainings keep nothing unless a test says so: the next one would begin where it left off.
os.environ.setdefault("HAPI_TRAIN_CACHE", "off")
# What is loaded comes from where the test says, not from memory that another test filled.
os.environ.setdefault("HAPI_SHARED_WEIGHTS", "off")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A long test is a slow one too, so that ``-m "not slow"`` leaves it out; the longest files come first."""
    from support.by_file import longest_first
    from support.case_marks import mark_cases

    unknown = mark_cases(items)
    if unknown and config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # else not all may be collected
        raise pytest.UsageError("\n".join(unknown))
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    longest_first(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which ``-m`` leaves nothing is not imported, unless it is named."""
    from support.by_file import leaves_nothing

    if not collection_path.match("test_*.py"):
        return None
    return leaves_nothing(str(config.option.markexpr), collection_path.read_text(encoding="utf-8")) or None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Give the process its signals back after each test: a server that one ran in this process keeps them for good."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``: a process gets the tests of a file at once, so that fixtures of a file are made once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.file_scheduler import ByFile

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the garbage collector need not look through it, neither then nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _leave_to_no_collector()


def _leave_to_no_collector() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _collected_once() -> Iterator[None]:
    """What a file of tests imported or left in a cache stays, and no later collection looks through it.

    Of all time of the fast tests, the collector took a tenth, most of it where code calls it itself.
    """
    yield
    _leave_to_no_collector()


@pytest.fixture(autouse=True)
def _memory_as_before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in the tests' own process leave its allocator alone: tests look at what memory it grows by."""
    if request.path.name != "test_allocator.py":
        looks, found = ("mallinfo2",), allocator._function
        monkeypatch.setattr("hapi.allocator._function", lambda name: found(name) if name in looks else None)


@pytest.fixture(autouse=True, scope="module")
def _weights_drawn_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drawing, tracing and digesting is half of what many tests do; those of the models themselves do all anew."""
    if "models" in request.path.parts:
        yield
        return
    from support.drawn_once import digested_once, drawn_once, traced_once

    from hapi.models.graph.digest import TensorDigests

    with pytest.MonkeyPatch.context() as patch:
        for module in ("hapi.repository.built", "hapi.models.zoo.build"):
            patch.setattr(f"{module}.build_module", drawn_once)
        for module in ("hapi.models.zoo.build", "hapi.repository.pushed", "hapi.repository.sources.fitting"):
            patch.setattr(f"{module}.layers_of", traced_once)
        patch.setattr(TensorDigests, "of", digested_once(TensorDigests.of))
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests' own process writes need not outlive a power cut; processes that it starts do wait for theirs.

    Where pages are to leave the page cache they must be on the disk first.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not {"benchmarks", "process"} & set(request.path.parts):
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, _checked_only)
        yield


_OWN_SERVERS = {"test_embedded.py", "test_server_replica.py", "test_ray_fleet.py"}
"""Test files about how a process starts its server, and how that ends."""


@pytest.fixture(autouse=True, scope="module")
def _servers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers that the tests' own process starts for its trainings need not import torch again."""
    from support.forked import fork_child_servers

    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in _OWN_SERVERS:
            fork_child_servers(patch)
        yield


_GIVE_BACK = {"test_predicted_memory.py", "test_mapped_files.py"}
"""Test files about memory that a training gives back."""


@pytest.fixture(autouse=True, scope="module")
def _libraries_stay_mapped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Offloaded trainings of the tests' own process leave it its libraries, which all tests after them use."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("hapi.offload.training", "hapi.offload.activations.offload"):
            if request.path.name not in _GIVE_BACK and name in sys.modules:
                patch.setattr(sys.modules[name], "give_back_file_pages", lambda: 0)
        yield


def _checked_only(descriptor: int | HasFileno) -> None:
    """In the place of ``os.fsync``: a descriptor that is closed is still an error."""
    os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())


@pytest.fixture(autouse=True, scope="session")
def _no_run_folder() -> Iterator[None]:
    """Commands in the checkout leave no ``runs/`` there: tests say ``--no-output``, or work in a folder of theirs."""
    runs = Path(__file__).parent.parent / "runs"
    before = runs.exists()
    yield
    assert before or not runs.exists(), f"a test left {runs}: give --no-output or --output"


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A server sets up the logging of its process, which here is the tests' own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[ServerProcess]:
    """A server process over the ``store`` of a file of tests; nothing happens to it."""
    from support.harness import server

    with server(store) as process:
        yield process


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service over the dataset ``blobs``, without a socket; tests that use it leave its store as it is."""
    from support.local_job import pack_blobs, service_of

    store = tmp_path_factory.mktemp("blobs") / "store"
    pack_blobs(store)
    with service_of(store) as running:
        yield running


@pytest.fixture(scope="session")
def remembered(service: Service) -> Handler:
    """What answers for ``service``: equal requests get equal bytes, which are computed once."""
    from support.local_job import remembering

    return remembering(service)
