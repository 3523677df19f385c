"""Who says in which words that memory was not to be had."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest
import torch

from hapi.errors import DataError
from hapi.process.memory_errors import is_out_of_memory, was_for_memory


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
        "could not create a primitive",
        "could not execute a primitive",
        "std::bad_alloc",
        "can't start new thread",
        "decode_jpeg, csrc/io/image/cpu/decode_jpeg.cpp:171, Insufficient memory (case 4)",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_sentences(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(DataError(text))


def test_classes() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(OSError("out of memory error when reading image file"))
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50, np.uint8)
    assert is_out_of_memory(numpys.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("index out of range"),
        RuntimeError(
            "could not create a primitive descriptor for a convolution forward propagation primitive"
        ),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("out of memory"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_is_behind_another_error() -> None:
    try:
        try:
            raise RuntimeError("could not create a primitive")
        except RuntimeError as error:
            raise DataError("the model cannot be built") from error
    except DataError as error:
        found = error
    assert was_for_memory(found) and not is_out_of_memory(found)
    found.__cause__ = None  # as "from None" leaves it
    assert was_for_memory(found)
    found.__context__ = found
    assert not was_for_memory(found)


STARVED = """
import io, resource, sys
import numpy as np
from PIL import Image
from hapi.errors import HapiError
from hapi.data.transforms.decode import decode_image

pixels = np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), np.uint8)
said = set()
for form, options in (("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {"compress_level": 1})):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    decode_image(file.getvalue())
    for spare in range(0, 24 << 20, 3 << 20):
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + spare, -1))
        try:
            decode_image(file.getvalue())
        except (MemoryError, HapiError) as error:
            said.add(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(sorted(said))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a bound of the address space")
def test_images_are_not_called_damaged_for_lack_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=False)
    assert done.stdout == "['MemoryError']\n", done.stderr
