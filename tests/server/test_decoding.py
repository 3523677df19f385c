"""Decoding in processes: the same results and errors as in one process, and processes that die."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.http_tools import until

from hapi.clocks import StageClock
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_batch
from hapi.errors import DataError, DrainingError, HapiError, ShortageError, UnprocessableError
from hapi.server.decoding import pool as decoding
from hapi.server.decoding import process as decoder_process
from hapi.server.decoding.pool import Decoders
from hapi.wire.references import Augmentation, Draw, TransformSpec
from hapi.wire.samples import Samples

ENCODED = SampleLayout(kind="encoded")
TRANSFORM = TransformSpec.for_image_size(24)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes for decoding need Linux")


@pytest.fixture(scope="module")
def pool() -> Iterator[Decoders]:
    decoders = Decoders(2)
    try:
        decoders.wait()
        yield decoders
    finally:
        decoders.close()


@pytest.mark.slow
def test_processes_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given the bytes of strangers."""
    secrets = ("HAPI_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_KEY",
               "HAPI_STORE", "HTTPS_PROXY", "MY_OWN_SECRET")  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, "s3cret")
    decoders = Decoders(1)
    try:
        decoders.wait()
        known = Path(f"/proc/{decoders.pids[0]}/environ").read_bytes()
        assert b"s3cret" not in known and b"PYTHONPATH=" in known
        assert decoders.batch(images(1), ENCODED, TRANSFORM, clock()).shape == (1, 3, 24, 24)
    finally:
        decoders.close()


def clock() -> StageClock:
    return StageClock(("decode",))


def samples_of(blobs: list[bytes], first: int = 100) -> Samples:
    count = len(blobs)
    offsets = np.cumsum([0, *map(len, blobs)]).astype(np.int64)
    data = np.frombuffer(b"".join(blobs), np.uint8)
    return Samples(np.arange(first, first + count), data, offsets, np.zeros(count, np.int64))


def image(seed: int, kind: str, mode: str = "RGB") -> bytes:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).convert(mode).save(out, kind)
    return out.getvalue()


def images(count: int) -> Samples:
    return samples_of(
        [image(i, "JPEG" if i % 2 else "PNG", "L" if i % 3 == 0 else "RGB") for i in range(count)]
    )


