"""Record of a running fleet over a while: servers' counts, their queues, and a trainer's stages."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from hapi.errors import BadRequestError, ConfigError
from hapi.paths import write_whole
from hapi.profiler.profile import MAX_PROFILE_BYTES, Job, Profile
from hapi.profiler.reading import load_document, read_strictly

OBSERVATION_VERSION = 1
_MOST_LISTED = 1000
"""Tenants or requests that one server may tell of."""


@dataclass(frozen=True, kw_only=True)
class ObservedServer:
    """One server over the observed time."""

    url: str
    slots: int
    max_queued: int
    requests: int
    """Requests answered wholly."""
    shed: int
    """Requests sent away."""
    sent_bytes: int
    cost_seconds: float
    """Seconds of its scarcest resource that requests used."""
    running: float
    """Requests at work, on average."""
    queued: float
    """Requests that waited, on average."""
    expected_wait: float
    """Seconds that a tenant's next request had to expect, on average."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A fleet over the observed time, and the stages of one of its trainers."""

    version: int = OBSERVATION_VERSION
    observed: float
    """Seconds."""
    tenants: int
    """Tenants that were served."""
    splits: tuple[int, ...]
    """Splits of requests that were seen at work, the usual one first."""
    request_samples: float
    """Samples of the mean request that was seen at work."""
    servers: tuple[ObservedServer, ...]
    profile: Profile
    job: Job

    @property
    def bytes_per_second(self) -> float:
        """Bytes of answers that all servers sent."""
        return sum(server.sent_bytes for server in self.servers) / self.observed

    @property
    def requests_per_second(self) -> float:
        """Requests that all servers answered."""
        return sum(server.requests for server in self.servers) / self.observed

    def to_json(self) -> dict[str, Any]:
        """Return a document that :meth:`from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse :meth:`to_json`'s document; :class:`ConfigError` names the field that is wrong."""
        version = document.get("version") if isinstance(document, Mapping) else None
        if version != OBSERVATION_VERSION:
            raise ConfigError(
                f"observation: version is {version}, this hapi reads {OBSERVATION_VERSION}; observe anew"
            )
        found = cast(Self, read_strictly(cls, document, "observation"))
        if found.observed <= 0:
            raise ConfigError("observation: observed must be above 0 seconds")
        return found

    def save(self, path: str) -> None:
        """Write it as JSON, whole or not at all; :class:`UsageError` when that fails."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n", "--out")

    @classmethod
    def load(cls, path: str) -> Self:
        """Read a saved one; :class:`UsageError` or :class:`ConfigError` in one line."""
        document = load_document(path, MAX_PROFILE_BYTES, "make it with 'hapi simulate observe'")
        try:
            return cls.from_json(document)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def lines(self) -> list[str]:
        """Return it for a person."""
        first = (
            f"{len(self.servers)} servers over {self.observed:.1f} s: {self.requests_per_second:.2f} requests/s, "
            f"{self.bytes_per_second / 1e6:.2f} MB/s, {self.tenants} tenants, split "
            f"{', '.join(map(str, self.splits)) or 'unknown'}"
        )
        each = (
            f"{server.url}: {server.requests} requests, {server.shed} sent away, {server.running:.1f} of "
            f"{server.slots} slots busy, {server.queued:.1f} queued, a wait of {server.expected_wait:.2f} s to expect"
            for server in self.servers
        )
        return [first, *each]


def reading_of(status: Any) -> dict[str, Any]:
    """Return the part of a server's status that an observation needs; BadRequestError for what is none."""
    try:
        if max(len(status["tenants"]), len(status["running"])) > _MOST_LISTED:
            raise ValueError("more than a server tells")
        return {name: status[name] for name in ("server", "queue", "tenants", "running")}
    except (KeyError, TypeError, ValueError) as error:
        raise _another_form(error) from None


def _another_form(error: Exception) -> BadRequestError:
    return BadRequestError(f"a status has another form than agreed ({error!r}); is it a hapi-server?")


def observation_of(
    statuses: Mapping[str, Sequence[Mapping[str, Any]]], seconds: float, profile: Profile, job: Job
) -> Observation:
    """Return what servers' status documents tell together.

    Args:
        statuses: readings of each server's documents, by its URL, the first and the last ``seconds`` apart.
        seconds: between them.
        profile: of a trainer.
        job: of the same trainer.

    Raises:
        BadRequestError: a document is of another form, or of several processes.
    """
    for url, documents in statuses.items():
        if len({document.get("server") for document in documents}) > 1:
            raise BadRequestError(
                f"{url}: its counts are of several processes, as it was started anew or is a balancer; observe each "
                "server itself, for a while in which it runs"
            )
    try:
        running = [r for documents in statuses.values() for d in documents for r in d["running"]]
        seen = Counter(int(request["split"]) for request in running)
        served = {
            tenant["name"]
            for documents in statuses.values()
            for tenant in documents[-1]["tenants"]
            if tenant["served"] > _served_before(documents[0], tenant["name"])
        }
        return Observation(
            observed=seconds,
            tenants=len(served),
            splits=tuple(split for split, _ in seen.most_common()),
            request_samples=statistics.fmean(float(r["total"]) for r in running) if running else 0.0,
            servers=tuple(_server(url, documents) for url, documents in statuses.items()),
            profile=profile,
            job=job,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise _another_form(error) from None


def _served_before(document: Mapping[str, Any], name: str) -> int:
    return next((int(t["served"]) for t in document["tenants"] if t["name"] == name), 0)


def _server(url: str, documents: Sequence[Mapping[str, Any]]) -> ObservedServer:
    first, last = documents[0], documents[-1]

    def grown(count: Any) -> float:
        """Return how much a sum over the tenants has grown."""
        after, before = (sum(float(count(t)) for t in d["tenants"]) for d in (last, first))
        return max(0.0, after - before)

    def mean(value: Any) -> float:
        """Return the mean over the documents."""
        return statistics.fmean(float(value(d)) for d in documents)

    return ObservedServer(
        url=url,
        slots=int(last["queue"]["slots"]),
        max_queued=int(last["queue"]["max_queued"]),
        requests=round(grown(lambda t: t["served"])),
        shed=round(grown(lambda t: sum(t["shed"].values()))),
        sent_bytes=round(grown(lambda t: t["sent_bytes"])),
        cost_seconds=grown(lambda t: t["cost_seconds"]),
        running=mean(lambda d: d["queue"]["running"]),
        queued=mean(lambda d: d["queue"]["queued"]),
        expected_wait=mean(
            lambda d: (
                statistics.fmean(float(t["expected_wait"]) for t in d["tenants"]) if d["tenants"] else 0.0
            )
        ),
    )


def load_recorded(path: str) -> tuple[Profile, Job]:
    """Return the profile and the job in a file: an observation, a saved profile, or the report of a run.

    Raises:
        UsageError: the file cannot be read.
        ConfigError: it is none of these.
    """
    document = load_document(
        path, MAX_PROFILE_BYTES, "make it with 'hapi simulate observe' or --save-profile"
    )
    if isinstance(document, Mapping) and "observed" in document:
        found = Observation.load(path)
        return found.profile, found.job
    return Profile.load(path), Job.load(path) or Job()
