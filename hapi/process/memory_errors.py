"""Recognition of lack of memory in the errors of any library.

Few libraries have an error class for it; most have only a message. The table holds their messages under an
address space limit (``RLIMIT_AS``) and on full GPUs.
"""

from __future__ import annotations

import errno

_SENTENCES = (
    "out of memory",  # CUDA; Pillow's "out of memory error when reading image file"
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "cannot allocate memory",  # the C library's word for ENOMEM, inside other messages
    "not enough memory",  # DefaultCPUAllocator on other systems
    "insufficient memory",  # libjpeg
    "failed to map segment",  # the dynamic linker, for a library that is imported
    "bad_alloc",  # C++'s own, through pybind
    "could not execute a primitive",  # oneDNN
    "can't start new thread",  # Python: no room for a stack, or no more threads for this user
    "alloc_failed",  # cuBLAS and cuDNN, for a handle or a workspace
    "allocation_failed",
    # cuDNN tried every way of a convolution and none could have its workspace; for the float32 forward passes of
    # frozen layers there is no other reason.
    "unable to find an engine",
)
_PRIMITIVE, _DESCRIPTOR = "could not create a primitive", "could not create a primitive descriptor"
"""oneDNN without room for a kernel that it generates; with "descriptor" it has no such operation at all."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a foreign ``error`` (of torch, oneDNN, numpy, Pillow, the system) means lack of memory.

    That is memory of a GPU or the host, for data or for a thread's stack. Hapi's own errors never count.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if not isinstance(error, RuntimeError | OSError | ImportError):
        return False
    text = str(error).lower()
    return any(s in text for s in _SENTENCES) or (_PRIMITIVE in text and _DESCRIPTOR not in text)


def was_for_memory(error: BaseException) -> bool:
    """Return whether ``error`` was raised while one that :func:`is_out_of_memory` recognises was handled.

    Code that maps a library's errors (a model that cannot be built, an image that cannot be decoded) calls
    this, so that it need not recognise lack of memory itself.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if is_out_of_memory(behind):
            return True
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return False
