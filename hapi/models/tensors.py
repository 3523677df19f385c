"""Tensors as bytes."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor's elements in C order, of any type (numpy knows no bfloat16), also of a sparse one.

    They are the tensor's own memory, to be read from and written to, where it is contiguous on the CPU; else a copy.
    """
    flat = tensor.detach().to("cpu").to_dense().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(bytearray())
    return memoryview(flat.view(torch.uint8).numpy().data)
