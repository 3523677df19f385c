"""Runs of the benchmark ``models``: models are written, loaded by fresh processes, and removed again.

All cells that use the same files are measured together, so that no more lies on the disk than they need. A cold load
follows a look at the page cache (``mincore``) that shows the files to be gone from it, a warm one a look that shows
them to be there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models.clients import ModelClient, why_missing
from benchmarks.models.pages import MOST_RESIDENT, make_cold, make_warm, resident
from benchmarks.models.program import Task
from benchmarks.models.serving import ModelSites
from benchmarks.models.settings import COLD, GOALS, LOCAL, STORE, ModelCell, ModelsSettings, way_of
from benchmarks.models.shapes import shape_of
from benchmarks.models.sites import Site
from benchmarks.testbed.cells import Results
from benchmarks.testbed.conditions import rotated
from benchmarks.testbed.loose import LooseBed
from hapi.errors import HapiError, UsageError
from hapi.units import format_duration

Tell = Callable[[str], None]
Rounds = list[list[dict[str, Any]]]
"""Answers of all clients, round by round."""
_MEMORY = 3.2
"""Bytes of memory for each byte of a model and client: the model, a loader's copy, and the page cache."""


def measure(
    bed: LooseBed,
    groups: Sequence[Sequence[ModelCell]],
    settings: ModelsSettings,
    results: Results,
    tell: Tell,
) -> None:
    """Measure what ``results`` does not hold of ``groups``.

    Args:
        bed: where clients and servers run.
        groups: cells by the files that they share.
        settings: of the measurement.
        results: file of records; each cell is added as it ends.
        tell: gets a line after each cell.
    """
    done = {record["cell"] for record in results.records if record["kind"] == "cell"}
    groups = [group for group in groups if any(cell.key not in done for cell in group)]
    missing = _missing(groups, settings, results, tell)
    left = [[c for c in group if c.key not in done and c.way not in missing] for group in groups]
    total = sum(map(len, left))
    tell(f"{total} cells to measure")
    if not total:
        return
    with ExitStack() as stack:
        stack.enter_context(bed)
        made = tempfile.TemporaryDirectory(prefix="hapi-models-", dir=settings.folder)
        folder = Path(stack.enter_context(made))
        places = stack.enter_context(ModelSites(bed, folder))
        bench = _Bench(bed, places, folder, settings, results, tell)
        began, count = time.monotonic(), 0
        for cells in filter(None, left):
            bench.measure(cells)
            count += len(cells)
            needed = (time.monotonic() - began) / count * (total - count)
            tell(f"{count} of {total} cells, about {format_duration(needed)} left")


def _missing(
    groups: Sequence[Sequence[ModelCell]], settings: ModelsSettings, results: Results, tell: Tell
) -> set[str]:
    """Names of ways that are not installed here; they are recorded."""
    found = set()
    for name in dict.fromkeys(cell.way for group in groups for cell in group):
        why = why_missing(way_of(name), settings.peers)
        if why is not None:
            found.add(name)
            results.add({"kind": "missing", "way": name, "why": why})
            tell(f"{way_of(name).title} left out: {why}")
    return found


@dataclass
class _Group:
    """Cells that share files, and where these are."""

    cells: Sequence[ModelCell]
    folder: Path
    sites: dict[str, Site] = field(default_factory=dict)
    """By the way that wrote, where that succeeded."""
    made: list[Site] = field(default_factory=list)
    """All that may hold something."""

    @property
    def first(self) -> ModelCell:
        return self.cells[0]

    def site(self, cell: ModelCell) -> Site:
        return self.sites[way_of(cell.way).written_by]

    def sums(self, writer: str, client: int) -> str:
        return str(self.folder / f"{writer}-{client}.json")


