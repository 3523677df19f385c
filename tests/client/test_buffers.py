"""Buffers come back when nobody holds a tensor over them, and never before."""

from __future__ import annotations

import gc

import torch

from hapi.client.loading.buffers import KEEP, BufferPool


def test_memory_is_reused_after_the_last_tensor() -> None:
    pool = BufferPool()
    tensor = pool.tensor((4, 8), torch.float32)
    address = tensor.data_ptr()
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert pool.tensor((4, 8), torch.float32).data_ptr() == address


def test_a_kept_view_is_never_overwritten() -> None:
    pool = BufferPool()
    kept = pool.tensor((4, 8), torch.float32).fill_(7)[1:2, 3:]
    for _ in range(5):
        pool.tensor((4, 8), torch.float32).fill_(0)
        gc.collect()
    assert (kept == 7).all()


def test_autograd_keeps_the_memory() -> None:
    pool = BufferPool()
    weight = torch.ones(8, 2, requires_grad=True)
    x = pool.tensor((4, 8), torch.float32).fill_(3)
    loss = (x @ weight).sum()
    del x
    for _ in range(5):
        pool.tensor((4, 8), torch.float32).fill_(0)
    loss.backward()
    assert (weight.grad == 12).all()


def test_any_dtype_and_empty() -> None:
    pool = BufferPool()
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        assert pool.tensor((3, 5), dtype).dtype == dtype
    assert pool.tensor((0, 5), torch.float32).shape == (0, 5)


def test_a_much_larger_buffer_is_not_taken() -> None:
    pool = BufferPool()
    large = pool.tensor((1 << 20,), torch.uint8)
    address = large.data_ptr()
    del large
    assert pool.tensor((16,), torch.uint8).data_ptr() != address


def test_free_buffers_are_bounded() -> None:
    pool = BufferPool()
    tensors = [pool.tensor((100 + i,), torch.uint8) for i in range(3 * KEEP)]
    del tensors
    gc.collect()
    assert len(pool._free) == KEEP
