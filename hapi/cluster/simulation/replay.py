"""A fleet made and run in simulated time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import simpy

from hapi.cluster.simulation.costs import SplitCosts, on_machines, split_costs, together
from hapi.cluster.simulation.fleet import Fleet, FleetEvent, ServerGroup, TrainerGroup
from hapi.cluster.simulation.network import UNLIMITED, Network
from hapi.cluster.simulation.observation import load_recorded
from hapi.cluster.simulation.processors import Processors
from hapi.cluster.simulation.results import Replayed, Sampler, collect
from hapi.cluster.simulation.server import SimulatedServer, Steps
from hapi.cluster.simulation.training.choice import ServerList
from hapi.cluster.simulation.training.planning import FixedSplits, PlannedSplits, Splits
from hapi.cluster.simulation.training.requests import Messages, Sender, Work
from hapi.cluster.simulation.training.trainer import SimulatedTrainer
from hapi.errors import UsageError
from hapi.profiler.profile import Job, Profile
from hapi.server.scheduling.fair_queue import ANONYMOUS, Tenant

Profiles = Mapping[str, tuple[Profile, Job]]
"""Profile and job of each group of trainers, by its name."""
SAMPLES_OVER_TIME = 40
"""Moments at which the splits are counted."""


def load_profiles(fleet: Fleet, folder: Path) -> Profiles:
    """Read the profiles of a fleet's trainers.

    Args:
        fleet: with their paths.
        folder: that relative paths begin in.

    Raises:
        UsageError: a file cannot be read, or a group's split is beyond its model's.
        ConfigError: it is not a profile.
    """
    found: dict[str, tuple[Profile, Job]] = {}
    for group in fleet.trainers:
        path = str(folder / group.profile)
        profile, job = load_recorded(path)
        if isinstance(group.split, int) and group.split > profile.last_split:
            raise UsageError(
                f"trainers: {group.name}: split is {group.split}, the last of {path} is {profile.last_split}"
            )
        found[group.name] = profile, job
    return found


def replay(
    fleet: Fleet, profiles: Profiles, progress: Callable[[float], None] = lambda share: None
) -> Replayed:
    """Simulate a fleet, and return what was counted after its warm-up.

    Args:
        fleet: to be simulated.
        profiles: of its trainers.
        progress: told now and then which share of the simulated time is over.
    """
    began = time.monotonic()
    with _rare_collections():
        simulation = Simulation(fleet, profiles)
        simulation.run(progress)
    return collect(
        simulation.sampler, fleet, simulation.servers, simulation.trainers, time.monotonic() - began
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles among millions of objects rarely: there are hardly any, and each look takes seconds."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class Simulation:
    """The parts of a fleet in simulated time."""

    def __init__(self, fleet: Fleet, profiles: Profiles) -> None:
        """Make all of them; nothing has run."""
        self.fleet, self.env = fleet, simpy.Environment()
        self.network = Network(self.env, fleet.settle)
        self._profiles = profiles
        self._rng = random.Random(fleet.seed)
        self._links = {link.name: self._add_link(link.bandwidth) for link in fleet.links}
        self._machines = {m.name: Processors(self.env, m.cores) for m in fleet.machines}
        self._speeds: dict[str, float] = {}
        self.servers = {group.name: self._make_servers(group) for group in fleet.servers}
        self.trainers = {group.name: self._make_trainers(group) for group in fleet.trainers}
        for event in fleet.events:
            self.env.process(self._happen(event))
        self.sampler = Sampler(self.env, fleet, self.servers, self.trainers, self.network)

    def run(self, progress: Callable[[float], None]) -> None:
        """Let the simulated time pass."""
        step = self.fleet.seconds / SAMPLES_OVER_TIME
        if self.fleet.warm_up:
            self.env.run(until=self.fleet.warm_up)
        self.sampler.begin()
        for number in range(1, SAMPLES_OVER_TIME + 1):
            until = number * step
            if until > self.env.now:
                self.env.run(until=until)
                self.sampler.sample()
            progress(number / SAMPLES_OVER_TIME)

    def _add_link(self, bits_per_second: float | None) -> int:
        if bits_per_second is None:
            return self.network.add_link(None)
        return self.network.add_link(bits_per_second / 8 * self.fleet.efficiency)

    def _path(self, bandwidth: float | None, link: str | None) -> tuple[int, ...]:
        own = () if bandwidth is None else (self._add_link(bandwidth),)
        return own if link is None else (*own, self._links[link])

    def _make_servers(self, group: ServerGroup) -> list[SimulatedServer]:
        # All profiles' servers are one kind of machine: its processors and devices are those of the first.
        profile, _ = self._profiles[self.fleet.trainers[0].name]
        tier, made = profile.server_tier, []
        for number in range(group.count):
            shared = None if group.machine is None else self._machines[group.machine]
            server = SimulatedServer(
                self.env,
                f"{group.name}-{number}",
                tier=tier,
                slots=group.max_running * tier.devices,
                max_queued=group.max_queued,
                processors=shared or Processors(self.env, tier.processors),
                network=self.network,
                path=self._path(group.bandwidth, group.link),
                overhead=self.fleet.overhead,
            )
            server.slow = 1 / group.speed
            self._speeds[server.name] = group.speed
            made.append(server)
        return made

    def _make_trainers(self, group: TrainerGroup) -> list[SimulatedTrainer]:
        recorded, recorded_job = self._profiles[group.name]
        profile = on_machines(recorded, trainer_speed=group.speed)
        job = job_of(group, recorded_job, recorded.server.servers)
        everyone = [server for servers in self.servers.values() for server in servers]
        known = group.servers or len(everyone)
        job = replace(job, in_flight=job.in_flight * known)
        frame = group.cos_batch or profile.server.cos_batch
        if self.fleet.detail == "requests":
            frame = job.request_size

        @cache
        def costs(split: int) -> SplitCosts:
            """Return the costs of a split; before the first batch those of the first one."""
            return split_costs(profile, job, max(0, split))

        work = Work(
            content=profile.model,
            job=job,
            costs=costs,
            tier=profile.client_tier,
            frame=frame,
            request_seconds=profile.link.request_seconds,
            jitter=self.fleet.jitter,
            pause=group.pause,
            batches=group.batches,
        )
        messages, made = Messages(group.name, profile.model), []
        alone = cache(lambda speed, rate: together(on_machines(profile, server_speed=speed), known, rate * 8))
        listed, idle = self._listed(group, profile, everyone)
        for number in range(group.count):
            if known < len(everyone):
                listed, idle = self._listed(group, profile, self._rng.sample(everyone, known))
            rng = random.Random(self._rng.random())
            name = f"{group.name}-{number}"
            sender = Sender(
                name=name,
                tenant=Tenant(name=name) if self.fleet.tenants == "each" else ANONYMOUS,
                path=self._path(group.bandwidth, group.link),
                messages=messages,
            )
            made.append(
                SimulatedTrainer(
                    self.env,
                    work,
                    listed,
                    self._splits(group, alone(*idle), job, rng),
                    sender,
                    processors=self._machines[group.machine]
                    if group.machine
                    else Processors(self.env, profile.client_tier.processors),
                    network=self.network,
                    rng=rng,
                    start=rng.uniform(0, group.spread),
                )
            )
        return made

    def _splits(self, group: TrainerGroup, alone: Profile, job: Job, rng: random.Random) -> Splits:
        """The source of a trainer's splits: its first plan is for the fleet as if it were ``alone``."""
        if isinstance(group.split, int):
            return FixedSplits(group.split)
        reaction = self.fleet.reaction
        return PlannedSplits(
            alone,
            replace(job, memory_bytes=None),
            hysteresis=reaction.hysteresis,
            holds=reaction.holds,
            smoothing=reaction.smoothing,
            follow=reaction.follow,
            chance=rng.random,
        )

    def _listed(
        self, group: TrainerGroup, profile: Profile, servers: list[SimulatedServer]
    ) -> tuple[ServerList, tuple[float, float]]:
        """A trainer's list of servers; and their mean speed, with the bytes per second that it would get of all."""
        speed = sum(self._speeds[server.name] for server in servers) / len(servers)
        return ServerList.of(servers, profile.model), (speed, self._alone_rate(group, servers))

    def _alone_rate(self, group: TrainerGroup, servers: list[SimulatedServer]) -> float:
        """Bytes per second that a trainer would get of an idle fleet."""
        own = [] if group.bandwidth is None else [group.bandwidth / 8 * self.fleet.efficiency]
        own += [] if group.link is None else [self.network.capacity(self._links[group.link])]
        links = [min([UNLIMITED, *(self.network.capacity(link) for link in s.path)]) for s in servers]
        shared = {link for s in servers for link in s.path}.intersection(self._links.values())
        return min([sum(links), *own, *(self.network.capacity(link) for link in shared), UNLIMITED / 8])

    def _happen(self, event: FleetEvent) -> Steps:
        """Carry out an event, and undo it when it is over."""
        yield self.env.timeout(event.at)
        if event.what == "link":
            link = self._links[event.name]
            self.network.set_capacity(link, self.network.capacity(link) * event.factor)
            if event.seconds is not None:  # others may have begun meanwhile, and go on
                yield self.env.timeout(event.seconds)
                self.network.set_capacity(link, self.network.capacity(link) / event.factor)
            return
        servers = self.servers[event.name][: event.count]
        for server in servers:
            if event.what == "fail":
                server.fail()
            else:
                server.slow *= event.factor
        if event.seconds is None:
            return
        yield self.env.timeout(event.seconds)
        for server in servers:
            if event.what == "fail":
                server.recover()
            else:
                server.slow /= event.factor


def job_of(group: TrainerGroup, recorded: Job, servers: int) -> Job:
    """Return the job of a group: the profile's own, as far as the group does not say otherwise.

    Args:
        group: of trainers.
        recorded: of the profile; its requests under way are those to all of its servers.
        servers: that the profile was recorded with.
    """
    names = ("bs", "samples", "request_size", "in_flight")
    given = {name: getattr(group, name) for name in names if getattr(group, name) is not None}
    return replace(recorded, **{"in_flight": max(1, recorded.in_flight // servers), **given})
