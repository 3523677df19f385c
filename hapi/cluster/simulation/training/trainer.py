"""One trainer in simulated time: batches open ahead, their requests go to servers, steps follow.

Batches are handed out in order, one more opens when one is over, and an epoch begins when the one before is over, as
in :mod:`hapi.client.loading.prefetcher`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from typing import Any

import simpy

from hapi.cluster.simulation.network import Network
from hapi.cluster.simulation.processors import Processors
from hapi.cluster.simulation.server import Steps
from hapi.cluster.simulation.training.choice import KnownServers, ServerList
from hapi.cluster.simulation.training.planning import BatchCost, Splits
from hapi.cluster.simulation.training.requests import Requests, Sender, SimulatedBatch, TrainerCounts, Work


class SimulatedTrainer:
    """Trains batch after batch."""

    def __init__(
        self,
        env: simpy.Environment,
        work: Work,
        servers: ServerList,
        splits: Splits,
        sender: Sender,
        *,
        processors: Processors,
        network: Network,
        rng: random.Random,
        start: float,
    ) -> None:
        """Begin at ``start``.

        Args:
            env: simulated time.
            work: its kind.
            servers: those that it knows.
            splits: chooses its splits.
            sender: its name, and how servers know it.
            processors: of its machine.
            network: of the fleet.
            rng: its own chance.
            start: seconds.
        """
        self.name, self.work, self.counts = sender.name, work, TrainerCounts()
        self.splits = splits
        self.split = -1
        """That of the newest batch; -1 before the first."""
        self._env, self._rng, self._processors = env, rng, processors
        self._requests = Requests(
            env, work, KnownServers(servers), splits, self, sender, network=network, rng=rng
        )
        self._live: deque[SimulatedBatch] = deque()
        self._opened = 0
        self._waits_since: float | None = None
        env.process(self._train(start))

    def reset(self) -> None:
        """Count from now on."""
        self.counts = TrainerCounts()
        self._waits_since = None if self._waits_since is None else self._env.now

    @property
    def stalled(self) -> float:
        """Seconds in which it waited for a batch, those of a wait that lasts included."""
        lasting = 0.0 if self._waits_since is None else self._env.now - self._waits_since
        return self.counts.stalled + lasting

    # -- the training loop -------------------------------------------------------------------------------

    def _train(self, start: float) -> Steps:
        if start > 0:
            yield self._env.timeout(start)
        self.splits.begin(self._requests.told_waits())
        while self._open_ahead():
            batch, self._waits_since = self._live[0], self._env.now
            yield batch.full
            self.counts.stalled, self._waits_since = self.stalled, None
            suffix, step = yield from self._compute(batch)
            self._live.popleft()
            self.counts.samples += batch.samples
            self.counts.batches += 1
            self.counts.splits[batch.split] += 1
            cost = BatchCost(batch.number, batch.split, batch.samples, suffix, step, batch.received)
            self.splits.done(cost, *self._requests.news())

    def _compute(self, batch: SimulatedBatch) -> Generator[simpy.Event, Any, tuple[float, float]]:
        """Run the frozen suffix and the step; their seconds."""
        costs, began = self.work.costs(batch.split), self._env.now
        if costs.suffix_seconds > 0:
            yield self._run(batch.samples * costs.suffix_seconds)
        suffix, began = self._env.now - began, self._env.now
        yield self._run(batch.samples * costs.step_seconds + costs.update_seconds)
        if self.work.pause:
            yield self._env.timeout(self.work.pause)
        return suffix, self._env.now - began

    def _run(self, seconds: float) -> simpy.Event:
        tier = self.work.tier
        if tier.device == "cpu":
            return self._processors.work(seconds, tier.threads)
        return self._env.timeout(seconds)

    def _open_ahead(self) -> bool:
        """Open batches for as many requests as may be under way, as far ahead as may be; False: none to train."""
        job, limit = self.work.job, self.work.batches
        of_epoch = -(-job.samples // job.bs)
        while self._requests.under_way < job.in_flight and (limit is None or self._opened < limit):
            if self._opened % of_epoch == 0:
                if self._live:
                    break  # the next epoch begins when this one is over
                self._requests.begin_pass()
            if len(self._live) >= 2 and len(self._live) >= 1 + self.work.costs(self.split).depth:
                break
            self.split = split = self.splits.open(self._opened)
            samples = self._batch_samples(self._opened)
            batch = SimulatedBatch(self._opened, split, samples, self._env.event(), samples)
            self._opened += 1
            self._live.append(batch)
            self._requests.add(batch)
        self._requests.send()
        return bool(self._live)

    def _batch_samples(self, number: int) -> int:
        """Samples of a batch: an epoch's last one may be smaller."""
        job = self.work.job
        batches = -(-job.samples // job.bs)
        last = number % batches == batches - 1
        return job.samples - (batches - 1) * job.bs if last else min(job.bs, job.samples)

    # -- what comes in -----------------------------------------------------------------------------------

    def request_over(self) -> None:
        """Open further batches for the request that may be under way in this one's place."""
        self._open_ahead()

    def receive(self, batch: SimulatedBatch, samples: int) -> None:
        """Take samples that have crossed: they are checked, and at split 0 decoded, then they count."""
        seconds = samples * self.work.costs(batch.split).receive_seconds
        batch.received += seconds
        if seconds > 0:
            self._processors.work(seconds).callbacks.append(lambda _: self._count(batch, samples))
        else:
            self._count(batch, samples)

    @staticmethod
    def _count(batch: SimulatedBatch, samples: int) -> None:
        batch.missing -= samples
        if batch.missing < 0:
            raise RuntimeError(f"batch {batch.number}: a sample arrived twice; this is a defect of hapi")
        if not batch.missing:
            batch.full.succeed()
