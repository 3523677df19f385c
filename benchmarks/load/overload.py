"""``benchmarks overload``: what is left of a server that is asked for ten times what it can do.

A server process on one half of the cores, all its clients in one process on the other, no link between them. First an
idle server answers the light tenant alone, then as many clients as saturate it (the peak), then 50 clients of six
tenants ask for ten times the peak, in two ways: as ``hapi-train`` does, and without minding what the server says.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.overload_figures import Phase, lines_of, percentile, returns_of, shares, verdicts
from benchmarks.testbed.bed import Cores
from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.photos import make_store
from benchmarks.testbed.tiers import START_SECONDS, environment, last_line, start_server_process
from hapi.data.dataset import find_dataset
from hapi.errors import TransportError, UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.prefix import zoo_reference
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

WEIGHTS: Mapping[str, float] = {"one": 1, "another": 1, "third": 1, "fourth": 1, "double": 2, "triple": 3}
"""The tenants that ask for too much."""
LIGHT = "light"
SATURATING = (2, 4, 8, 16)
"""Requests at a time, among which the peak is looked for."""
WATCH_SECONDS = 0.25
"""Seconds between two looks at the server's memory."""


@dataclass(frozen=True, kw_only=True)
class OverloadSettings:
    """Load to produce, and its duration."""

    seconds: float = 120.0
    """Seconds of each overloaded phase."""
    alone_seconds: float = 40.0
    peak_seconds: float = 15.0
    """Seconds for each number of requests at a time."""
    skipped: float = 5.0
    """Seconds at the start of a phase that do not count."""
    times: float = 10.0
    """Load as a multiple of the peak."""
    clients: int = 50
    in_flight: int = 4
    """Requests under way of a patient client, as of ``hapi-train``."""
    model: str = "resnet18"
    image_size: int = 64
    request_size: int = 32
    light_size: int = 4
    """Samples of the light tenant's requests."""
    light_every: float = 1.0
    """Seconds between them."""
    samples: int = 256
    """Samples of the dataset."""


QUICK = OverloadSettings(seconds=20.0, alone_seconds=8.0, peak_seconds=7.0, skipped=2.0, light_every=0.4)


