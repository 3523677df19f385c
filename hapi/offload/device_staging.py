"""Pinned memory and a stream of their own for the pieces of parameters that lie on a GPU.

An update computes on the CPU what lies on the device: its copies wait for the gradient that they need, and not for all
that backward gave the device since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout, Segment, StatePiece


class PieceStaging:
    """Room in the host's memory for the values and gradients of one piece; for one thread."""

    def __init__(self, device: torch.device, layout: Layout) -> None:
        """Allocate for the largest piece of ``layout``, whose parameters lie on ``device``."""
        nbytes = max((piece.nbytes - piece.states_bytes for piece in layout.pieces), default=0)
        self._values, self._gradients = (
            torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
            for _ in range(2)
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Let the thread's copies go by the stream; each is done when its call returns."""
        with torch.cuda.stream(self._stream):
            yield

    def values(self, piece: StatePiece, segment: Segment) -> torch.Tensor:
        """Return room for a segment's values, fp32 [elements]."""
        return _room(self._values, piece, segment, torch.float32)

    def gradient(self, piece: StatePiece, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Return room for a segment's gradient, [elements]."""
        return _room(self._gradients, piece, segment, dtype)


def _room(memory: torch.Tensor, piece: StatePiece, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """Part of ``memory`` where the master weights lie in the record behind its states."""
    start = segment.master_at - piece.states_bytes
    return memory[start : start + segment.elements * dtype.itemsize].view(dtype)


def staging_for(parameters: Sequence[TrainedParameter], layout: Layout) -> PieceStaging | None:
    """Return the staging of a training; None where all lies in the host's memory, and is computed where it is."""
    found = [known.parameter.device for known in parameters if known.parameter.device.type != "cpu"]
    return PieceStaging(found[0], layout) if found else None
