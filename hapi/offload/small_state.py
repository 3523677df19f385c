"""State of a training that is small: groups' options, a model's buffers, and torch's random generators."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi.offload.loop.hooks import is_followed
from hapi.offload.states.group_options import Groups, options_room, pack_options, restore_options

log = logging.getLogger("hapi.offload")


_SAMPLE = 64
"""Elements of a parameter that another one trains, which are looked at."""


class _Buffer(NamedTuple):
    """A persistent buffer by its place: a layer may put another tensor there in each pass."""

    name: str
    owner: nn.Module
    leaf: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int

    def tensor(self) -> torch.Tensor | None:
        """Return what is there now; None if it has another form than at the beginning."""
        found = self.owner._buffers.get(self.leaf)
        if found is None or found.shape != self.shape or found.dtype != self.dtype:
            return None
        return found


class SmallState:
    """Reads and restores, as bytes, the options of an optimiser's groups, a model's persistent buffers, and the
    generators of the CPU and of its device."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        """``model`` keeps its modules from now on, and the optimiser the number of its groups."""
        self._buffers = list(_persistent_buffers(model))
        devices = {parameter.device for parameter in model.parameters()}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        self._others = {
            name: (parameter, _mark(parameter))
            for name, parameter in model.named_parameters()
            if id(parameter) not in trained
        }
        """Parameters that this optimiser does not train, as they were."""
        self._options_room = options_room(groups)
        self._seen: list[Any] = []
        """Marks of the buffers when they were last captured."""
        self._lacking: set[str] = set()
        """Names of buffers that are not kept, as was said."""
        self.nbytes = len(self.capture(groups))
        """Length of the bytes."""

    def capture(self, groups: Groups) -> bytes:
        """Return the state as it is now."""
        self._look_at_others()
        tensors = [torch.get_rng_state()]
        if self._device is not None:
            tensors.append(torch.cuda.get_rng_state(self._device))
        generators = b"".join(_bytes(tensor) for tensor in tensors)
        self._seen = self._marks()
        return pack_options(groups) + b"".join(map(self._capture, self._buffers)) + generators

    def renewed(self, state: bytes) -> bytes:
        """Return what :meth:`capture` gave last, with the buffers of now."""
        if self._marks() == self._seen:
            return state
        at = self._options_room
        buffers = b"".join(map(self._capture, self._buffers))
        return state[:at] + buffers + state[at + len(buffers) :]

    @torch.no_grad()
    def restore(self, state: bytes, groups: Groups) -> bool:
        """Take over what :meth:`capture` gave; return whether a scheduler drove the learning rate."""
        is_scheduled = restore_options(state, groups)
        at = options_room(groups)
        for buffer in self._buffers:
            is_kept, found = bool(state[at]), buffer.tensor()
            values = np.frombuffer(state, np.uint8, buffer.nbytes, at + 1).copy()
            at += 1 + buffer.nbytes
            if is_kept and found is not None and found.numel():
                found.copy_(torch.from_numpy(values).view(found.dtype).view(found.shape))
        generator = torch.get_rng_state()
        torch.set_rng_state(torch.from_numpy(np.frombuffer(state, np.uint8, generator.nbytes, at).copy()))
        at += generator.nbytes
        if self._device is not None:
            torch.cuda.set_rng_state(
                torch.from_numpy(np.frombuffer(state, np.uint8, offset=at).copy()), self._device
            )
        return is_scheduled

    def _look_at_others(self) -> None:
        """Warn of parameters that somebody changes, as an average of weights: a commit does not have them."""
        changed = [name for name, (other, mark) in self._others.items() if _mark(other) != mark]
        changed = [name for name in changed if not is_followed(self._others[name][0])]
        if changed:
            self._others.clear()
            log.warning(
                "%s changes, and is not trained by this optimizer (%d parameters in all): a run that goes on after a "
                "kill begins with its first values; keep it in a checkpoint of your own",
                changed[0],
                len(changed),
            )

    def _marks(self) -> list[Any]:
        found = [buffer.tensor() for buffer in self._buffers]
        return [None if tensor is None else _mark(tensor) for tensor in found]

    def _capture(self, buffer: _Buffer) -> bytes:
        """A buffer's bytes after one that says whether they count."""
        found = buffer.tensor()
        if found is not None:
            return b"\1" + _bytes(found)
        if buffer.name not in self._lacking:
            self._lacking.add(buffer.name)
            log.warning(
                "the buffer %s has another shape or type than at the beginning: a run that goes on after a kill begins "
                "with its first values",
                buffer.name,
            )
        return bytes(1 + buffer.nbytes)


def _persistent_buffers(model: nn.Module) -> Iterator[_Buffer]:
    """Yield each once, although modules may share it."""
    kept = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in kept:
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            yield _Buffer(name, owner, leaf, buffer.shape, buffer.dtype, buffer.nbytes)


def _mark(parameter: torch.Tensor) -> tuple[int, int, bytes]:
    """Marks that change with a parameter's values, as far as it is cheap: on a GPU a look at them would wait."""
    if is_lazy(parameter):
        return 0, 0, b""
    first = parameter.detach().flatten()[:_SAMPLE] if parameter.is_contiguous() else parameter.detach()[:0]
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr(), _bytes(first) if parameter.is_cpu else b""


def _bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
