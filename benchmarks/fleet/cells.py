"""The cells of the fleet's test bed: servers, trainers, links and pauses; and each as the simulator's fleet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hapi.cluster.simulation.fleet import Fleet, ServerGroup, SharedLink, SharedMachine, TrainerGroup

MODEL, FREEZE, SIDE = "resnet18", 4, 64
"""Four layers of ResNet18: 64 KiB a sample cross, and a millisecond of the processor makes them."""
BS = 8
SAMPLES = 512
CORES = 2.0
EQUAL, UNEQUAL = (10.0, 30.0), (30.0, 60.0)
"""Seconds before the measurement and of it, where links are equal, and elsewhere: there the first answers may take 13,
and batches that others have answered wait for them."""
COOL_DOWN = 3.0
"""Seconds for which trainers go on, so that the last ones have the same company as before."""
QUEUES = "one for each connection"
"""Way in which connections share a link: part of how a cell is measured."""


@dataclass(frozen=True, kw_only=True)
class FleetCell:
    """One fleet of the test bed."""

    servers: int
    trainers: int
    link: float
    """Bits per second of each server's link."""
    pause: float
    """Seconds of each training step."""
    shared: float | None = None
    """Bits per second of the link that all answers share; None for no limit."""
    slow: float = 1.0
    """Part of its link's rate that the last server has."""
    hold_out: bool = True
    """Whether the simulator is not fitted to it."""
    runs: int = 1
    """Times that it is measured, apart from each other: the bed's own repeatability."""

    @property
    def key(self) -> str:
        """Unlike that of any other cell."""
        return "/".join(
            str(value) for name, value in asdict(self).items() if name not in ("hold_out", "runs")
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds before the measurement, and of it."""
        return EQUAL if self.shared is None and self.slow == 1 else UNEQUAL

    @property
    def links(self) -> list[float]:
        """Bits per second of each server's link."""
        rates = [self.link] * self.servers
        rates[-1] *= self.slow
        return rates


def cells() -> list[FleetCell]:
    """Unequal links, and a link that all share; then every number of servers and trainers."""
    found = [
        FleetCell(servers=2, trainers=4, link=12e6, pause=0.05, slow=0.25),
        FleetCell(servers=4, trainers=6, link=8e6, pause=0.1, slow=0.25, runs=2),
        FleetCell(servers=3, trainers=8, link=16e6, pause=0.05, shared=24e6, runs=2),
        FleetCell(servers=4, trainers=4, link=12e6, pause=0.05, shared=24e6, hold_out=False),
        FleetCell(servers=2, trainers=3, link=16e6, pause=0.1, shared=20e6, runs=2),
    ]
    for servers in (1, 2, 3, 4):
        for number, trainers in enumerate((1, 2, 4, 8)):
            pause = (0.05, 0.2, 0.4)[(servers + number) % 3]
            # Fitted: one in four, each number of servers and of trainers once.
            fitted = number == (0, 2, 3, 1)[servers - 1]
            runs = 2 if (servers, trainers) == (3, 2) else 1
            cell = FleetCell(
                servers=servers, trainers=trainers, link=12e6, pause=pause, hold_out=not fitted, runs=runs
            )
            found.append(cell)
    return found


def method() -> dict[str, Any]:
    """Return the way in which cells are measured, by name: records of another way cannot stand beside them."""
    return {"seconds": [list(EQUAL), list(UNEQUAL)], "queues": QUEUES}


def fleet_of(cell: FleetCell) -> Fleet:
    """Return the cell as the simulator has it: all processes share the machine's cores."""
    servers = tuple(
        ServerGroup(
            name=f"server{number}", bandwidth=rate, machine="machine",
            link=None if cell.shared is None else "shared",
        )
        for number, rate in enumerate(cell.links)
    )  # fmt: skip
    trainers = TrainerGroup(
        name="trainers", profile=Path("measured"), count=cell.trainers, split=FREEZE, machine="machine",
        pause=cell.pause, bs=BS, request_size=BS, samples=SAMPLES,
    )  # fmt: skip
    return Fleet(
        servers=servers,
        trainers=(trainers,),
        links=() if cell.shared is None else (SharedLink(name="shared", bandwidth=cell.shared),),
        machines=(SharedMachine(name="machine", cores=CORES),),
        seconds=sum(cell.seconds),
        warm_up=cell.seconds[0],
        tenants="one",
    )
