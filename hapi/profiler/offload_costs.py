"""Costs of a trained part with its optimiser's states in memory, and elsewhere (LoHan, section IV-C). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STATES = {"sgd": 0, "sgd with momentum": 1, "adam": 2, "adamw": 2}
"""Tensors that an optimiser keeps for each parameter, in fp32."""
BUFFER_BYTES = 8 * (12 << 20)
"""Bytes of the buffers of each drive."""
PENDING_BYTES = 64 << 20
"""Most bytes of gradients on their way, unless one gradient is larger."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class OffloadCosts:
    """Bytes of one trained part and its optimiser."""

    parameters: int
    """Number of trained parameters."""
    states: int
    """Tensors that the optimiser keeps for each of them: see :data:`STATES`."""
    half: bool = False
    """Whether parameters and gradients are bf16 or fp16, with fp32 master weights beside them."""
    drives: int = 1
    """Drives between which the states are striped."""
    largest: int = 0
    """Number of parameters in the largest tensor."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that layers compute with; their gradients take as many."""
        return self.parameters * (2 if self.half else _FP32)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimiser's states, and of master weights where parameters are in half precision."""
        return _FP32 * self.parameters * (self.states + self.half)

    @property
    def memory_without(self) -> int:
        """Bytes in memory without offloading: parameters, gradients, states."""
        return 2 * self.parameter_bytes + self.state_bytes

    @property
    def memory_with(self) -> int:
        """Bytes in memory with offloading: parameters, gradients on their way, buffers."""
        largest = self.largest * (2 if self.half else _FP32)
        gradients = min(self.parameter_bytes, max(PENDING_BYTES, largest))
        return self.parameter_bytes + gradients + BUFFER_BYTES * self.drives

    @property
    def saved(self) -> int:
        """Bytes of memory that offloading frees; none of a small part, whose buffers take more."""
        return max(0, self.memory_without - self.memory_with)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disks: two slots of master weights and states, of which one is committed."""
        return 2 * self.written

    @property
    def read(self) -> int:
        """Bytes read each step; parameters in fp32 are their own master weights in memory."""
        return self.state_bytes

    @property
    def written(self) -> int:
        """Bytes written each step: master weights and states."""
        return _FP32 * self.parameters * (self.states + 1)

    def transfer_seconds(self, read_rate: float, write_rate: float) -> float:
        """Return the seconds that the disks take for one step.

        Args:
            read_rate: bytes a second of all drives together.
            write_rate: likewise.
        """
        return self.read / read_rate + self.written / write_rate

    def added_seconds(self, read_rate: float, write_rate: float, step_seconds: float) -> float:
        """Return the seconds that offloading adds to a step of ``step_seconds``, with which it overlaps."""
        return max(0.0, self.transfer_seconds(read_rate, write_rate) - step_seconds)


def free_batch(batch: int, step_seconds: float, transfer_seconds: float) -> int:
    """Return the smallest training batch whose step hides the transfers; its seconds grow with the samples.

    Args:
        batch: samples of the present one.
        step_seconds: seconds of forward and backward with it, above 0.
        transfer_seconds: from :meth:`OffloadCosts.transfer_seconds`.
    """
    return max(batch, -int(-batch * transfer_seconds // step_seconds))


def fitting_freeze(weights: Sequence[int], freeze: int, states: int, budget: int) -> int | None:
    """Return the earliest freeze from ``freeze`` on whose trained part fits the memory without offloading.

    Args:
        weights: number of parameters of layers 1..L.
        freeze: the present one.
        states: see :class:`OffloadCosts`.
        budget: bytes for parameters, gradients and states.

    Returns:
        The freeze; None when even the last layer with parameters does not fit.
    """
    for layer in range(freeze, len(weights)):
        parameters = sum(weights[layer:])
        if parameters and OffloadCosts(parameters=parameters, states=states).memory_without <= budget:
            return layer
    return None