def gone(pid: int) -> bool:
    """No such process, or one that only waits for its parent to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# -- the same as in one process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
def test_images(pool: Decoders, count: int) -> None:
    samples, spent = images(count), clock()
    before = pool.cpu_seconds
    got = pool.batch(samples, ENCODED, TRANSFORM, spent)
    assert got.dtype == torch.float32 and torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))
    cpu = spent.cpu_seconds()["decode"]
    assert (cpu > 0) == (count > 0) and pool.cpu_seconds - before == pytest.approx(cpu)
    assert spent.seconds() == {"decode": 0.0}


@given(
    dtype=st.sampled_from(["uint8", "float32", "float64"]),
    channels=st.sampled_from([1, 3]),
    sides=st.tuples(st.integers(4, 20), st.integers(4, 20)),
    count=st.integers(1, 9),
    size=st.none() | st.integers(4, 16),
    mean=st.floats(-2, 2),
    seed=st.integers(0, 1 << 31),
)
def test_tensors(
    pool: Decoders,
    dtype: str,
    channels: int,
    sides: tuple[int, int],
    count: int,
    size: int | None,
    mean: float,
    seed: int,
) -> None:
    layout = SampleLayout(kind="tensor", sample_shape=(channels, *sides), sample_dtype=dtype)
    transform = None
    if size is not None:
        transform = TransformSpec(resize=size + 1, crop=size, mean=(mean, 0.1, 0.3), std=(0.3, 1.7, 0.1))
    values = np.random.default_rng(seed).random((count, channels, *sides)) * 250
    samples = samples_of([v.astype(dtype).tobytes() for v in values])
    got = pool.batch(samples, layout, transform, clock())
    assert torch.equal(got, input_batch(samples, layout, transform))


def test_random_transforms(pool: Decoders) -> None:
    augment = Augmentation(
        scale=(0.1, 1.0), ratio=(0.7, 1.4), flip=0.5, contrast=0.4, saturation=0.4, hue=0.1
    )
    samples = images(9)
    first, second = (replace(TRANSFORM, augment=augment, draw=Draw(seed=3, epoch=e)) for e in (1, 2))
    got = pool.batch(samples, ENCODED, first, clock())
    assert torch.equal(got, input_batch(samples, ENCODED, first))
    assert not torch.equal(got, pool.batch(samples, ENCODED, second, clock()))


def test_many_pieces_for_each_process(pool: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TASK_BYTES", 2 * 3 * 24 * 24 * 4)
    samples = images(19)
    got = pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))


@given(count=st.integers(1, 60), least=st.integers(1, 8), most=st.integers(1, 20))
def test_pieces(count: int, least: int, most: int) -> None:
    samples, out = samples_of([bytes([i] * i) for i in range(count)]), np.zeros((count, 3), np.float32)
    least = min(least, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "TASK_BYTES", most * 12)
        pieces = list(decoding._cut(samples, out, least))
    assert len(pieces) >= least and all(1 <= len(piece) <= most for piece, _ in pieces)
    place = 0
    for piece, part in pieces:
        assert [piece.sample(i).tolist() for i in range(len(piece))] == [
            [i] * i for i in range(place, place + len(piece))
        ]
        assert part.base is out and len(part) == len(piece)
        part[:] = piece.ids[:, None]
        place += len(piece)
    assert out[:, 0].tolist() == samples.ids.tolist()


def test_many_requests_at_a_time(pool: Decoders) -> None:
    batches = [images(count) for count in range(1, 13)]
    with ThreadPoolExecutor(6) as callers:
        got = list(callers.map(lambda s: pool.batch(s, ENCODED, TRANSFORM, clock()), batches))
    for samples, inputs in zip(batches, got, strict=True):
        assert torch.equal(inputs, input_batch(samples, ENCODED, TRANSFORM))


def test_a_result_stays_as_it_is(pool: Decoders) -> None:
    """The memory that processes write to is used again; what a caller got is its own."""
    samples = images(6)
    first = pool.batch(samples, ENCODED, TRANSFORM, clock())
    pool.batch(samples_of([image(99, "PNG")] * 6), ENCODED, TRANSFORM, clock())
    assert torch.equal(first, input_batch(samples, ENCODED, TRANSFORM))


@pytest.mark.slow
def test_descriptors_are_given_back(pool: Decoders) -> None:
    def batch(side: int) -> None:
        pool.batch(images(4), ENCODED, TransformSpec.for_image_size(side), clock())

    batch(200)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for side in range(201, 240):  # each needs more memory than the one before
        batch(side)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # those of earlier tests may go meanwhile


def test_without_processes() -> None:
    samples, spent = images(3), clock()
    none = Decoders(0, threads=2)
    assert torch.equal(
        none.batch(samples, ENCODED, TRANSFORM, spent), input_batch(samples, ENCODED, TRANSFORM)
    )
    assert none.pids == [] and none.cpu_seconds == spent.cpu_seconds()["decode"] == 0.0
    none.wait()
    none.close()


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [(0,), (5,), (7, 2), (6, 7)])
def test_damaged_samples(pool: Decoders, damaged: tuple[int, ...]) -> None:
    blobs = [image(i, "JPEG") for i in range(8)]
    for place in damaged:
        blobs[place] = blobs[place][: 40 + place]
    samples = samples_of(blobs)
    with pytest.raises(DataError) as here:
        input_batch(samples, ENCODED, TRANSFORM)
    pids = pool.pids
    with pytest.raises(DataError) as there:
        pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert str(there.value) == str(here.value) and f"sample {100 + min(damaged)}: " in str(here.value)
    assert type(there.value) is type(here.value)
    good = images(5)
    assert torch.equal(pool.batch(good, ENCODED, TRANSFORM, clock()), input_batch(good, ENCODED, TRANSFORM))
    assert pool.pids == pids, "an error of a sample costs no process"


def test_a_transform_that_does_not_fit(pool: Decoders) -> None:
    with pytest.raises(UnprocessableError, match="need a transform"):
        pool.batch(images(2), ENCODED, None, clock())


def test_a_defect_keeps_its_traceback(pool: Decoders) -> None:
    """What is no error of ours comes with the traceback of the process, and costs no process."""
    pids, good = pool.pids, images(4)
    bad = Samples(good.ids, good.data, good.offsets[:-1], good.labels)  # a sample without an end
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*IndexError"):
        pool.batch(bad, ENCODED, TRANSFORM, clock())
    assert torch.equal(pool.batch(good, ENCODED, TRANSFORM, clock()), input_batch(good, ENCODED, TRANSFORM))
    assert len(set(pool.pids) & set(pids)) >= 1


def test_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_process.sys, "executable", "/no/such/python")
    with pytest.raises(HapiError, match="no process for decoding: No such file"):
        Decoders(1)
    monkeypatch.setattr(decoder_process.sys, "executable", "/bin/false")
    decoders = Decoders(2)
    with pytest.raises(HapiError, match="did not start: exit code 1"):
        decoders.wait()
    assert all(map(gone, decoders.pids))


# -- processes that die --------------------------------------------------------------------------------------------


class Stopped:
    """A batch that the pool has begun, with all its processes stopped in the middle of it."""

    def __init__(self, pool: Decoders, samples: Samples) -> None:
        self.pids = pool.pids
        self._pool = pool
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        self.result: Future[torch.Tensor] = Future()
        self._thread = threading.Thread(target=self._run, args=(samples,))
        self._thread.start()
        until(lambda: not pool._idle, 20, "the batch's beginning")
        time.sleep(0.05)  # until it is handed over; when it is not yet, the test still has to pass

    def _run(self, samples: Samples) -> None:
        try:
            self.result.set_result(self._pool.batch(samples, ENCODED, TRANSFORM, clock()))
        except BaseException as error:
            self.result.set_exception(error)

    def join(self) -> None:
        for pid in self.pids:
            if not gone(pid):
                os.kill(pid, signal.SIGCONT)
        self._thread.join(240)


@pytest.mark.long
def test_killed_while_idle(pool: Decoders) -> None:
    samples, victim, replaced = images(6), pool.pids[0], pool.replaced
    os.kill(victim, signal.SIGKILL)
    for _ in range(3):
        got = pool.batch(samples, ENCODED, TRANSFORM, clock())
        assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))
    assert victim not in pool.pids and pool.replaced == replaced + 1
    pool.wait()


@pytest.mark.slow
def test_killed_midway(pool: Decoders) -> None:
    samples, replaced = images(7), pool.replaced
    stopped = Stopped(pool, samples)
    victim, *others = stopped.pids
    os.kill(victim, signal.SIGKILL)
    stopped.join()
    assert torch.equal(stopped.result.result(240), input_batch(samples, ENCODED, TRANSFORM))
    pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert pool.replaced == replaced + 1
    assert victim not in pool.pids and set(others) <= set(pool.pids)
    pool.wait()


@pytest.mark.slow
def test_the_others_decode_while_no_process_can_be_started(
    pool: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, spawn = images(5), decoder_process._spawn

    def no_more(theirs: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    for victim in pool.pids:
        monkeypatch.setattr(decoder_process, "_spawn", no_more)
        os.kill(victim, signal.SIGKILL)
        until(lambda pid=victim: gone(pid), 20, "its end")  # type: ignore[misc]
        if victim != pool.pids[-1]:
            got = pool.batch(samples, ENCODED, TRANSFORM, clock())
            assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))
    with pytest.raises(ShortageError, match="come back") as told:
        pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert told.value.retryable and told.value.retry_after
    monkeypatch.setattr(decoder_process, "_spawn", spawn)
    got = pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))
    pool.wait()


@pytest.mark.slow
def test_killed_twice(pool: Decoders) -> None:
    """Samples that a process dies of are given up at the second time, not tried for ever."""
    samples = images(7)
    stopped = Stopped(pool, samples)
    killed = set(stopped.pids)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not killed & set(pool.pids), 20, "other processes")
    for pid in pool.pids:  # they still import: what they were given waits in their sockets
        os.kill(pid, signal.SIGKILL)
    stopped.join()
    with pytest.raises(DataError, match=r"died of sample 10\d or of one of . others.*signal 9 and signal 9"):
        stopped.result.result(240)
    got = pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM))
    pool.wait()


def test_signals_for_the_server_do_not_end_them(pool: Decoders) -> None:
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C in the terminal goes to the server's group"
    samples = images(5)
    got = pool.batch(samples, ENCODED, TRANSFORM, clock())
    assert torch.equal(got, input_batch(samples, ENCODED, TRANSFORM)) and pool.pids == pids


@pytest.mark.slow
def test_close_while_they_work() -> None:
    """Whoever waits for a process, and who waits for its result, is told that the server ends."""
    decoders = Decoders(1)  # not waited for: it is busy with its start
    with ThreadPoolExecutor(3) as callers:
        waiting = [callers.submit(decoders.batch, images(3), ENCODED, TRANSFORM, clock()) for _ in range(3)]
        until(lambda: not decoders._idle, 20, "the first batch's beginning")
        pids = decoders.pids
        decoders.close()
        for future in waiting:
            with pytest.raises(DrainingError):
                future.result(240)
    assert all(map(gone, pids))
    with pytest.raises(DrainingError):
        decoders.batch(images(1), ENCODED, TRANSFORM, clock())


@pytest.mark.slow
def test_they_end_with_their_parent() -> None:
    """Killed, a parent can clean up nothing."""
    program = (
        "from hapi.server.decoding.pool import Decoders; d = Decoders(2); print(*d.pids, flush=True); d.wait(); "
        "print('ready', flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and parent.stdout.readline() == "ready\n"
        parent.kill()
    until(lambda: all(map(gone, pids)), 30, "the end of the processes")
