"""A server's report on a request that it answered: seconds of each stage, and of the server meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from hapi.errors import BadRequestError
from hapi.text import printable
from hapi.wire.messages import MAX_SAMPLES, MAX_SPLIT

_LARGEST = 1e9
"""Number of seconds (31 years) or pages that a report may tell of."""

STAGES = ("queue", "model", "read", "decode", "device_wait", "forward", "copy_out", "send")
"""Server stages of a request, in order (HAPI, Table 1); seconds of each are summed over the request's COS
batches.
"""


@dataclass(frozen=True, kw_only=True)
class ServerTier:
    """Resources that a server computes with."""

    device: str
    """``cpu`` or ``cuda``."""
    processors: int
    """Processor cores that the server may use."""
    threads: int
    """Threads of one forward pass on a CPU."""
    running: int
    """Requests at work at a time."""
    devices: int
    """Devices that run forward passes at the same time."""
    reuse: bool
    """True when layers stay loaded between requests."""


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """Report of the server in the end frame."""

    server: str
    """Id of the server process, to tell restarts and several servers apart."""
    seconds: dict[str, float]
    """Wall seconds per stage of :data:`STAGES`."""
    cpu: dict[str, float]
    """CPU seconds per stage of the threads that worked for this request."""
    busy: tuple[float, float]
    """The server's busy clock (seconds in which at least one request was worked on) at start and end."""
    work: tuple[float, float]
    """Seconds of work that the server has accounted to all requests, at start and end: CPU seconds of their
    stages, or on a GPU seconds of the forward passes.
    """
    others: tuple[float, float]
    """Part of that work which was for other jobs."""
    process: tuple[float, float]
    """CPU seconds of the whole server process, at start and end; zeros where the device is a GPU."""
    clock: tuple[float, float]
    """The server's time, in seconds, at start and end."""
    pages: float
    """Memory pages that its forward passes touched for the first time; a server's first passes take longer.
    """
    first: float
    """Seconds from the request's arrival, queue included, until the first frame was made."""
    cos_batch: int
    """Largest batch that was run on the device for this request; 0 for stored bytes."""
    layers: tuple[float, ...] = ()
    """Seconds in each layer, if they were asked for."""
    wait: float = 0.0
    """Seconds that the tenant's next request would wait in the queue now."""
    joined: int = 0
    """Samples that another request was computing anyway."""
    kept: int = 0
    """Samples whose features the server had kept."""
    tier: ServerTier

    @property
    def shared(self) -> int:
        """Samples that this request did not compute: its seconds say nothing about the server's speed."""
        return self.joined + self.kept

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; stages of unknown names are left out, and impossible figures are clamped to
        possible ones.

        Plans are made from the numbers, so all of them must be finite, whoever sent them.
        """
        try:
            tier = document["tier"]
            return cls(
                server=printable(document["server"], 64),
                seconds=_stage_seconds(document["seconds"]),
                cpu=_stage_seconds(document["cpu"]),
                busy=_pair(document["busy"]),
                work=_pair(document["work"]),
                others=_pair(document["others"]),
                process=_pair(document["process"]),
                clock=_pair(document["clock"]),
                pages=_figure(document["pages"]),
                first=_figure(document["first"]),
                cos_batch=_count(document["cos_batch"], 0),
                layers=tuple(_figure(v) for v in document["layers"][:MAX_SPLIT]),
                wait=_figure(document["wait"]),
                joined=_count(document.get("joined", 0), 0),
                kept=_count(document.get("kept", 0), 0),
                tier=ServerTier(
                    device=printable(tier["device"], 64),
                    processors=_count(tier["processors"], 1),
                    threads=_count(tier["threads"], 1),
                    running=_count(tier["running"], 1),
                    devices=_count(tier["devices"], 1),
                    reuse=bool(tier["reuse"]),
                ),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadRequestError(
                f"the server's report is malformed ({error!r}); update the older side"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON for the end frame, with seconds to the microsecond."""
        return {
            "server": self.server,
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
            "cpu": {k: round(v, 6) for k, v in self.cpu.items()},
            "busy": [round(v, 6) for v in self.busy],
            "work": [round(v, 6) for v in self.work],
            "others": [round(v, 6) for v in self.others],
            "process": [round(v, 6) for v in self.process],
            "clock": [round(v, 6) for v in self.clock],
            "pages": round(self.pages),
            "first": round(self.first, 6),
            "cos_batch": self.cos_batch,
            "layers": [round(v, 9) for v in self.layers],
            "wait": round(self.wait, 6),
            **({"joined": self.joined} if self.joined else {}),
            **({"kept": self.kept} if self.kept else {}),
            "tier": vars(self.tier),
        }


def _pair(value: Any) -> tuple[float, float]:
    start, end = (_figure(v) for v in value)
    return start, end


def _figure(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("a figure that is not a number")
    return min(max(number, 0.0), _LARGEST)


def _stage_seconds(value: Any) -> dict[str, float]:
    given = dict(value)
    return {stage: _figure(given[stage]) for stage in STAGES if stage in given}


def _count(value: Any, minimum: int) -> int:
    return min(max(int(value), minimum), MAX_SAMPLES)
