"""A server whose machine has no memory left, and one that is asked for more than it may take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from PIL import Image
from support.harness import ServerProcess, losses, report_of, server, start_train, train, wait_for
from support.hostile_tools import peak_bytes, resident_bytes, virtual_bytes
from support.http_tools import EXTRACT, SAMPLES, Answer, Known, check_problem, exchange, received

from hapi.data.dataset import find_dataset
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

MIB = 1 << 20
SIDE = 224
pytestmark = pytest.mark.slow


@contextmanager
def no_more_than(process: ServerProcess, spare: int) -> Iterator[None]:
    """Inside the block the process may take ``spare`` bytes of address space beyond what it has."""
    limit = virtual_bytes(process.process.pid) + spare
    resource.prlimit(process.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(
            process.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )


def large(known: Known, ids: list[int]) -> dict[str, Any]:
    """A request for features at 224 pixels: 3 MiB a sample."""
    return known.extract(
        ids, model=known.model_at(SIDE), transform=TransformSpec.for_image_size(SIDE).to_json()
    )


def ask(process: ServerProcess, document: dict[str, Any], path: str = EXTRACT) -> Answer:
    return exchange(process.port, "POST", path, document)


def errors(process: ServerProcess, kind: str) -> float:
    """Requests that ended with this kind of error so far; 0 while the server has not even memory to say so."""
    try:
        lines = exchange(process.port, "GET", "/metrics").body.decode().splitlines()
    except (ConnectionError, TimeoutError):  # out of memory before the answer, or between two writes of it
        return 0
    return float(next((v for n, v in map(str.split, filter(_is_sample, lines)) if f'"{kind}"' in n), 0))


def is_short(process: ServerProcess) -> bool:
    """Whether requests found no memory: two that could be told so, or one that was just disconnected."""
    try:
        exchange(process.port, "GET", "/healthz")
    except (ConnectionError, TimeoutError):
        return True
    return errors(process, "host-memory") > 1


def _is_sample(line: str) -> bool:
    return line.startswith("hapi_errors_total{")


def features(answer: Answer) -> np.ndarray:
    """Of an answer with status 200, float32."""
    _, (found, _) = received(answer.body, 2)
    return found.view(np.float32)


def until_answered(process: ServerProcess, document: dict[str, Any], path: str = EXTRACT) -> Answer:
    """Ask again as a client does for as long as the machine is out of memory; nothing else may happen."""
    for _ in range(12):
        answer = ask(process, document, path)
        if answer.status == 200 and b"urn:hapi:problem" not in answer.body[-4096:]:
            return answer
        check_short(answer)
    raise AssertionError("halving did not help")


def check_short(answer: Answer) -> None:
    """The server says that it is out of memory for now, before the answer or at its end."""
    if answer.status == 200:
        assert b"urn:hapi:problem:host-memory" in answer.body[-4096:]
    else:
        check_problem(answer, 503, "out of memory")
        assert answer.json()["type"] == "urn:hapi:problem:host-memory"
        assert answer.headers["Retry-After"] == "1"


@pytest.mark.long
def test_a_machine_without_memory_halves_and_asks_to_come_back(folder: Path, known: Known) -> None:
    ids = [n % 40 for n in range(64)]
    with server(folder, "--cos-batch", "64", "--max-running", "2", fresh=True) as process:
        first = ask(process, large(known, ids[:1]))  # layers loaded, threads begun
        assert first.status == 200
        with no_more_than(process, 0):
            check_short(ask(process, large(known, ids)))
            assert exchange(process.port, "GET", "/healthz").status == 200
        assert errors(process, "host-memory") >= 1
        with no_more_than(process, 100 * MIB):  # of the 800 that 64 samples take
            short = until_answered(process, large(known, ids))
        roomy = ask(process, large(known, ids))
        np.testing.assert_allclose(features(short), features(roomy), rtol=1e-4, atol=1e-4)
        assert errors(process, "internal") == 0


def test_training_goes_on_when_the_machine_has_memory_again(folder: Path, tmp_path: Path) -> None:
    arguments = (
        "--dataset", "digits", "--model", "resnet18", "--image-size", "64", "--weights", "random:0", "--bs", "40",
        "--epochs", "1", "--split", "freeze", "--lr", "0.01",
    )  # fmt: skip
    reports = tmp_path / "short.json", tmp_path / "calm.json"
    with server(folder, "--max-running", "2", fresh=True) as process:
        with no_more_than(process, 2 * MIB):
            training = start_train("--server", process.url, *arguments, "--report", str(reports[0]))
            try:
                wait_for(lambda: is_short(process), what="a request without memory")
            except BaseException:
                training.kill()
                raise
        output, _ = training.communicate(240)
        assert training.wait() == 0, output
        assert errors(process, "internal") == 0
        train("--server", process.url, *arguments, "--report", str(reports[1]))
    short, calm = (losses(report_of(report)) for report in reports)
    assert short == pytest.approx(calm, rel=1e-5)


# -- more than a server may take -----------------------------------------------------------------------------------

BUDGETS = ("--device-memory", "500MB", "--host-memory", "600MB")
MARGIN = 150 * MIB
"""What the heap loses between blocks, and the libraries' own memory."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two JPEGs of 24 megapixels, in files of 40 MiB: the rest is a thumbnail, say, behind the picture."""
    images, store = tmp_path_factory.mktemp("images") / "camera", tmp_path_factory.mktemp("photographs")
    images.mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        coarse = Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8))
        coarse.resize((6000, 4000)).save(images / f"{number}.jpg")
        with (images / f"{number}.jpg").open("ab") as file:
            file.write(rng.bytes(40 * MIB - file.tell()))
    pack(open_source(str(images.parent)), open_store(str(store)), "photographs", PackOptions())
    return store


