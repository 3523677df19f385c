"""Tensors as bytes."""

from __future__ import annotations

import copy

import torch
from torch import nn

STORED_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""Element types that a safetensors file of Hapi holds, and the format's names of them."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor's elements in C order, of any type (numpy knows no bfloat16), also of a sparse one.

    They are the tensor's own memory, to be read from and written to, where it is contiguous on the CPU; else a copy.
    """
    held = tensor.detach().to("cpu").to_dense().resolve_conj().resolve_neg()
    flat = held.contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(bytearray())
    # A single element may have any stride, with which torch refuses to see its bytes.
    return memoryview(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module``, also where an attribute was computed from parameters (weight normalisation)."""
    computed = [
        value
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in computed})
