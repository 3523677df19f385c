"""What a request will cost, from what requests like it have cost. Pure.

The cost is in seconds of the scarcest thing that the request uses, each as a part of all that there is of it: the
device, the processors, and the slots (dominant resource fair queueing: Ghodsi, Sekar, Zaharia, Stoica, SIGCOMM 2012).
Slots count so that a slow reader, who takes nothing of the device, does not hold them for nothing; the seconds in
which a request waited for others on the device are not its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest

Request = ExtractRequest | SamplesRequest | TensorsRequest

KINDS_KEPT = 1024
"""Kinds of requests (data set, layers) whose cost is remembered; of more, the one not seen for longest is forgotten."""
NEWEST = 0.3
"""Weight of the newest request in the mean of its kind."""
UNKNOWN_LAYER, UNKNOWN_STORED = 0.0005, 0.0002
"""Seconds per sample and layer, and per stored sample or tensor, before the first request: ResNet18 at 64 x 64 and
a small JPEG on one core. Only the first requests of a server are charged by them, and corrected when they are over."""


@dataclass(frozen=True)
class Server:
    """What costs are parts of."""

    slots: int
    processors: int
    devices: int = 1


@dataclass(frozen=True)
class Used:
    """What one request has used."""

    wall: Mapping[str, float]
    """Wall seconds by stage (:data:`hapi.wire.messages.STAGES`)."""
    cpu: Mapping[str, float]
    """Seconds of the processors by stage."""
    held: float
    """Seconds for which it held its slot."""

    def again(self) -> Used:
        """What the same request would use once its layers are loaded."""
        wall, cpu = {**self.wall, "model": 0.0}, {**self.cpu, "model": 0.0}
        return Used(wall, cpu, max(0.0, self.held - self.wall["model"]))

    def cost(self, server: Server) -> float:
        """Seconds of the scarcest resource."""
        processors = sum(self.cpu.values()) - self.cpu["forward"]
        own = max(0.0, self.held - self.wall["device_wait"])
        return max(self.wall["forward"] / server.devices, processors / server.processors, own / server.slots)


class Costs:
    """Means by kind of request. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._per_layer = UNKNOWN_LAYER
        self._per_stored = UNKNOWN_STORED

    def expected(self, request: Request) -> float:
        """Seconds that ``request`` will cost: its samples by the mean of its kind.

        Of a kind that was not seen yet: samples by layers, by the mean over all kinds.
        """
        count = _count(request)
        known = self._known.get(_kind(request))
        if known is not None:
            return count * known
        return count * (
            self._per_layer * request.split if isinstance(request, ExtractRequest) else self._per_stored
        )

    def seen(self, request: Request, cost: float) -> None:
        """``request``, answered wholly, has cost ``cost`` seconds, those in which its layers were loaded left out."""
        kind, each = _kind(request), cost / _count(request)
        before = self._known.get(kind, each)
        self._known[kind] = before + NEWEST * (each - before)
        self._known.move_to_end(kind)
        while len(self._known) > KINDS_KEPT:
            self._known.popitem(last=False)
        if isinstance(request, ExtractRequest):
            self._per_layer += NEWEST * (each / request.split - self._per_layer)
        else:
            self._per_stored += NEWEST * (each - self._per_stored)


def _kind(request: Request) -> tuple[str, ...]:
    if isinstance(request, ExtractRequest):
        return "extract", request.dataset.name, request.model.digest, str(request.split)
    if isinstance(request, SamplesRequest):
        return "samples", request.dataset.name
    return "tensors", request.name


def _count(request: Request) -> int:
    return len(request.names) if isinstance(request, TensorsRequest) else len(request.ids)