def test_large_originals_stay_within_the_budget(photographs: Path, known: Known) -> None:
    """Four requests at once, each for 320 MiB of stored bytes and 8 images of 24 megapixels."""
    document = large(known, [0, 1] * 4)
    document["dataset"] = find_dataset(open_store(str(photographs)), "photographs").reference.to_json()
    with server(photographs, *BUDGETS, "--cos-batch", "256", fresh=True) as process:
        idle = resident_bytes(process.process.pid)
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda _: ask(process, document), range(4)))
        peak = peak_bytes(process.process.pid)
    with server(photographs, "--cos-batch", "256", "--host-memory", "20GB") as roomy:
        expected = features(ask(roomy, document))
    assert [answer.status for answer in answers] == [200] * 4
    assert all(np.array_equal(features(answer), expected) for answer in answers)
    assert peak - idle < 1100e6 + MARGIN


def test_long_samples_are_streamed(photographs: Path) -> None:
    """Eight requests at once for stored samples of 40 MiB, with room for two pieces of 8 MiB each."""
    store = open_store(str(photographs))
    dataset = find_dataset(store, "photographs")
    document = {"dataset": dataset.reference.to_json(), "ids": [0, 1, 0]}
    with server(photographs, *BUDGETS, "--max-running", "8", fresh=True) as process:
        idle = resident_bytes(process.process.pid)
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda _: digest(ask(process, document, SAMPLES)), range(8)))
        peak = peak_bytes(process.process.pid)
    whole = dataset.read([0, 1, 0])
    assert answers == [xxhash.xxh3_64_hexdigest(whole.data)] * 8
    assert peak - idle < 300e6 + MARGIN


def test_an_image_that_never_fits_is_told_with_the_numbers(photographs: Path, known: Known) -> None:
    document = large(known, [0])
    document["dataset"] = find_dataset(open_store(str(photographs)), "photographs").reference.to_json()
    with server(photographs, "--host-memory", "300MB") as process:
        answer = ask(process, document)
    check_problem(answer, 507, "6000 x 4000", "150000000", "--host-memory", "split 0")


def digest(answer: Answer) -> str:
    """Of the stored bytes of an answer."""
    assert answer.status == 200
    return xxhash.xxh3_64_hexdigest(received(answer.body, 3)[1][0])
