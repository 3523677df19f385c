"""Copies of saved bytes between a GPU and the host, beside what the GPU computes (LoHan, section IV-D)."""

from __future__ import annotations

import torch


class DeviceLink:
    """One stream in each direction. A copy waits for what was begun before it, and nothing waits for the copy but what
    needs its bytes.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy ``data``, uint8 [n], to pinned memory.

        Returns:
            The copy, and an event after it. The memory of ``data`` may be given back at once: it is not used again
            before the event.
        """
        host = torch.empty(data.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
        data.record_stream(self._out)
        return host, self._out.record_event()

    def bring(self, host: torch.Tensor, sent: torch.cuda.Event) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy bytes back, once they were ``sent``; return them on the device, and an event after the copy."""
        data = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # which may use the memory until now
        self._back.wait_event(sent)
        with torch.cuda.stream(self._back):
            data.copy_(host, non_blocking=True)
        data.record_stream(self._back)
        return data, self._back.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Let what is begun on the current stream from now on wait for ``event``."""
        torch.cuda.current_stream(self._device).wait_event(event)
