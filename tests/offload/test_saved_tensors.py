"""Saved tensors of every kind: they come back as they were, are stored once, and refused when changed in place."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hapi.offload.activations.counters import LayerRoom
from hapi.offload.activations.spill import SpillDrive, SpillFiles
from hapi.offload.activations.swapper import Swapper
from hapi.offload.failures import ActivationError


class Swapped:
    """Hooks that send everything to disk."""

    def __init__(self, folders: list[Path], buffer_bytes: int = 1 << 20, kept: int = 0) -> None:
        self.files = SpillFiles(folders)
        self.swapper = Swapper(self.files, buffer_bytes)
        self.room = LayerRoom(kept_limit=kept)

    def __call__(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.swapper.save(tensor, 0, "layer", self.room)[0], self.swapper.fetch
        )

    def is_empty(self) -> bool:
        """Whether nothing is stored any more, as soon as the drives' threads have let go of it."""
        deadline = time.monotonic() + 240
        while self.swapper.settle() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.swapper.settle() == 0 and self.swapper.counters.live_bytes == 0

    def close(self) -> None:
        self.swapper.close()
        self.files.close()


@pytest.fixture
def swapped(tmp_path: Path) -> Iterator[Swapped]:
    hooks = Swapped([tmp_path / "one", tmp_path / "two"])
    yield hooks
    hooks.close()


def grown(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype).requires_grad_()


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x * x.exp(),
    "transposed": lambda x: x.t() * x.t().exp(),
    "slice": lambda x: x[3:200, ::2].sin() * x[3:200, 1::2],
    "expanded": lambda x: x[:1].expand(64, -1).sin() * x[:64].cos(),
    "mask": lambda x: torch.where(x > 0, x * x, x.sin()),
    "dropout": lambda x: nn.functional.dropout(x.sin(), 0.5),
    "empty": lambda x: torch.cat([x[:0].exp(), x.exp()]),
    "bf16": lambda x: (x.bfloat16() * x.bfloat16().exp()).float(),
    "indices": lambda x: x.max(dim=1).values + x.sort(dim=1).values[:, 0],
    "chunks": lambda x: torch.stack([part.sin() * part for part in (x * 2).chunk(4, dim=1)]),
    "complex": lambda x: torch.fft.rfft(x.sin()).abs() * torch.complex(x, x).conj().abs()[:, :1],
}


@pytest.mark.parametrize("kept", [0, 300_000])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_kind_of_tensor(swapped: Swapped, case: str, kept: int) -> None:
    x = grown((256, 256))
    torch.manual_seed(1)
    CASES[case](x).sum().backward()
    plain, x.grad = x.grad, None
    swapped.room.kept_limit = kept
    torch.manual_seed(1)
    with swapped():
        y = CASES[case](x)
    y.sum().backward()
    assert plain is not None and x.grad is not None and torch.equal(plain, x.grad)
    del y
    assert swapped.is_empty()


def test_channels_last_convolutions(swapped: Swapped) -> None:
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3), nn.MaxPool2d(2))
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(8, 8, 32, 32).to(memory_format=torch.channels_last)
    net(x).sum().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with swapped():
        y = net(x)
    y.sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, net.parameters(), strict=True))


def test_views_of_one_storage_are_stored_once(swapped: Swapped) -> None:
    x = grown((512, 512))
    with swapped():
        whole = x * 2
        parts = [part.sin() for part in whole.chunk(4, dim=1)]
        y = sum(part.sum() for part in parts) + whole.t().cos().sum()
    assert swapped.swapper.counters.written_bytes == 512 * 512 * 4
    assert swapped.swapper.counters.shared_tensors == 4
    y.backward()
    assert x.grad is not None
    expected = 2 * (2 * x).cos() - 2 * (2 * x).sin()
    assert torch.allclose(x.grad, expected.detach(), atol=1e-5)


def test_a_batch_of_a_large_data_set_is_stored_alone(swapped: Swapped) -> None:
    data = torch.randn(4096, 256)
    weight = grown((256,))
    with swapped():
        y = (data[64:128] * weight).sum()
    assert swapped.swapper.counters.written_bytes <= 64 * 256 * 4 + 64
    y.backward()
    assert torch.allclose(weight.grad, data[64:128].sum(0), atol=1e-3)  # type: ignore[arg-type]


