"""Facts about devices that both tiers need: names, lack of memory, exact arithmetic, and waiting."""

from __future__ import annotations

import warnings

import torch

from hapi.allocator import give_back_freed_memory
from hapi.errors import DeviceMemoryError, HapiError, HostMemoryError, UsageError
from hapi.process.free_memory import host_free_bytes

_DENORMAL = 1e-40
"""A number that float32 has with few bits only."""


def resolve_device(name: str, what: str = "device") -> torch.device:
    """Return the torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: there is no such device; the message names the setting ``what``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"{what} {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UsageError(f"{what} {name!r}: this machine has {count} CUDA device(s)")
        return torch.device("cuda", device.index or 0)
    return device


def arithmetic_name(device: torch.device) -> str:
    """Return what decides the last bits of float32 results on ``device``: a GPU's name, a processor's instructions.

    On one processor, ResNet18 without vector instructions was 3e-6 of its largest result away from ResNet18 with AVX2.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def does_not_fit(device: torch.device, text: str) -> HapiError:
    """Return the error for a server's work that found no memory on ``device``, although it was expected to
    fit.

    A GPU is the server's own, so the same work will not fit later either (:class:`DeviceMemoryError`). A
    CPU's memory is shared with all else on the machine and may be free in a second
    (:class:`HostMemoryError`).
    """
    if device.type == "cpu":
        return HostMemoryError(text)
    return DeviceMemoryError(text)


def give_back_unused(device: torch.device) -> None:
    """Return memory that the allocator of ``device`` keeps and no tensor uses to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()


def set_arithmetic(device: torch.device, *, tf32: bool = False) -> None:
    """Compute float32 as IEEE float32, or with ``tf32``, in this process if ``device`` is a GPU; do nothing on the CPU.

    torch lets cuDNN round the inputs of convolutions to TF32 (10 bits of mantissa). The result would then
    depend on which of the tiers has such a GPU, and, where cuDNN picks another algorithm for another batch
    size, on the COS batch. The flags belong to the process: switching them around the frozen layers would
    race with other threads, so ``tf32`` is for trained layers too. Sums of 16-bit products are kept in float32.
    """
    if device.type != "cuda":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch 2.9 on the first two are deprecated, but still looked at
        # Both ways of saying it must agree: torch refuses to compute when they contradict each other, and with
        # only the older one a process-wide ``torch.backends.fp32_precision = "tf32"`` would stay in force.
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        for operation in ("conv", "rnn"):
            getattr(torch.backends.cudnn, operation).fp32_precision = "tf32" if tf32 else "ieee"
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def changed_arithmetic(device: torch.device, *, tf32: bool = False) -> dict[str, str]:
    """Return settings of this process that change float32 results on ``device``, beside Hapi's TF32.

    A caller's own ``torch.set_float32_matmul_precision`` lets libraries round, on some processors also outside of a
    GPU; ``torch.set_flush_denormal`` makes zeros of the smallest numbers; other kernels round elsewhere; and tensors
    that layers make have the default type.

    Returns:
        Values by name; none by default.
    """
    libraries = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn
    operations = {name: getattr(libraries, name, None) for name in ("matmul", "conv", "rnn")}
    if device.type == "cuda":
        operations["matmul"] = torch.backends.cuda.matmul
    usual = {"none", "ieee", *(("tf32",) if tf32 else ())}
    found = {name: str(getattr(one, "fp32_precision", "none")) for name, one in operations.items()}
    changed = {f"{device.type} {name}": value for name, value in found.items() if value not in usual}
    attention, mha = torch.backends.cuda, torch.backends.mha  # the names say cuda, also for a CPU
    kernels = {
        "library": libraries.enabled,
        "flash attention": attention.flash_sdp_enabled(),
        "efficient attention": attention.mem_efficient_sdp_enabled(),
        "plain attention": attention.math_sdp_enabled(),
        "fast attention layer": mha.get_fastpath_enabled(),
    }
    changed |= {f"{device.type} {name}": "off" for name, is_on in kernels.items() if not is_on}
    if device.type == "cpu" and float(torch.tensor(_DENORMAL, dtype=torch.float32) * 1) == 0:
        changed["cpu denormal numbers"] = "flushed"
    if torch.get_default_dtype() != torch.float32:
        changed["default type"] = str(torch.get_default_dtype())
    return changed


def arithmetic_type(features: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which ``device`` computes layers whose results are ``features``: that, or float32.

    It is float32 where the device has no units for the type.
    """
    if device.type == "cuda":
        has = features != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        units = {
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        }
        has = features in units and bool(units[features]())
    return features if has else torch.float32


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generators that work on ``device`` draws from: the processor's, and a GPU's own.

    ``torch.manual_seed`` also looks for four other kinds of device, and notes where it was called from: 0.1 ms.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all that this thread gave it on its current stream; nothing on the CPU."""
    if device.type == "cuda":
        event_on(torch.cuda.current_stream(device)).synchronize()


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after everything that was given to ``stream`` so far."""
    event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps; else it would spin on a core
    event.record(stream)
    return event


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that may still be allocated on ``device``, within a container's bound; None if
    unknown.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_free_bytes()
