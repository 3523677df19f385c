"""State of a training that is small: groups' options, a model's buffers, and torch's random generators."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hapi.offload.states.group_options import Groups, options_room, pack_options, restore_options


class SmallState:
    """Reads and restores, as bytes, the options of an optimiser's groups, a model's persistent buffers, and the
    generators of the CPU and of its device."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        """``model`` keeps its buffers' shapes and types from now on, and the optimiser the number of its groups."""
        kept = set(model.state_dict(keep_vars=True))
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in kept]
        devices = {parameter.device for parameter in model.parameters()}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self.nbytes = len(self.capture(groups))
        """Length of the bytes."""

    def capture(self, groups: Groups) -> bytes:
        """Return the state as it is now."""
        tensors = [*self._buffers, torch.get_rng_state()]
        if self._device is not None:
            tensors.append(torch.cuda.get_rng_state(self._device))
        return pack_options(groups) + b"".join(_bytes(tensor) for tensor in tensors)

    @torch.no_grad()
    def restore(self, state: bytes, groups: Groups) -> bool:
        """Take over what :meth:`capture` gave; return whether a scheduler drove the learning rate."""
        is_scheduled = restore_options(state, groups)
        at = options_room(groups)
        for buffer in self._buffers:
            values = np.frombuffer(state, np.uint8, buffer.nbytes, at).copy()
            at += buffer.nbytes
            if buffer.numel():
                buffer.copy_(torch.from_numpy(values).view(buffer.dtype).view(buffer.shape))
        generator = torch.get_rng_state()
        torch.set_rng_state(torch.from_numpy(np.frombuffer(state, np.uint8, generator.nbytes, at).copy()))
        at += generator.nbytes
        if self._device is not None:
            torch.cuda.set_rng_state(
                torch.from_numpy(np.frombuffer(state, np.uint8, offset=at).copy()), self._device
            )
        return is_scheduled


def _bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
