"""The GPU benchmark's mechanics, on the CPU: what it counts, its table and document, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.serving.gpu import MODELS, GpuSettings, measure_gpu
from benchmarks.serving.gpu_wire import FROM_DEVICE, FROM_HOST, DeviceFeatures
from benchmarks.testbed.conditions import conditions
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.messages import EXTRACT_PATH

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def test_features_from_a_device_are_the_same_bytes() -> None:
    service = DeviceFeatures(35, "cpu")
    try:
        stream = service.stream(service.request(EXTRACT_PATH, b"{}"))
        reader = FrameReader(BufferSource(piece for frame in stream.frames for piece in frame))
        received = np.zeros_like(service.features)

        def sink(header: FrameHeader) -> list[memoryview]:
            rows = received[header.ids[0] : header.ids[-1] + 1]
            return [memoryview(rows.reshape(-1).view(np.uint8)), memoryview(bytearray(8 * len(header.ids)))]

        while not isinstance(reader.next(sink), StreamEnd):
            pass
        assert reader.samples == 35 and reader.bytes_read == stream.content_length
        assert np.array_equal(received, service.features)
    finally:
        service.close()


@pytest.mark.slow
def test_it_measures_everything() -> None:
    settings = GpuSettings(
        models=("alexnet", "resnet18"), image_size=64, cos_batches=(1, 4), micro_batch=2, seconds=0.1,
        device="cpu", copy_bytes=1 << 20,
    )  # fmt: skip
    heard: list[str] = []
    result = measure_gpu(settings, heard.append)
    assert len(heard) == 4
    assert [(m.model, m.freeze, m.split) for m in result.models] == [("alexnet", 17, 8), ("resnet18", 11, 5)]
    for m in result.models:
        assert set(m.prefix) == {1, 4}
        assert all(s.count >= 3 and 0 < s.low <= s.median <= s.high for s in (*m.prefix.values(), m.suffix))
    assert list(result.copies) == [
        "host to device, pinned",
        "device to host, pinned",
        "host to device, pageable",
        "device to host, pageable",
    ]
    assert set(result.wire) == {FROM_DEVICE, FROM_HOST}
    document = json.loads(json.dumps(result.to_json()))
    assert document["models"][1]["front_samples_per_second"]["4"]["median"] > 0
    assert set(conditions()) < set(document["conditions"]) and document["conditions"]["device"] == "cpu"
    table = result.table()
    assert "front 1     front 4        rest" in table[1] and table[3].endswith("6..11")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet999"], f"--model resnet999: expected one of {', '.join(MODELS)}"),
        (["--image-size", "50"], "--image-size: expected a multiple of 32 from 32 to 512"),
        (["--seconds", "0"], "--seconds: expected 1 to 86400"),
        (["--device", "cuda:99"], "--device 'cuda:99': this machine has "),
        (["--device", "tpu"], "--device 'tpu': expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m benchmarks") and message in error and error.count("\n") == 1


@no_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--json", str(tmp_path / "f.json")]) == 2
    assert "this machine has 0 CUDA device(s)" in capsys.readouterr().err
    assert not (tmp_path / "f.json").exists()
