"""The server's GPU: pinned copies on a stream of their own, full memory, statistics, eviction."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.gpu_tools import MIB, Hungry, cycles_of, extract, full_memory, memory_limit
from support.plain import FAMILIES, Family, open_session
from support.threads import at_once

from hapi.client.loading.job import ExtractionJob
from hapi.clocks import StageClock
from hapi.errors import DeviceMemoryError, UsageError
from hapi.models.devices import resolve_device
from hapi.server.device.device import Device
from hapi.server.http.app import Application
from hapi.server.http.loopback import loopback_handler
from hapi.server.scheduling.fair_queue import ANONYMOUS
from hapi.server.service import Service
from hapi.wire.messages import EXTRACT_PATH
from hapi.wire.report import STAGES

pytestmark = pytest.mark.gpu

RESNET = next(f for f in FAMILIES if f.name == "resnet18")
LARGE = replace(RESNET, size=224)
IDS = tuple(range(16))


def job_of(service: Service, split: int, f: Family = LARGE) -> ExtractionJob:
    with open_session(service, f, split, f.freeze) as session:
        return session.job_context.job(session.split)


def forward(device: Device, layers: object, inputs: torch.Tensor, output: torch.Tensor) -> int:
    clock = StageClock(STAGES)
    return device.begin(layers, inputs, output, key="k", clock=clock).result()  # type: ignore[arg-type]


# -- pinned memory and streams ---------------------------------------------------------------------------------


def test_host_buffers_are_pinned(cuda: torch.device) -> None:
    device = Device(cuda)
    assert device.host_buffer((3, 4), torch.float32).is_pinned()
    assert device.pinned(torch.ones(3)).is_pinned()
    device.close()


def test_copies_from_and_to_pinned_memory_are_asynchronous(cuda: torch.device) -> None:
    """Begun while the stream is busy for 0.4 s, both return long before it is free."""
    device = Device(cuda)
    host = device.pinned(torch.ones(16 * MIB))
    back = device.host_buffer((16 * MIB,), torch.float32)
    cycles = cycles_of(0.4)
    host.to(cuda, non_blocking=True)  # so that no allocation is left to wait for
    torch.cuda.synchronize()
    start = time.monotonic()
    torch.cuda._sleep(cycles)
    there = host.to(cuda, non_blocking=True)
    back.copy_(there, non_blocking=True)
    begun = time.monotonic() - start
    torch.cuda.synchronize()
    ended = time.monotonic() - start
    assert begun < 0.1 < 0.2 < ended
    assert torch.equal(back, host)
    device.close()


def test_copy_out_runs_under_the_next_forward(cuda: torch.device, note: Callable[[str], None]) -> None:
    """Eight forwards of two requests in turns take clearly less than forward and copy one after the other."""
    rows = 64
    answer = torch.arange(rows * 2 * MIB, dtype=torch.float32, device=cuda).reshape(rows, -1)  # 512 MiB
    outputs = [torch.empty(answer.shape, pin_memory=True) for _ in range(2)]
    device = Device(cuda)
    inputs = device.pinned(torch.zeros(rows, 1))
    clock = StageClock(STAGES)
    device.begin(lambda x: answer, inputs, outputs[0], key="k", clock=clock).result()
    start = time.monotonic()
    for _ in range(3):
        device.begin(lambda x: answer, inputs, outputs[0], key="k", clock=clock).result()
    cycles = cycles_of((time.monotonic() - start) / 3)  # a forward as long as its copy

    def slow(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return answer

    def request(number: int) -> None:
        for _ in range(4):
            device.begin(slow, inputs, outputs[number], key="k", clock=clock).result()

    start = time.monotonic()
    request(0)
    request(1)
    one_after_the_other = time.monotonic() - start
    threads = [threading.Thread(target=request, args=(n,)) for n in range(2)]
    start = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    side_by_side = time.monotonic() - start
    note(
        f"copy-out under the next forward: {side_by_side / one_after_the_other:.2f} of the time (ideal 0.56)"
    )
    assert side_by_side < 0.8 * one_after_the_other
    assert torch.equal(outputs[0], answer.cpu()) and torch.equal(outputs[1], outputs[0])
    device.close()


@pytest.mark.parametrize("reuse", [True, False])
def test_many_requests_at_once_give_the_same_bits(
    place: str, reuse: bool, make_service: Callable[..., Service]
) -> None:
    service = make_service(cos_batch=4, model_reuse=reuse)
    jobs = [job_of(service, split, RESNET) for split in (2, 5, 11)]
    requests = [(job, IDS[start : start + 10]) for job in jobs for start in (0, 3, 6)]
    alone = [extract(service, job, ids)[0] for job, ids in requests]
    wrong: list[str] = []

    def client(number: int) -> None:
        for turn in range(4):
            index = (number + turn) % len(requests)
            job, ids = requests[index]
            try:
                if not torch.equal(extract(service, job, ids)[0], alone[index]):
                    wrong.append(f"split {job.split}, ids {ids}")
            except Exception as error:
                wrong.append(repr(error))

    at_once(16, client)
    assert not wrong


# -- full memory -----------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_halved_and_the_size_remembered(cuda: torch.device) -> None:
    device = Device(cuda)
    x = torch.randn(16, 3)
    output = device.host_buffer((16, 3), torch.float32)
    assert forward(device, Hungry(), x, output) == 16
    with memory_limit(700 * MIB):  # sixteen samples need 1024 MiB, eight 512
        assert forward(device, Hungry(), x, output.zero_()) == 8
        assert device.out_of_memory_caught == 1
        assert forward(device, Hungry(), x, output.zero_()) == 8
        assert device.out_of_memory_caught == 1
    assert torch.equal(output, x * 2)
    device.close()


def test_one_sample_that_does_not_fit_is_said_so(cuda: torch.device) -> None:
    device = Device(cuda)
    x = torch.randn(4, 3)
    output = device.host_buffer((4, 3), torch.float32)
    with memory_limit(32 * MIB), pytest.raises(DeviceMemoryError, match="one sample"):
        forward(device, Hungry(), x, output)
    assert forward(device, Hungry(), x, output) == 1
    device.close()


def test_a_request_is_finished_in_smaller_batches(
    cuda: torch.device, make_service: Callable[..., Service]
) -> None:
    service = make_service(cos_batch=16, share_memory=0)  # features that are kept take no forward pass
    job = job_of(service, 4)
    whole, report = extract(service, job, IDS)
    assert report.cos_batch == 16
    with memory_limit(48 * MIB):  # the first convolution and its BatchNorm hold 98 MiB of outputs at once
        halved, report = extract(service, job, IDS)
    assert report.cos_batch < 16 and service.workers.all[0].device.out_of_memory_caught > 0
    torch.testing.assert_close(halved, whole, rtol=1e-4, atol=1e-5)


def test_full_memory_answers_507_and_the_server_lives_on(
    cuda: torch.device, make_service: Callable[..., Service]
) -> None:
    service = make_service(cos_batch=16, share_memory=0)  # features that are kept take no forward pass
    job = job_of(service, 4)
    whole, _ = extract(service, job, IDS)
    body = json.dumps(job.request(torch.tensor(IDS).numpy())).encode()
    with full_memory():
        status, _, buffers = loopback_handler(service)("POST", EXTRACT_PATH, body)
        assert status == 507
        assert json.loads(b"".join(bytes(b) for b in buffers))["type"].endswith("device-memory")
    again, report = extract(service, job, IDS)
    assert report.cos_batch == 1
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)


def test_weights_that_do_not_fit_answer_507(cuda: torch.device, make_service: Callable[..., Service]) -> None:
    service = make_service()
    job = job_of(service, 11)
    with full_memory(), pytest.raises(DeviceMemoryError, match="weights of layers 1 to 11 do not fit"):
        extract(service, job, IDS)
    extract(service, job, IDS)


# -- statistics, eviction, names -------------------------------------------------------------------------------


def gauge(service: Service, name: str) -> float:
    application = Application(service)
    try:
        found = re.search(
            rf'^{name}{{device="cuda[:0-9]*"}} (\S+)$',
            application.metrics.render(ANONYMOUS).decode(),
            re.MULTILINE,
        )
    finally:
        application.close()
    assert found is not None
    return float(found[1])


def test_the_gauge_tells_what_torch_holds(cuda: torch.device, make_service: Callable[..., Service]) -> None:
    service = make_service()
    before = torch.cuda.memory_allocated(cuda)
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=cuda)
    assert (
        gauge(service, "hapi_device_allocated_bytes")
        == torch.cuda.memory_allocated(cuda)
        == before + held.nbytes
    )


def test_an_evicted_front_gives_its_memory_back(
    cuda: torch.device, make_service: Callable[..., Service]
) -> None:
    kept, dropped = make_service(share_memory=0), make_service(share_memory=0, model_cache=0)
    cache = kept.workers.all[0].cache
    job = job_of(kept, 11)
    extract(make_service(model_reuse=False), job, IDS)  # cuBLAS and cuDNN take their workspaces once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    extract(dropped, job, IDS)
    assert torch.cuda.memory_allocated(cuda) == before
    extract(kept, job, IDS)
    held = torch.cuda.memory_allocated(cuda) - before
    assert cache.resident_bytes <= held < 1.2 * cache.resident_bytes
    assert cache.drop_idle() > 0
    assert torch.cuda.memory_allocated(cuda) == before


def test_a_gpu_that_is_not_there_is_refused(cuda: torch.device, make_service: Callable[..., Service]) -> None:
    count = torch.cuda.device_count()
    for name in (f"cuda:{count}", "cuda:99"):
        with pytest.raises(UsageError, match=f"this machine has {count} CUDA"):
            resolve_device(name)
        with pytest.raises(UsageError, match=f"this machine has {count} CUDA"):
            make_service(device=name)
