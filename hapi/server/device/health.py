"""Whether a compute device still works.

After some errors (a device-side assert, an illegal access, a GPU that fell off its bus) CUDA refuses all that follows
in the same process. No other request can succeed there: somebody has to start the process again.
"""

from __future__ import annotations

import logging

import torch

from hapi.errors import TransportError
from hapi.process.memory_errors import is_out_of_memory

log = logging.getLogger("hapi.server")


class Health:
    """Of one device; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.broken = ""
        """The error that broke it; empty while it works."""

    def probe(self) -> None:
        """Raises RuntimeError when the device does not work any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def diagnosed(self, error: BaseException) -> BaseException:
        """``error``, which work for the device met; when it has broken the device, what to tell who waits for it."""
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
        """What who wants the broken device is told: another server, or this one started again, may do it."""
        return TransportError(f"the server's device {self.device} does not work any more: {self.broken}")
