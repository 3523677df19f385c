"""Frozen weights by key of content, held once by all processes of a user on one machine."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch

from hapi.models.shared.folder import Division, OpenPack, WeightsFolder
from hapi.models.shared.pack import TensorRange
from hapi.models.shared.place import VARIABLE, weights_folder
from hapi.waiting import check

log = logging.getLogger("hapi.weights")

Load = Callable[[Collection[str]], Iterable[tuple[str, torch.Tensor]]]
"""Gives the tensors of these keys on the CPU, in any order, verified: their bytes have the digests in the keys."""
Taken = Iterator[tuple[str, torch.Tensor]]
Memory = TypeVar("Memory")

LOOK_SECONDS = 0.005
"""Seconds between two looks whether another process has loaded what this one waits for."""
STALLED_SECONDS = 30.0
"""Seconds without a byte written after which another process's load is not waited for any more."""

TOUCH_SECONDS = 1.0
"""Seconds after which a process that loads shows that it goes on, in packs to come too."""


class Silence:
    """Measures for how long another process has given no sign of life, also where the clock is set meanwhile."""

    def __init__(self) -> None:
        self._sign = math.nan
        self._since = 0.0

    def seconds(self, sign: float) -> float:
        """Return the seconds since the last ``sign``, a Unix time.

        From before our first look only the wall clock tells. So a process that lives may first show itself once more.
        """
        now = time.monotonic()
        if sign != self._sign:
            self._sign, self._since = sign, now
        seen = now - self._since
        return max(seen, time.time() - sign) if seen > 2 * TOUCH_SECONDS else seen


