"""The ledger of the server's own memory: claims within the budget, pieces within claims, images in their room."""

from __future__ import annotations

import io
import json
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TENSORS,
    Known,
    check_problem,
    exchange,
    make_store,
    received,
    served,
)

from hapi.data.dataset import Dataset
from hapi.data.manifest import SampleLayout
from hapi.data.sample_directory import Located
from hapi.data.transforms.decode_limits import DecodeLimits, Held, image_bytes
from hapi.errors import (
    BadRequestError,
    BusyError,
    DataError,
    DeviceMemoryError,
    HostBudgetError,
    StoreError,
    WireError,
    from_problem,
)
from hapi.server.decoding.pool import Decoders
from hapi.server.decoding.worker import decoded, task_document
from hapi.server.device.host_memory import HOST_KINDS, HostMemory, HostNeed, ImageRoom, host_budget
from hapi.server.stored_bytes import by_bytes
from hapi.waiting import Interest
from hapi.wire.frames import END_BYTES, FrameHeader, StreamedBytes, TensorSpec, data_frame
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples

MIB = 1 << 20
SMALL = TransformSpec.for_image_size(32)


def test_a_request_gets_its_share_or_what_it_needs() -> None:
    memory = HostMemory(800, slots=4)
    assert memory.share == 100
    for least, most, granted in ((1, 50, 50), (1, 500, 100), (300, 500, 300)):
        with memory.reserve("features", HostNeed(min_bytes=least, max_bytes=most), Interest()) as nbytes:
            assert nbytes == granted == memory.kinds()["features"]
    assert set(memory.kinds()) == set(HOST_KINDS) and not any(memory.kinds().values())


def test_what_never_fits_is_told_with_the_numbers() -> None:
    memory = HostMemory(800, slots=4)
    with pytest.raises(HostBudgetError, match=r"401 bytes .* 400 for requests .*--host-memory"):
        memory.reserve("samples", HostNeed(min_bytes=401, max_bytes=401), Interest()).__enter__()
    assert not HostBudgetError.retryable and HostBudgetError.status == 507


def test_requests_wait_in_the_order_in_which_they_came() -> None:
    memory, order = HostMemory(800, slots=4), list[int]()

    def ask(number: int, least: int) -> None:
        with memory.reserve("features", HostNeed(min_bytes=least, max_bytes=least), Interest()):
            order.append(number)

    with memory.reserve("samples", HostNeed(min_bytes=350, max_bytes=350), Interest()):
        threads = []
        for number, least in enumerate(
            (400, 10, 10)
        ):  # the small ones must not pass the large one by for ever
            threads.append(threading.Thread(target=ask, args=(number, least)))
            threads[-1].start()
            while memory.waiting <= number:
                time.sleep(0.001)
        assert memory.status()["waiting"] == 3
    for thread in threads:
        thread.join(240)
    assert order[0] == 0 and sorted(order) == [0, 1, 2] and memory.waiting == 0


def test_waiting_ends_with_the_client_and_with_the_time() -> None:
    memory, gone = HostMemory(800, slots=4), Interest()
    need = HostNeed(min_bytes=400, max_bytes=400)
    with memory.reserve("features", need, Interest()):
        with pytest.raises(BusyError, match="max-request-seconds"):
            memory.reserve("features", need, Interest(deadline=time.monotonic())).__enter__()
        gone.set()
        with pytest.raises(BadRequestError, match="went away"):
            memory.reserve("features", need, gone).__enter__()
    assert memory.waiting == 0
    with memory.reserve("features", need, Interest()):
        pass


def test_many_requests_never_hold_more_than_the_budget() -> None:
    memory = HostMemory(1000, slots=8, decoders=2, decoder_bytes=50)
    assert memory.kinds()["decoders"] == 100 and memory.images.nbytes == 250
    rng = np.random.default_rng(0)

    def ask(least: int) -> int:
        with memory.reserve("features", HostNeed(min_bytes=least, max_bytes=2 * least), Interest()):
            return sum(memory.kinds().values())

    with ThreadPoolExecutor(16) as crowd:
        assert max(crowd.map(ask, rng.integers(1, 400, 300).tolist())) <= 500
    assert memory.kinds()["features"] == 0


def test_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.server.device.host_memory.host_free_bytes", lambda: 8000)
    assert host_budget(123, 0) == 123
    assert host_budget(None, 4000) == 2000
    assert host_budget(None, 7990) == 1000


# -- images ------------------------------------------------------------------------------------------------------


