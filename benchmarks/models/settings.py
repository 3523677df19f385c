"""Settings of the benchmark ``models``: its ways of keeping a model, its cells, and the pages that show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.shapes import WHOLE, shape_of
from benchmarks.testbed.ways import way_called
from hapi.errors import UsageError

STORE = "store"
"""The part of a cell that writes."""
STAGES = "stages"
"""The part of a cell that does the low-level operations of a load one by one."""
LOCAL, HTTP, SWIFT = PLACES = ("local", "http", "swift")
WARM, COLD = PAGES = ("warm", "cold")
HAPI, ON_DEMAND, TORCH, SAFETENSORS = "hapi", "hapi-on-demand", "torch", "safetensors"
GOALS = "goals"
"""Name of the part that measures the goals alone."""
NEED_CUDA = "InstantTensor and the prefetch of safetensors 0.9 load to CUDA devices alone, and are left out"
_PREAD = "import safetensors; safetensors.PrefetchLoader"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of keeping a model."""

    name: str
    title: str
    """Name for people."""
    places: tuple[str, ...] = (LOCAL,)
    needs: str = ""
    """Statement that shows whether it is installed; empty for what Hapi depends on."""
    reads: str = ""
    """Way that writes what this one reads; empty for itself."""
    peer: bool = False
    """True: packages in the folders of other ways go before the installed ones."""
    reads_all: bool = False
    """Whether it reads the whole file for any part."""

    @property
    def written_by(self) -> str:
        """Return the name of the way that writes what this one reads."""
        return self.reads or self.name


WAYS = (
    Way(name=HAPI, title="Hapi", places=PLACES),
    Way(name=ON_DEMAND, title="Hapi, no staging pool", places=PLACES, reads=HAPI),
    Way(name=TORCH, title="torch.save/load", places=PLACES, reads_all=True),
    Way(name="torch-mmap", title="torch.load(mmap)", reads=TORCH),
    Way(name=SAFETENSORS, title="safetensors", needs="import safetensors.torch", places=PLACES),
    Way(name="safetensors-pread", title="safetensors 0.9, pread", needs=_PREAD, reads=SAFETENSORS, peer=True),
    Way(name="h5py", title="h5py", needs="import h5py", peer=True),
    Way(name="fastsafetensors", title="fastsafetensors", needs="import fastsafetensors", reads=SAFETENSORS, peer=True),
    Way(name="runai", title="Run:ai streamer", needs="import runai_model_streamer", reads=SAFETENSORS, peer=True),
)  # fmt: skip
"""All, in the order in which they are shown."""


def way_of(name: str) -> Way:
    """Return the way with this name; :class:`UsageError` for an unknown one."""
    return way_called(name, WAYS)