@dataclass(frozen=True, kw_only=True)
class Overload:
    """All phases of one run."""

    settings: OverloadSettings
    conditions: dict[str, Any]
    alone: Phase
    """The light tenant on an idle server."""
    single: Phase
    """The others' requests one by one on an idle server."""
    saturated: dict[int, Phase]
    """Rates by requests at a time."""
    loaded: dict[str, Phase]
    """Phases by the clients' way: patient, insistent."""

    @property
    def peak(self) -> float:
        """Samples per second at best."""
        return max(phase.goodput() for phase in self.saturated.values())

    @property
    def request_seconds(self) -> float:
        """Median seconds of one of the heavy tenants' requests on an idle server."""
        return percentile(self.single.waits("one"), 0.5)

    def figures(self, way: str) -> dict[str, Any]:
        """Figures of one overloaded phase."""
        phase, best = self.loaded[way], max(self.saturated.values(), key=Phase.goodput)
        found = returns_of(phase)
        light = phase.waits(LIGHT)
        first, last = phase.memory()
        return {
            "tries_over_peak": phase.tries() * self.settings.request_size / self.peak,
            "goodput": phase.goodput(),
            "per_processor_second": phase.per_processor_second(),
            "processor_over_peak": phase.per_processor_second() / best.per_processor_second(),
            "processor": phase.processor / phase.seconds,
            "resident_first": first,
            "resident_last": last,
            "light_p50": percentile(light, 0.5) if light else None,
            "light_p95": percentile(light, 0.95) if light else None,
            "light_sent_away": phase.sent_away()[LIGHT],
            "shares": shares(phase, WEIGHTS),
            "sent_away": sum(phase.sent_away().values()),
            "returns": None if found is None else asdict(found),
            "other": phase.seen["other"],
            "not_tried": phase.seen["not_tried"],
            "goals": verdicts(
                self.peak, self.alone.waits(LIGHT), self.request_seconds, phase, LIGHT, WEIGHTS
            ),
        }

    def to_json(self) -> dict[str, Any]:
        """The figures and all that they were made from, but for the single answers."""
        return {
            "benchmark": "overload",
            "conditions": self.conditions,
            "settings": asdict(self.settings),
            "peak": self.peak,
            "saturated": {str(count): phase.goodput() for count, phase in self.saturated.items()},
            "request_seconds": self.request_seconds,
            "alone": {str(p): percentile(self.alone.waits(LIGHT), p / 100) for p in (50, 95)},
            "loaded": {way: self.figures(way) for way in self.loaded},
            "resident": {way: list(phase.resident) for way, phase in self.loaded.items()},
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        size, alone = self.settings.request_size, self.alone.waits(LIGHT)
        lines = [
            f"peak: {self.peak:.1f} samples/s, "
            + ", ".join(f"{phase.goodput():.1f} with {n} at a time" for n, phase in self.saturated.items()),
            (
                f"idle server: one request of {size} samples {self.request_seconds:.3f} s, the light tenant's of "
                f"{self.settings.light_size} p50 {percentile(alone, 0.5):.3f} s, p95 {percentile(alone, 0.95):.3f} s"
            ),
        ]
        for way in self.loaded:
            lines += ["", *lines_of(way, self.figures(way), self.settings.seconds)]
        return lines


def measure_overload(settings: OverloadSettings, tell: Callable[[str], None]) -> Overload:
    """Measure all phases; ``tell`` is given lines about the progress."""
    if settings.seconds <= settings.skipped or settings.peak_seconds <= settings.skipped:
        raise UsageError(f"--seconds: expected more than the {settings.skipped:g} s that do not count")
    Cores.split_machine()  # says what is missing before anything is made
    with (
        LooseBed("its clients are not limited") as bed,
        tempfile.TemporaryDirectory(prefix="hapi-overload-") as folder,
    ):
        bench = _Bench(bed, Path(folder), settings)
        found = {**conditions(), "server_and_clients": "each on one half of the cores, over the loopback"}
        tell("an idle server: the light tenant, and one request at a time")
        bench.warm_up()
        alone = bench.phase("patient", 0, 1, settings.alone_seconds, light=True)
        single = bench.phase("patient", 1, 1, settings.peak_seconds)
        saturated = {}
        for count in SATURATING:
            saturated[count] = bench.phase("patient", count, 1, settings.peak_seconds)
            tell(f"{count} at a time: {saturated[count].goodput():.1f} samples/s")
        peak = max(phase.goodput() for phase in saturated.values())
        rate = settings.times * peak / settings.request_size
        loaded = {}
        for way in ("patient", "insistent"):
            tell(f"{settings.clients} {way} clients for {settings.seconds:g} s")
            loaded[way] = bench.phase(
                way, settings.clients, settings.in_flight, settings.seconds, light=True, rate=rate
            )
        return Overload(
            settings=settings,
            conditions=found,
            alone=alone,
            single=single,
            saturated=saturated,
            loaded=loaded,
        )


class _Bench:
    """The server and the process of the clients."""

    def __init__(self, bed: LooseBed, folder: Path, settings: OverloadSettings) -> None:
        self.settings = settings
        self._tokens = {name: secrets.token_hex(16) for name in (*WEIGHTS, LIGHT)}
        store = make_store(folder, settings.samples, settings.image_size, ("images",))
        tenants = folder / "tenants.yaml"
        tenants.write_text(
            "".join(
                f"{name}: {{token: {token}, weight: {WEIGHTS.get(name, 1)}}}\n"
                for name, token in self._tokens.items()
            )
        )
        token = secrets.token_hex(16)
        self._server, self._url = start_server_process(bed, store, token, folder, ("--tenants", str(tenants)))
        self._document = request_document(store, settings.model, settings.image_size)
        self._log = folder / "load.log"
        with self._log.open("wb") as stderr:
            self._load = bed.start(
                "client",
                [sys.executable, "-m", "benchmarks.load.overload_load"],
                env=environment(token),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._phases = 0

    def phase(
        self,
        way: str,
        clients: int,
        in_flight: int,
        seconds: float,
        *,
        light: bool = False,
        rate: float = 0.0,
    ) -> Phase:
        """Let the clients ask like this for ``seconds``."""
        light_too = self._light() if light else None
        before = _processor_seconds(self._server.pid)
        seen, resident = self._watched(self._command(way, clients, in_flight, seconds, light_too, rate))
        used = _processor_seconds(self._server.pid) - before
        if not seen["answers"]:
            raise TransportError(f"nothing was answered: {seen['other'] or 'all was sent away'}")
        skipped = min(self.settings.skipped, seconds / 4)
        return Phase(seconds=seconds, skipped=skipped, seen=seen, resident=resident, processor=used)

    def warm_up(self) -> None:
        """Ask until the layers are loaded and something was answered."""
        deadline = time.monotonic() + START_SECONDS
        while not self._call(self._command("patient", 1, 1, 1.0, self._light(), 0.0))["answers"]:
            if time.monotonic() > deadline:
                raise TransportError(f"the server answered nothing in {START_SECONDS:g} s")

    def _command(
        self,
        way: str,
        clients: int,
        in_flight: int,
        seconds: float,
        light: dict[str, Any] | None,
        rate: float,
    ) -> dict[str, Any]:
        """Command for the clients' process, see :mod:`benchmarks.load.overload_load`."""
        self._phases += 1
        return {
            "url": self._url,
            "document": self._document,
            "count": self.settings.samples,
            "seconds": seconds,
            "seed": self._phases,
            "clients": [(name, self._tokens[name]) for name in (list(WEIGHTS) * clients)[:clients]],
            "samples": self.settings.request_size,
            "way": way,
            "in_flight": in_flight,
            "rate": rate,
            "light": light,
        }

    def _light(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "tenant": LIGHT,
            "token": self._tokens[LIGHT],
            "samples": settings.light_size,
            "every": settings.light_every,
        }

    def _watched(self, command: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[float, int]]]:
        """Observations of the clients, and the server's resident bytes meanwhile."""
        began, over, resident = time.monotonic(), threading.Event(), list[tuple[float, int]]()

        def watch() -> None:
            while not over.wait(WATCH_SECONDS):
                resident.append((time.monotonic() - began, _resident_bytes(self._server.pid)))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            return self._call(command), resident
        finally:
            over.set()
            watching.join()

    def _call(self, command: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._load.stdin, self._load.stdout
        if stdin is None or stdout is None:
            raise TransportError("the benchmark's clients have no pipes; this is a defect of hapi")
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise TransportError(f"the benchmark's clients ended: {last_line(self._log.read_text())}")
        seen: dict[str, Any] = json.loads(line)
        return seen


def request_document(store: Path, architecture: str, side: int) -> dict[str, Any]:
    """Return a request at a model's freeze, without its ids, for the store's images as inputs of ``side`` pixels."""
    spec = ModelSpec(architecture=architecture, weights="random:0", input_shape=(3, side, side))
    model = build(spec)
    freeze = model.default_freeze
    if not freeze:
        raise UsageError(f"--model {architecture}: has no usual freeze; choose one of the paper's")
    return {
        "dataset": find_dataset(open_store(str(store)), "images").reference.to_json(),
        "model": zoo_reference(spec, model, freeze).to_json(),
        "split": freeze,
        "split_name": model.layers[freeze - 1].name,
        "transform": TransformSpec.for_image_size(side).to_json(),
    }


def _resident_bytes(pid: int) -> int:
    """Bytes of a process that lie in memory; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _processor_seconds(pid: int) -> float:
    """Seconds of the processors that a process has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