class _Bench:
    """Groups of cells, one after the other."""

    def __init__(
        self,
        bed: LooseBed,
        places: ModelSites,
        folder: Path,
        settings: ModelsSettings,
        results: Results,
        tell: Tell,
    ) -> None:
        self._bed, self._places, self._folder = bed, places, folder
        self._settings, self._results, self._tell = settings, results, tell

    def measure(self, cells: Sequence[ModelCell]) -> None:
        """Measure cells of one model, place and number of clients."""
        group = _Group(cells, self._folder / secrets.token_hex(4))
        group.folder.mkdir()
        try:
            self._check_room(cells)
            for writer in dict.fromkeys(way_of(cell.way).written_by for cell in cells):
                self._write(group, writer)
            loads = [
                cell for cell in cells if cell.part != STORE and way_of(cell.way).written_by in group.sites
            ]
            loads.sort(
                key=lambda cell: cell.pages == COLD
            )  # what these drop would be read anew for each warm one
            with ExitStack() as stack:
                for writer in group.sites:
                    site = stack.enter_context(self._places.served(group.sites[writer], writer))
                    group.sites[writer] = site
                by_turns = [loads] if group.first.group == GOALS else [[cell] for cell in loads]
                for together in filter(None, by_turns):
                    self._loads(group, together)
        except (HapiError, OSError) as error:
            for cell in cells:
                self._fail(cell, error)
        finally:
            for site in group.made:
                self._places.remove(site)
            shutil.rmtree(group.folder, ignore_errors=True)

    def _check_room(self, cells: Sequence[ModelCell]) -> None:
        """:class:`UsageError` where the models do not fit the memory or the disk."""
        nbytes = shape_of(cells[0].shape).nbytes * cells[0].clients
        alive = len(cells) if cells[0].group == GOALS else 1
        needed = int(nbytes * (_MEMORY + alive - 1))
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + _cached_bytes()
        if needed > free:
            raise UsageError(f"needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
        writers = len({way_of(cell.way).written_by for cell in cells})
        room = shutil.disk_usage(self._folder).free
        if nbytes * (writers + 0.2) > room:
            raise UsageError(f"needs {nbytes * writers / 1e9:.0f} GB of disk, {room / 1e9:.0f} are free")

    def _write(self, group: _Group, writer: str) -> None:
        """Write the models of all clients, several times if that is measured."""
        first = group.first
        cell = next((c for c in group.cells if (c.way, c.part) == (writer, STORE)), None)
        try:
            site = self._places.site(first.place, group.folder / writer)
        except HapiError as error:
            self._fail_written(group, writer, error)
            return
        group.made.append(site)
        writing = ModelCell(
            shape=first.shape, way=writer, part=STORE, place=first.place, clients=first.clients
        )
        rounds: Rounds = []
        try:
            with self._clients(group, writing, site) as clients:
                ends = self._deadline([writing])
                for number in range(1 if cell is None else self._settings.rounds + 1):
                    if number > 1 and time.monotonic() > ends:
                        break
                    if number:
                        self._places.remove(site)
                    rounds.append(_all(clients, store=True))
            group.sites[writer] = site
            if cell is not None:
                self._record(cell, rounds, {"bytes": shape_of(cell.shape).nbytes})
        except (HapiError, OSError) as error:
            self._fail_written(group, writer, error)

    def _loads(self, group: _Group, cells: Sequence[ModelCell]) -> None:
        """Measure loads, by turns if there are several."""
        found: dict[str, Rounds] = {cell.key: [] for cell in cells}
        in_memory: dict[str, list[float]] = {cell.key: [] for cell in cells}
        by_key = {cell.key: cell for cell in cells}
        with ExitStack() as stack:
            clients: dict[str, list[ModelClient]] = {}
            for cell in cells:
                try:
                    clients[cell.key] = stack.enter_context(self._clients(group, cell, group.site(cell)))
                except (HapiError, OSError) as error:
                    self._fail(cell, error)
            ends = self._deadline(cells)
            for number in range(self._settings.rounds + 1):
                if number > 1 and time.monotonic() > ends:
                    break
                for key in rotated(tuple(clients), number) if clients else ():
                    try:
                        in_memory[key].append(_cached_part(by_key[key], group.site(by_key[key])))
                        found[key].append(_all(clients[key], check=number == 0))
                    except (HapiError, OSError) as error:
                        self._fail(by_key[key], error)
                        del clients[key]
        for key in clients:
            held = {"resident": in_memory[key][1:]} if by_key[key].place == LOCAL else {}
            self._record(by_key[key], found[key], {**_loaded(found[key]), **held})

    def _deadline(self, cells: Sequence[ModelCell]) -> float:
        """Monotonic time after which no further round of ``cells`` begins."""
        return time.monotonic() + self._settings.cell_time * len(cells)

    @contextlib.contextmanager
    def _clients(self, group: _Group, cell: ModelCell, site: Site) -> Iterator[list[ModelClient]]:
        """The cell's clients, all ready."""
        way, clients = way_of(cell.way), []
        with ExitStack() as stack:
            for number in range(cell.clients):
                # Everyone loads what another one has stored.
                model = number if cell.part == STORE else (number + 1) % cell.clients
                task = Task(
                    shape=cell.shape, way=cell.way, part=cell.part, site=vars(site), name=f"m{model}", seed=model,
                    sums=group.sums(way.written_by, model),
                )  # fmt: skip
                log = group.folder / f"client-{number}.log"
                client = ModelClient(self._bed, way, task, self._settings.peers, self._settings.limit, log)
                stack.callback(client.stop)
                clients.append(client)
            for client in clients:
                client.await_ready()
            yield clients

    def _record(self, cell: ModelCell, rounds: Rounds, found: dict[str, Any]) -> None:
        """Add a cell's record; the first round is not among its seconds."""
        seconds = [statistics.mean(answer["seconds"] for answer in answers) for answers in rounds]
        slowest = [max(answer["seconds"] for answer in answers) for answers in rounds]
        self._results.add(
            {
                "kind": "cell", "cell": cell.key, **cell.to_json(), "seconds": seconds[1:], "slowest": slowest[1:],
                "first": seconds[0], **found,
            }
        )  # fmt: skip
        middle = statistics.median(seconds[1:])
        self._tell(f"{cell.text}: {middle:.4g} s, {found['bytes'] / middle / 1e9:.2f} GB/s")

    def _fail_written(self, group: _Group, writer: str, error: Exception) -> None:
        """Record the failure of all cells that use the files of ``writer``."""
        for cell in group.cells:
            if way_of(cell.way).written_by == writer:
                self._fail(cell, error)

    def _fail(self, cell: ModelCell, error: Exception) -> None:
        self._results.add({"kind": "failed", "cell": cell.key, "why": str(error)})
        self._tell(f"{cell.text}: failed: {error}")


def _loaded(rounds: Rounds) -> dict[str, Any]:
    """Bytes, and seconds of stages, of the loads of one cell: medians over the rounds that count."""
    answers = [answer for round_answers in rounds[1:] for answer in round_answers]
    found: dict[str, Any] = {"bytes": answers[0]["needed"]}
    for what in ("moved", "stages"):
        found[what] = {
            name: statistics.median(answer[what][name] for answer in answers)
            for name in answers[0].get(what, {})
        }
    return found


def _all(clients: Sequence[ModelClient], **step: Any) -> list[dict[str, Any]]:
    """The answers of all clients to a step that they begin at once."""
    for client in clients:
        client.begin(**step)
    return [client.answer() for client in clients]


def _cached_part(cell: ModelCell, site: Site) -> float:
    """Bring the page cache into the state of the cell; return the part of the files that is in it."""
    if cell.place != LOCAL:
        return 0.0
    files = [path for path in Path(site.folder).rglob("*") if path.is_file()]
    if cell.pages == COLD:
        return make_cold(files)
    if resident(files) < 1 - MOST_RESIDENT:
        make_warm(files)
    return resident(files)


def _cached_bytes() -> int:
    """Bytes of the page cache, which are given up when memory is needed."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("Cached:"):
            return int(line.split()[1]) * 1024
    return 0
