"""Expected cost of a request, from the costs of similar ones. Pure.

The cost is in seconds of the scarcest resource that the request uses, each as a part of the whole: the
device, the processors, and the slots (dominant resource fair queueing: Ghodsi, Sekar, Zaharia, Stoica,
SIGCOMM 2012). Slots count so that a slow reader, which takes nothing of the device, does not hold them for
nothing. Seconds in which a request waited for others on the device are not its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest

Request = ExtractRequest | SamplesRequest | TensorsRequest

KINDS_KEPT = 1024
"""Kinds of requests (dataset, layers) whose cost is remembered; of more, the one not seen for longest is forgotten."""
NEWEST = 0.3
"""Weight of the newest request among those of its kind."""
FEW = 16
"""Samples below which what has been seen of a kind is not all that is expected of it: one sample alone may have had a
chunk of thousands read."""
UNKNOWN_LAYER, UNKNOWN_STORED = 0.0005, 0.0002
"""Seconds per sample and layer, and per stored sample or tensor, before the first request: ResNet18 at 64 x 64 and
a small JPEG on one core. Only the first requests of a server are charged by them, and corrected when they are over."""


@dataclass(frozen=True)
class Server:
    """Resources that costs are parts of."""

    slots: int
    processors: int
    devices: int = 1


@dataclass(frozen=True)
class Used:
    """Resources that one request has used."""

    wall: Mapping[str, float]
    """Wall seconds by stage (:data:`hapi.wire.report.STAGES`)."""
    cpu: Mapping[str, float]
    """Seconds of the processors by stage."""
    held: float
    """Seconds for which it held its slot."""

    def without_loading(self) -> Used:
        """Return the use of the same request once its layers are loaded."""
        wall, cpu = {**self.wall, "model": 0.0}, {**self.cpu, "model": 0.0}
        return Used(wall, cpu, max(0.0, self.held - self.wall["model"]))

    def cost(self, server: Server) -> float:
        """Seconds of the scarcest resource."""
        processors = sum(self.cpu.values()) - self.cpu["forward"]
        own = max(0.0, self.held - self.wall["device_wait"])
        return max(self.wall["forward"] / server.devices, processors / server.processors, own / server.slots)


@dataclass
class _Seen:
    """Requests of one kind, the newer ones with more weight."""

    cost: float = 0.0
    samples: float = 0.0

    def add(self, cost: float, samples: int) -> None:
        self.cost = NEWEST * cost + (1 - NEWEST) * self.cost
        self.samples = NEWEST * samples + (1 - NEWEST) * self.samples

    def each(self, unknown: float) -> float:
        """Seconds of one sample; ``unknown`` is what it would be without any having been seen."""
        seen = self.samples / NEWEST  # the newest request's own
        missing = max(0.0, FEW - seen)
        return (self.cost / NEWEST + missing * unknown) / (seen + missing)


class Costs:
    """Means by kind of request. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, ...], _Seen] = OrderedDict()
        self._per_layer = UNKNOWN_LAYER
        self._per_stored = UNKNOWN_STORED

    def expected(self, request: Request) -> float:
        """Return the seconds that ``request`` will cost: its samples by the mean of its kind.

        For a new kind: samples by layers, by the mean over all kinds.
        """
        return _count(request) * self._known.get(_kind(request), _Seen()).each(self._unknown(request))

    def _unknown(self, request: Request) -> float:
        """Seconds of a sample of a kind that was not seen."""
        return self._per_layer * request.split if isinstance(request, ExtractRequest) else self._per_stored

    def seen(self, request: Request, cost: float) -> None:
        """Record that ``request``, answered wholly, has cost ``cost`` seconds, without the loading of layers."""
        kind, count = _kind(request), _count(request)
        self._known.setdefault(kind, _Seen()).add(cost, count)
        self._known.move_to_end(kind)
        while len(self._known) > KINDS_KEPT:
            self._known.popitem(last=False)
        weight, each = NEWEST * min(1.0, count / FEW), cost / count
        if isinstance(request, ExtractRequest):
            self._per_layer += weight * (each / request.split - self._per_layer)
        else:
            self._per_stored += weight * (each - self._per_stored)


def _kind(request: Request) -> tuple[str, ...]:
    if isinstance(request, ExtractRequest):
        return "extract", request.dataset.name, request.model.digest, str(request.split)
    if isinstance(request, SamplesRequest):
        return "samples", request.dataset.name
    return "tensors", request.name


def _count(request: Request) -> int:
    return len(request.names) if isinstance(request, TensorsRequest) else len(request.ids)