def test_images_wait_for_room_and_give_it_back() -> None:
    room = ImageRoom(image_bytes(1000, 1000, "plain", SMALL) + 3 * MIB)
    limits = DecodeLimits(room=room)
    first, second = Held(limits, SMALL), Held(limits, SMALL)
    first(1000, 1000, "plain")
    assert room.held == first.nbytes > 7_000_000
    begun = threading.Event()

    def decode() -> None:
        second(1000, 1000, "plain")
        begun.set()

    waiting = threading.Thread(target=decode)
    waiting.start()
    assert not begun.wait(0.05)
    first.leave()
    assert begun.wait(240)
    second.leave()
    second.leave()
    waiting.join()
    assert room.held == 0


def test_images_that_are_refused_and_tried_again_hold_once() -> None:
    room = ImageRoom(64 * MIB)
    held = Held(DecodeLimits(room=room), SMALL)
    held(1000, 1000, "plain")
    held(1000, 1000, "JPEG")
    assert room.held == held.nbytes == image_bytes(1000, 1000, "JPEG", SMALL)
    held(10, 10, "PNG")  # small ones hold nothing
    assert room.held == 0


def test_images_that_never_fit_and_bombs() -> None:
    held = Held(DecodeLimits(room=ImageRoom(MIB)), SMALL)
    with pytest.raises(
        HostBudgetError, match=r"1000 x 1000 takes \d+ bytes .* 1048576 .*--host-memory.*split 0"
    ):
        held(1000, 1000, "PNG")
    held = Held(DecodeLimits(999_999, "--max-image-pixels of hapi-server"), SMALL)
    with pytest.raises(DataError, match=r"1000 x 1000 .*999999 pixels, --max-image-pixels of hapi-server"):
        held(1000, 1000, "PNG")
    with pytest.raises(DataError, match="too large"):
        Held(DecodeLimits(), SMALL)(100_000, 1000, "PNG")


def test_processes_that_decode_have_rooms_of_their_own() -> None:
    """Half of the budget, shared among them; what they say of it arrives as it was."""
    memory = HostMemory(16 * MIB, slots=4, decoders=2)
    file = io.BytesIO()
    Image.fromarray(np.zeros((1000, 1000, 3), np.uint8)).save(file, "PNG")
    data = np.frombuffer(file.getvalue(), np.uint8)
    samples = Samples(np.array([3]), data, np.array([0, len(data)]), np.array([0]))
    layout, limits = SampleLayout(kind="encoded"), DecodeLimits(room=memory.images)
    order = json.loads(json.dumps(task_document(samples, layout, SMALL, 1, limits)))
    problem = decoded(order, data, mmap.mmap(-1, 1 << 16))["problem"]
    error = from_problem(problem, problem["status"])
    assert isinstance(error, HostBudgetError) and isinstance(error, DeviceMemoryError)  # auto moves the split
    assert "has 4194304 for that" in str(error) and "each of 2 processes" in str(error)
    assert memory.images.held == 0


# -- frames ------------------------------------------------------------------------------------------------------


def test_frames_by_bytes() -> None:
    assert by_bytes(np.array([3, 3, 3, 3]), 6, 12) == [(0, 2), (2, 4)]
    assert by_bytes(np.array([1, 13, 1, 1]), 100, 12) == [(0, 1), (1, 2), (2, 4)]
    assert by_bytes(np.array([13, 13]), 100, 12) == [(0, 1), (1, 2)]
    assert by_bytes(np.array([5]), 1, 12) == [(0, 1)]


def test_a_tensor_in_pieces_is_the_same_frame() -> None:
    data = np.random.default_rng(0).integers(0, 255, 3 * MIB + 5, np.uint8)
    header = FrameHeader(np.array([7]), (TensorSpec("stored", "uint8", (len(data),)),))
    whole = b"".join(data_frame(header, [data.data]))
    parts = [data[:5], data[5:MIB], data[MIB:]]
    assert b"".join(data_frame(header, [StreamedBytes(len(data), [p.data for p in parts])])) == whole
    with pytest.raises(ValueError, match="lack 5 of"):
        list(data_frame(header, [StreamedBytes(len(data), [data[5:].data])]))
    with pytest.raises(ValueError, match="lengths"):
        list(data_frame(header, [StreamedBytes(5, [])]))


# -- a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of more than 60 bytes are long ones."""
    monkeypatch.setattr("hapi.server.stored_bytes.LEAST_FRAME", 30)
    monkeypatch.setattr("hapi.server.stored_bytes.FRAME_BYTES", 30)