@dataclass(frozen=True, kw_only=True)
class ModelCell:
    """One measurement: a way that writes a model, or loads a part of it."""

    shape: str
    """Name of the model (:func:`benchmarks.models.shapes.shape_of`)."""
    way: str
    part: str
    """``store``, or what is loaded of the model."""
    place: str = LOCAL
    pages: str = WARM
    clients: int = 1
    group: str = ""
    """Name of a part whose cells are measured by turns; empty where each is measured alone."""

    @property
    def key(self) -> str:
        """Unlike that of any other cell."""
        names = (self.group, self.shape, self.place, self.way, self.part, self.pages, str(self.clients))
        return "/".join(name for name in names if name)

    @property
    def text(self) -> str:
        """The cell, for people."""
        clients = f", {self.clients} clients" if self.clients > 1 else ""
        what = "store" if self.part == STORE else f"load {self.part} {self.pages}"
        return f"{self.shape}, {self.place}, {way_of(self.way).title}, {what}{clients}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ModelCell:
        """Return the cell of a record."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Page:
    """One of DStore's figures."""

    number: int
    title: str
    shapes: tuple[str, ...]
    small: tuple[str, ...]
    """Models instead of these in a quick run."""
    parts: tuple[str, ...]
    places: tuple[str, ...] = (LOCAL,)
    clients: tuple[int, ...] = (1,)
    ways: tuple[str, ...] | None = None
    """None: all."""

    def models(self, quick: bool, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the names of its models; of ``chosen`` those that it has in either size."""
        if chosen is not None:
            return tuple(name for name in self.shapes + self.small if name in chosen)
        return self.small if quick else self.shapes


FEW_PARTS, MOST_IN_QUARTERS = (STORE, STAGES, "25%", "prefix", WHOLE), 2_000_000_000
"""Parts that are measured of larger models than so many bytes, and of ways that read the whole file for any part."""
MOST_OVER_SWIFT = 1_200_000_000
"""Bytes of the largest model that is put into Swift: its one node on the cores of the others measures itself."""
_QUARTERS = (STORE, "25%", "50%", "75%", WHOLE)
FIGURES = (
    Page(number=4, title="model size, 10 layers", shapes=("10x256MB", "10x1GB", "10x4GB"),
        small=("10x64MB", "10x256MB"), parts=_QUARTERS, places=PLACES),
    Page(number=5, title="number of layers", shapes=("100x1GB", "1000x1GB", "100x4GB", "1000x4GB"),
        small=("100x256MB", "1000x256MB"), parts=(*_QUARTERS, "25% spread")),
    Page(number=6, title="stages with and without the staging pool", shapes=("10x1GB",), small=("10x256MB",),
        parts=(WHOLE, STAGES), ways=(HAPI, ON_DEMAND)),
    Page(number=7, title="layer sizes that vary by 30 %", shapes=("100x4GB~30%",), small=("100x256MB~30%",),
        parts=_QUARTERS),
    Page(number=8, title="VGG19 and a classifier on BERT-large", shapes=("vgg19", "bert"), small=("vgg19",),
        parts=(STORE, "prefix", WHOLE), places=PLACES),
    Page(number=9, title="concurrent clients", shapes=("10x512MB",), small=("10x64MB",), parts=(STORE, WHOLE),
        places=PLACES, clients=(1, 2, 4, 8)),
)  # fmt: skip
"""DStore's Figures 4 to 9."""


def figure_of(number: int) -> Page:
    """Return the figure of this number; :class:`UsageError` for an unknown one."""
    for figure in FIGURES:
        if figure.number == number:
            return figure
    raise UsageError(f"figure {number}: expected {FIGURES[0].number} to {FIGURES[-1].number}")


def _check(flag: str, chosen: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise UsageError for a name that is none of ``known``."""
    for name in chosen or ():
        if name not in known:
            raise UsageError(f"{flag} {name}: expected one of {', '.join(sorted(known))}")


@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """Cells to measure, and how."""

    figures: tuple[int, ...] = tuple(figure.number for figure in FIGURES)
    ways: tuple[str, ...] = tuple(way.name for way in WAYS)
    places: tuple[str, ...] = PLACES
    clients: tuple[int, ...] | None = None
    """Numbers of clients; None for those of each figure."""
    shapes: tuple[str, ...] | None = None
    """Models of the figures, whole size or small; None for those that ``quick`` says."""
    loads: tuple[str, ...] | None = None
    """Parts that are loaded; None for those of each figure."""
    rounds: int = 3
    """Times that each cell is measured, after a first one that does not count."""
    quick: bool = False
    peers: tuple[Path, ...] = ()
    """Folders with packages of other ways."""
    folder: Path | None = None
    """Where models are written; None for the temporary folder."""
    limit: float = 300.0
    """Longest time of one measurement, in seconds."""
    cell_time: float = 120.0
    """Seconds after which a cell of which a round counts gets no more of them."""

    def cells(self) -> list[ModelCell]:
        """Return the cells of all figures, each once.

        Raises:
            UsageError: no figure has such a model, such a part or such cells.
        """
        shapes = {name for figure in FIGURES for name in figure.shapes + figure.small}
        _check("--model", self.shapes, shapes)
        _check("--load", self.loads, {part for figure in FIGURES for part in figure.parts} - {STORE, STAGES})
        found = [cell for number in self.figures for cell in self._of(figure_of(number))]
        if not found:
            raise UsageError(
                "no cell is left of DStore's figures: leave out one of --page, --model, --load, --way, --place"
            )
        return list(dict.fromkeys(found))

    def _of(self, figure: Page) -> list[ModelCell]:
        ways = [way_of(name) for name in self.ways if figure.ways is None or name in figure.ways]
        return [
            ModelCell(shape=shape, way=way.name, part=part, place=place, pages=pages, clients=clients)
            for shape in figure.models(self.quick, self.shapes)
            for place in figure.places
            if place in self.places and (place != SWIFT or shape_of(shape).nbytes <= MOST_OVER_SWIFT)
            for clients in (self.clients or figure.clients if len(figure.clients) > 1 else figure.clients)
            for way in ways
            if place in way.places
            for part in figure.parts
            if part in (STORE, STAGES) or self.loads is None or part in self.loads
            if part != STORE or (not way.reads and place != HTTP)
            if part != "prefix" or shape_of(shape).prefix_layers
            if part in FEW_PARTS or not (way.reads_all or shape_of(shape).nbytes > MOST_IN_QUARTERS)
            for pages in (PAGES if place == LOCAL and part not in (STORE, STAGES) else (WARM,))
        ]  # fmt: skip


def goal_groups() -> list[list[ModelCell]]:
    """Return the cells of the goals; those of one list are measured by turns."""

    def cell(shape: str, way: str, part: str, place: str = LOCAL, pages: str = WARM) -> ModelCell:
        return ModelCell(shape=shape, way=way, part=part, place=place, pages=pages, group=GOALS)

    compared = (SAFETENSORS, HAPI, ON_DEMAND)
    return [
        [cell("vgg19", way, WHOLE) for way in compared],
        [cell("vgg19", way, "prefix") for way in (TORCH, SAFETENSORS, HAPI, ON_DEMAND)],
        [cell("vgg19", way, "prefix", pages=COLD) for way in (TORCH, SAFETENSORS, HAPI, ON_DEMAND)],
        [cell("10x1GB", way, WHOLE) for way in compared],
        [cell("1000x1GB", way, WHOLE) for way in compared],
        [cell("vgg19", HAPI, part, place=HTTP) for part in ("prefix", WHOLE)],
        [cell("10x1GB", HAPI, WHOLE, place=HTTP)],
    ]


def groups_of(cells: Sequence[ModelCell]) -> list[list[ModelCell]]:
    """Return ``cells`` by what they share: files of one kind, of one model at one place, for so many clients."""
    found: dict[tuple[object, ...], list[ModelCell]] = {}
    for cell in cells:
        found.setdefault((cell.shape, cell.place, cell.clients, way_of(cell.way).written_by), []).append(cell)
    return list(found.values())