def test_parameters_are_never_stored(swapped: Swapped) -> None:
    layer = nn.Linear(256, 256, bias=False)
    swapped.swapper.exempt = {layer.weight.untyped_storage()._cdata}
    x = grown((64, 256))
    with swapped():
        y = layer(layer(x))
    assert swapped.swapper.counters.written_bytes == 2 * 64 * 256 * 4
    y.sum().backward()


@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("what", ["input", "output", "view"])
def test_a_tensor_changed_after_it_was_saved_is_refused(swapped: Swapped, what: str, kept: int) -> None:
    swapped.room.kept_limit = kept
    x = grown((256, 256))
    with swapped():
        y = x * 2
        z = y.exp() if what == "output" else y.sin()
    with torch.no_grad():
        {"input": y, "output": z, "view": y[:1]}[what].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*layer 'layer'.*version 1"):
        z.sum().backward()


def test_a_graph_that_is_kept_gives_the_same_twice(swapped: Swapped) -> None:
    x = grown((256, 256))
    with swapped():
        y = (x.sin() * x.cos()).exp().sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(retain_graph=True)
    second, x.grad = x.grad, None
    y.backward()
    assert torch.equal(first, second) and torch.equal(first, x.grad)  # type: ignore[arg-type]


def test_second_derivatives(swapped: Swapped) -> None:
    x = grown((128, 128))
    with swapped():
        (first,) = torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
    expected = 2 * first * (6 * x.sin() * x.cos() ** 2 - 3 * x.sin() ** 3)
    assert torch.allclose(x.grad, expected, atol=1e-4)  # type: ignore[arg-type]


def test_bytes_on_their_way_are_bounded(tmp_path: Path) -> None:
    hooks = Swapped([tmp_path], buffer_bytes=600_000)
    x = grown((256, 256))
    with hooks():
        y = x
        for _ in range(12):
            y = y.sin()
    y.sum().backward()
    counters = hooks.swapper.counters
    assert counters.written_bytes == 12 * 262144
    assert 9 * 262144 <= counters.read_bytes <= counters.written_bytes  # the last may not have left yet
    assert hooks.swapper.counters.peak_bytes <= 600_000 + 2 * 262144  # one is x itself
    hooks.close()


def test_no_file_has_a_name_and_places_are_used_again(tmp_path: Path) -> None:
    hooks = Swapped([tmp_path])
    for _ in range(5):
        x = grown((256, 256))
        with hooks():
            y = x.sin().cos().exp()
        y.sum().backward()
        assert list(tmp_path.iterdir()) == []
        del y
        gc.collect()
    assert hooks.is_empty()
    assert hooks.files.drives[0].take(1) == 0  # the file is empty again
    hooks.close()


@pytest.mark.parametrize("direction", ["_write", "_read"])
def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    def fail(self: SpillDrive, at: int, data: object) -> None:
        raise OSError(errno.ENOSPC if direction == "_write" else errno.EIO, "")

    monkeypatch.setattr(SpillDrive, direction, fail)
    hooks = Swapped([tmp_path], buffer_bytes=1)
    x = grown((256, 256))
    text = "No space left on device" if direction == "_write" else "Input/output error"
    with pytest.raises(ActivationError, match=f"swapping activations to .*{tmp_path.name} failed: {text}"):
        with hooks():
            y = x.sin().cos().exp()
        y.sum().backward()
    hooks.close()


def test_an_exception_in_a_pass_leaves_nothing(swapped: Swapped) -> None:
    x = grown((256, 256))

    def broken() -> torch.Tensor:
        y = x.sin().cos()
        raise ValueError(f"after {y.shape}")

    with pytest.raises(ValueError, match="after"), swapped():
        broken()
    gc.collect()
    swapped.swapper.close()
    assert swapped.is_empty()


def test_hooks_inside_of_ours_and_outside(swapped: Swapped) -> None:
    x = grown((256, 256))
    (x.sin().exp().cos() * 3).sum().backward()
    plain, x.grad = x.grad, None
    with torch.autograd.graph.save_on_cpu(), swapped():
        y = x.sin()
        with torch.autograd.graph.save_on_cpu():
            y = y.exp()
        y = y.cos()
    (y * 3).sum().backward()
    assert torch.equal(plain, x.grad)  # type: ignore[arg-type]
    assert swapped.swapper.counters.stored_tensors == 2