class PackedWeights(ABC, Generic[Memory]):
    """Frozen weights in packs that processes share; thread-safe. ``Memory`` is where a pack's bytes are."""

    def __init__(self, folder: WeightsFolder) -> None:
        """Share through ``folder``. At the end of the process idle weights beyond the folder's budget are removed."""
        self._folder = folder
        _at_exit(folder)
        self._reported = False

    def take(self, wanted: Mapping[str, torch.Tensor], load: Load) -> Taken:
        """Yield the tensor of each key of ``wanted`` as soon as it is there, in any order.

        One process loads what is missing, in one call of ``load``; others wait for it, and load themselves what it
        leaves when it fails or dies. What was begun and not yielded when the iterator is closed is given up.

        Args:
            wanted: forms (shape, dtype, layout) by key; they may be on the meta device.
            load: brings missing ones.
        """
        left = {key: form.nbytes for key, form in wanted.items() if form.nbytes and form.is_contiguous()}
        own = [key for key in wanted if key not in left]
        while left:
            try:
                division, found = self._divided(left)
            except OSError as error:
                self._tell(error.strerror or str(error))
                own += left
                break
            if division.refused:
                self._tell("there is no room")
                own += division.refused
            ready, refused = self._allocated(division.mine)
            own += refused
            coming = [key for pack in ready for key in pack.writer.ranges]
            for key in (*found, *coming, *own):
                left.pop(key, None)
            yield from self._filled(ready, wanted, load)
            for key, (memory, place) in found.items():
                yield key, self._tensor(memory, place, wanted[key])
            if left and not found and not division.mine and not self._wait(division.busy):
                own += left
                break
        if own:
            yield from load(own)

    def _divided(self, left: Mapping[str, int]) -> tuple[Division, dict[str, tuple[Memory, TensorRange]]]:
        """Divide what is wanted, and take the memory of what is there; nothing is begun where that fails."""
        division = self._folder.divide(left)
        try:
            return division, self._opened(division)
        except BaseException:
            _give_up(division.mine)
            raise

    @abstractmethod
    def _opened(self, division: Division) -> dict[str, tuple[Memory, TensorRange]]:
        """Return the memory of what was found; what cannot be had is left out."""

    @abstractmethod
    def _seal(self, pack: OpenPack) -> Memory:
        """Give a whole pack over to all processes; return its memory."""

    @abstractmethod
    def _tensor(self, memory: Memory, place: TensorRange, form: torch.Tensor) -> torch.Tensor:
        """Return a tensor over its place in a pack."""

    def _allocated(self, packs: list[OpenPack]) -> tuple[list[OpenPack], list[str]]:
        """Take the memory of packs; return those that have it, and the keys of the others."""
        ready, refused = list[OpenPack](), list[str]()
        for pack in packs:
            try:
                pack.writer.allocate()
                ready.append(pack)
            except OSError as error:
                self._tell(error.strerror or str(error))
                refused += pack.writer.ranges
                pack.abandon()
        return ready, refused

    def _filled(self, packs: list[OpenPack], wanted: Mapping[str, torch.Tensor], load: Load) -> Taken:
        """Load the tensors of ``packs``, each of which is sealed and yielded when it is whole."""
        of_key = {key: pack for pack in packs for key in pack.writer.ranges}
        pending, touched = set(packs), time.monotonic()
        try:
            for key, tensor in load(list(of_key)) if of_key else ():
                pack = of_key[key]
                whole = pack.writer.write(key, tensor)
                del tensor
                if time.monotonic() - touched > TOUCH_SECONDS:
                    touched = time.monotonic()
                    for other in pending:
                        other.writer.touch()
                if whole:
                    memory = self._seal(pack)
                    pending.remove(pack)
                    for name, place in pack.writer.ranges.items():
                        yield name, self._tensor(memory, place, wanted[name])
                    del memory
            if pending:
                raise KeyError(f"{len(pending)} packs of weights were not loaded whole")
        finally:
            _give_up(pending)

    def _wait(self, busy: Collection[str]) -> bool:
        """Wait until another process has loaded one of the packs, or has left it; False if that is not waited for."""
        silences = {name: Silence() for name in busy}
        while True:
            try:
                signs = {name: self._folder.sign_of_life(name) for name in busy}
            except OSError:
                return False
            lasting = [silences[name].seconds(sign) for name, sign in signs.items() if sign is not None]
            if len(lasting) < len(signs):
                return True
            if min(lasting) > STALLED_SECONDS:
                return False
            check()
            time.sleep(LOOK_SECONDS)

    def _tell(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            log.warning(
                "frozen weights are not shared with other processes: %s: %s; give it room, or set %s=off",
                self._folder.path,
                reason,
                VARIABLE,
            )


def _give_up(packs: Iterable[OpenPack]) -> None:
    for pack in packs:
        with contextlib.suppress(OSError):
            pack.abandon()


class SharedWeights(PackedWeights[mmap.mmap]):
    """Frozen weights in the host's memory.

    A tensor lies in a pack (:mod:`hapi.models.shared.folder`) that is mapped into every process that uses it, each time
    by a mapping of its own: what is written into a tensor in place, against all intention, is seen by no other job.
    A pack counts as used until the last tensor over the mapping is gone. Tensors for which there is no room, and those
    with strides of their own, are in the process's own memory, as all are where memory cannot be shared.
    """

    def _opened(self, division: Division) -> dict[str, tuple[mmap.mmap, TensorRange]]:
        return {key: (pack.mapping, place) for key, (pack, place) in division.found.items()}

    def _seal(self, pack: OpenPack) -> mmap.mmap:
        return pack.seal()

    def _tensor(self, memory: mmap.mmap, place: TensorRange, form: torch.Tensor) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=form.dtype, count=form.numel(), offset=place.start)
        return flat.reshape(form.shape)


_ending: set[Path] = set()
"""Folders that are left when this process ends."""


def _at_exit(folder: WeightsFolder) -> None:
    if folder.path not in _ending:
        _ending.add(folder.path)
        atexit.register(_leave, folder, os.getpid())


def _leave(folder: WeightsFolder, pid: int) -> None:
    if os.getpid() == pid:  # a fork shares its locks with the process that made it
        with contextlib.suppress(OSError):
            folder.leave()


def shared_weights(device: torch.device) -> SharedWeights | None:
    """Return the weights that this process shares on ``device``; None where it shares none, as on a GPU, whose weights
    are in the host's memory on their way only. Raises as :func:`weights_folder`.
    """
    folder = weights_folder()
    return None if folder is None or device.type != "cpu" else SharedWeights(folder)
