"""Weights of a pushed model over sockets: by ranges of packs, as frames from servers without, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_tools import ServedApplication, served
from support.loading_tools import flip, loading_threads
from support.local_job import pack_blobs
from support.proxy import Proxy
from support.waiting import until

from hapi.client.models import ClientModel, open_client_model
from hapi.client.settings import ModelSettings
from hapi.client.transport.server_pool import ServerPool, Stopped
from hapi.errors import DataError, HapiError, NotFoundError, TooLargeError
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.opening import open_model
from hapi.repository.push import push
from hapi.store.local import LocalStore
from hapi.wire.transport.http import HttpTransport

SHAPE = (3, 32, 32)
SPEC = ModelSpec(architecture="resnet18", weights="random:0", input_shape=SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored-tensors")
    pack_blobs(folder, side=SHAPE[1])
    push(LocalStore(str(folder)), "net", build(SPEC), SPEC)
    return folder


@pytest.fixture(scope="module")
def application(folder: Path) -> Iterator[ServedApplication]:
    with served(folder) as running:
        yield running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


class Counted(HttpTransport):
    """Notes ranges and streams; ``refuse`` is called before each range."""

    def __init__(self, url: str, refuse: Callable[[], None] = lambda: None) -> None:
        super().__init__(url)
        self.ranges: list[int] = []
        self.streams = 0
        self._refuse = refuse

    def read_range(self, path: str, start: int, out: Any, *more: Any) -> None:
        self._refuse()
        self.ranges.append(sum(part.nbytes for part in out))
        super().read_range(path, start, out, *more)

    def stream(self, *arguments: Any, **named: Any) -> Any:
        self.streams += 1
        return super().stream(*arguments, **named)


def opened(*transports: HttpTransport) -> ClientModel:
    pool = ServerPool(transports, retry_timeout=30.0)
    return open_client_model(ModelSettings(model="store:net"), pool, None, seed=0, classes=1000, shape=SHAPE)


def check_whole(model: ClientModel) -> None:
    expected = build(SPEC).module.state_dict()
    names = model.layered.tensor_names(0, len(model.layered))
    assert names and all(torch.equal(model.layered.tensors.get(n), expected[n]) for n in names)


def test_ranges_bring_the_weights_and_little_else(folder: Path, application: ServedApplication) -> None:
    transport = Counted(f"http://127.0.0.1:{application.port}")
    model = opened(transport)
    model.load_from(0)
    check_whole(model)
    held = open_model(LocalStore(str(folder)), "net").manifest.tensors.values()
    needed = sum({entry.digest: entry.nbytes for entry in held}.values())
    assert transport.streams == 0 and len(transport.ranges) > 1
    assert needed <= sum(transport.ranges) <= 1.01 * needed
    received = transport.received_bytes()
    assert received is None or received < 1.01 * needed + 200_000


def test_a_part_of_the_layers_is_few_bytes(application: ServedApplication) -> None:
    transport = Counted(f"http://127.0.0.1:{application.port}")
    model = opened(transport)
    model.load_from(12)
    assert 0 < sum(transport.ranges) < 12 << 20 and transport.streams == 0


@pytest.mark.slow_except("too long")
@pytest.mark.parametrize("error", [NotFoundError, TooLargeError], ids=["no packs", "too long"])
def test_a_server_without_ranges_sends_frames(application: ServedApplication, error: type[HapiError]) -> None:
    def refuse() -> None:
        raise error("not here")

    transport = Counted(f"http://127.0.0.1:{application.port}", refuse)
    model = opened(transport)
    model.load_from(0)
    check_whole(model)
    assert transport.streams == 1


class Change:
    """Changes what a server sends, once so many bytes of answers have come."""

    def __init__(self, after: int, change: Callable[[bytes], bytes | None]) -> None:
        self._left, self._change, self._lock = after, change, threading.Lock()
        self.done = False

    def __call__(self, data: bytes) -> bytes | None:
        with self._lock:
            self._left -= len(data)
            if self._left >= 0 or self.done:
                return data
            self.done = True
        return self._change(data)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.slow
def test_a_damaged_answer_is_named_and_not_used(application: ServedApplication) -> None:
    change = Change(20 << 20, flipped)
    model = opened(Counted(Proxy(application.port, change).url))
    with pytest.raises(DataError, match=r"model 'net': the stored bytes of tensor '.*' .* are damaged"):
        model.load_from(0)
    assert change.done
    assert all(model.layered.tensors.get(n).is_meta for n in model.layered.tensor_names(0, 12))
    model.load_from(0)
    check_whole(model)


@pytest.mark.slow
def test_an_answer_that_is_cut_off_is_asked_for_anew(application: ServedApplication) -> None:
    change = Change(20 << 20, lambda data: None)
    transport = Counted(Proxy(application.port, change).url)
    model = opened(transport)
    model.load_from(0)
    check_whole(model)
    assert change.done and transport.streams == 0


def test_a_server_that_stands_still_holds_up_nobody_who_leaves(application: ServedApplication) -> None:
    going_on, stands = threading.Event(), threading.Event()

    def hold(data: bytes) -> bytes:
        stands.set()
        assert going_on.wait(240)
        return data

    pool = ServerPool([Counted(Proxy(application.port, Change(8 << 20, hold)).url)], retry_timeout=30.0)
    model = open_client_model(ModelSettings(model="store:net"), pool, None, seed=0, classes=1000, shape=SHAPE)
    ended: list[BaseException] = []

    def loading() -> None:
        try:
            model.load_from(0)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=loading)
    thread.start()
    assert stands.wait(240)
    pool.close()
    thread.join(240)
    going_on.set()
    assert [type(error) for error in ended] == [Stopped]
    until(lambda: not loading_threads(), 240, "the end of the readers")
    assert all(model.layered.tensors.get(n).is_meta for n in model.layered.tensor_names(0, 12))


@pytest.mark.slow
def test_damage_in_the_store_is_named(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "store")
    store = LocalStore(str(tmp_path / "store"))
    flip(store, open_model(store, "net").manifest.tensors["layer3.0.conv1.weight"])
    with served(tmp_path / "store") as server:
        transport = Counted(f"http://127.0.0.1:{server.port}")
        with pytest.raises(DataError, match=r"tensor 'layer3\.0\.conv1\.weight'"):
            opened(transport).load_from(0)
        assert transport.streams == 0