def test_long_samples_and_tensors_are_the_same_in_pieces(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    known, ids = Known(folder), [5, 0, 5, 39, 12]
    asked = ((SAMPLES, known.samples(ids), 3), (TENSORS, known.tensors(), 1))
    with served(folder) as whole:
        expected = [exchange(whole.port, "POST", path, document) for path, document, _ in asked]
    request.getfixturevalue("short_pieces")
    with served(folder) as pieces:
        found = [exchange(pieces.port, "POST", path, document) for path, document, _ in asked]
    got_ids, (stored, offsets, _) = received(found[0].body, 3)
    assert got_ids == ids and len(offsets) == 2 * 8 * len(ids)  # each in a frame of its own
    assert np.array_equal(stored, received(expected[0].body, 3)[1][0])
    assert found[1].status == 200, found[1].body
    assert found[1].body[:-END_BYTES] == expected[1].body[:-END_BYTES]


@pytest.mark.usefixtures("short_pieces")
def test_a_long_sample_that_changes_while_it_is_sent_is_never_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Known(folder)

    def other(self: Dataset, place: Located, start: int, out: memoryview) -> None:
        out[:] = bytes(len(out))

    with served(folder) as application:
        good = exchange(application.port, "POST", SAMPLES, known.samples([5]))
        monkeypatch.setattr(Dataset, "read_part", other)
        cut = exchange(application.port, "POST", SAMPLES, known.samples([5]))
    assert len(cut.body) < len(good.body) and b"changed while it was sent" in cut.body
    with pytest.raises((StoreError, WireError)):
        received(cut.body, 3)


@pytest.mark.usefixtures("short_pieces")
def test_a_damaged_long_sample_is_not_sent(tmp_path: Path) -> None:
    folder = make_store(tmp_path)
    known = Known(folder)
    place = known.dataset.locate([5])
    shard = folder / known.dataset.shard_key(int(place.shard[0]))
    with shard.open("r+b") as file:
        file.seek(int(place.offset[0]) + int(place.length[0]) - 1)
        file.write(b"?")
    with served(folder) as application:
        answer = exchange(application.port, "POST", SAMPLES, known.samples([5]))
    check_problem(answer, 500, "sample 5", "checksum")


def test_pieces_do_not_change_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known(folder)
    with served(folder, cos_batch=16) as application:
        whole = exchange(application.port, "POST", EXTRACT, known.extract(list(range(40))))
    lengths = known.dataset.lengths(np.arange(40))
    with served(folder, cos_batch=16) as application:
        monkeypatch.setattr(application.service.host, "share", 0)  # pieces of one sample
        single = exchange(application.port, "POST", EXTRACT, known.extract(list(range(40))))
        application.idle()
        status = exchange(application.port, "GET", "/v1/status").json()["host_memory"]
    assert lengths.max() > 0 and single.body[:-END_BYTES] == whole.body[:-END_BYTES]
    assert status["waiting"] == 0 and status["reserved"]["features"] == 0


def test_decoding_that_runs_out_of_memory_is_halved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, honest, sizes = Known(folder), Decoders.batch, list[int]()

    def greedy(self: Decoders, samples: Samples, *rest: Any) -> Any:
        sizes.append(len(samples))
        if len(samples) > 3:
            raise MemoryError
        return honest(self, samples, *rest)

    with served(folder, cos_batch=16) as application:
        whole = exchange(application.port, "POST", EXTRACT, known.extract(list(range(16))))
        monkeypatch.setattr(Decoders, "batch", greedy)
        halved = exchange(application.port, "POST", EXTRACT, known.extract(list(range(16))))
        assert sizes[:4] == [16, 8, 4, 2] and halved.body[:-END_BYTES] == whole.body[:-END_BYTES]
        monkeypatch.setattr(Decoders, "batch", lambda *_: np.empty(1 << 50))
        check_problem(exchange(application.port, "POST", EXTRACT, known.extract()), 503, "out of memory")


def test_a_server_with_too_little_memory_says_so(folder: Path) -> None:
    known = Known(folder)
    with served(folder, host_memory=1000) as application:
        for path, document in (
            (EXTRACT, known.extract()),
            (SAMPLES, known.samples()),
            (TENSORS, known.tensors()),
        ):
            answer = exchange(application.port, "POST", path, document)
            check_problem(answer, 507, "--host-memory", "500")
            assert answer.json()["type"] == "urn:hapi:problem:host-budget"
