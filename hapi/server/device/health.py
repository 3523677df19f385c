"""Health of a compute device.

After some errors (a device-side assert, an illegal access, a GPU that fell off its bus) CUDA refuses all
further work in the same process. Every other request fails there until the process is started again.
"""

from __future__ import annotations

import logging

import torch

from hapi.errors import TransportError
from hapi.process.memory_errors import is_out_of_memory

log = logging.getLogger("hapi.server")


class Health:
    """Health of one device; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.broken = ""
        """The error that broke it; empty while it works."""

    def probe(self) -> None:
        """Raise RuntimeError when the device does not work any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def diagnosed(self, error: BaseException) -> BaseException:
        """Return ``error`` of work for the device, or the error for all waiting requests if it broke the
        device.
        """
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return error
        if not self.broken:
            try:
                self.probe()
            except RuntimeError as refused:
                if is_out_of_memory(refused):
                    return error
                self.broken = (str(error).splitlines() or [type(error).__name__])[0][:200]
                log.error("a device broke", extra={"device": str(self.device), "error": self.broken})
        return self.failure() if self.broken else error

    def failure(self) -> TransportError:
        """Return the error for requests that want the broken device: another server, or this one restarted,
        may do it.
        """
        return TransportError(f"the server's device {self.device} does not work any more: {self.broken}")
