"""Encodings of features on the wire: the one that the user named, or what measurement finds worth it.

``auto`` encodes nothing until there is a plan, which knows the link, what each side does for a sample and what the
exact codecs did on samples of each cut. From the second epoch on they are tried on features of each split that batches
come at, and the one with the shortest pipeline is asked for.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.settings import WireCodec
from hapi.codecs.choose import CodecFigures, Route, choose
from hapi.codecs.measure import measure
from hapi.codecs.names import CODECS, EXACT, LOSSY, NONE, Codec
from hapi.errors import BadRequestError
from hapi.models.tensors import tensor_bytes
from hapi.profiler.reuse.choice import Crossing
from hapi.profiler.reuse.facts import CutCodecs
from hapi.wire import messages
from hapi.wire.frames import codec_fits

log = logging.getLogger("hapi.client")

PARTS, PART_BYTES = 8, 256 << 10
"""Parts of a batch's features on which codecs are measured, and their bytes."""
ENOUGH_BYTES = 4 << 20
"""Bytes of a pass that must have come to tell the link."""
FASTEST_LINK = 2e9
"""Bytes per second from which no codec is tried: none encodes so fast."""


class WireCodecs:
    """Codecs of a session's requests. Thread-safe."""

    def __init__(self, wanted: WireCodec, tried: TriedCodecs | None = None) -> None:
        """Encode as ``wanted`` says: the setting ``wire_codec``. ``tried`` tells of splits that were not met yet."""
        self._wanted, self._tried = wanted, tried or TriedCodecs()
        self._named: Codec | None = next((codec for codec in CODECS if codec == wanted), None)
        self._lock = threading.Lock()
        self._older: set[str] = set()
        """Servers that know of no codecs."""
        self._figures: dict[int, tuple[CodecFigures, ...]] = {}
        """Measured on features of each split."""
        self._chosen: dict[int, Codec] = {}
        self._open = False
        self._considered: set[int] = set()
        """Splits whose codec was chosen in this pass."""

    def begin(self, epoch: int) -> None:
        """Begin a pass of ``epoch``."""
        self._open = self._named != NONE and (self._named is not None or epoch > 0)
        self._considered = set()

    def encoded(self, job: ExtractionJob, planned: Crossing | None = None) -> ExtractionJob:
        """Return ``job`` with the codec for its split: that of the ``planned`` crossing where none was chosen yet."""
        wire = None if planned is None else planned.wire_of(job.split)
        if wire is not None and self._named is None:
            name = next(codec for codec in CODECS if codec == wire.name)
            if name != NONE:
                self._chosen.setdefault(job.split, name)
        codec = self._chosen.get(job.split, NONE) if self._named is None else self._named
        if not job.split or codec == NONE or not codec_fits(codec, _name(job.dtype)):
            return job
        return replace(job, codec=codec)

    def understood(self, job: ExtractionJob, server: str) -> ExtractionJob:
        """Return ``job`` as ``server`` understands it: raw where it knows of no codecs."""
        return replace(job, codec=NONE) if job.codec != NONE and server in self._older else job

    def refused(self, job: ExtractionJob, server: str, error: BadRequestError) -> bool:
        """Return whether ``server`` refused ``job`` for its codec alone, and is to be asked for raw features."""
        if job.codec == NONE or f"unknown field {messages.CODEC!r}" not in str(error):
            return False
        with self._lock:
            if server not in self._older:
                self._older.add(server)
                log.warning("%s is of an older hapi, without --wire-codec: its features come raw", server)
        return True

    def consider(
        self,
        job: ExtractionJob,
        features: torch.Tensor,
        traffic: Traffic,
        samples: int,
        client_seconds: float,
    ) -> None:
        """Choose the codec for ``job``'s split, or measure the one that the user named; once in a pass.

        Args:
            job: of a batch that came.
            features: of that batch, [n, ...].
            traffic: the pass's so far, which tells the link and the servers' work.
            samples: those of the pass so far.
            client_seconds: this side's work on them.
        """
        split = job.split
        if not self._open or not split or split in self._considered or not samples:
            return
        if self._named is not None:
            self._considered.add(split)
            if codec_fits(self._named, _name(job.dtype)):
                self._measure(job, features, (self._named,))
            return
        link_rate = traffic.link.recent()
        if link_rate is None or traffic.bytes_received < ENOUGH_BYTES:
            return
        self._considered.add(split)
        if link_rate >= FASTEST_LINK:
            self._chosen.pop(split, None)
            return
        figures = self._measure(job, features, EXACT)
        computed, on = samples * job.sample_bytes(), self._chosen.get(split, NONE)
        # What the servers did in this pass has the encoding in it that is on.
        encoding = sum(1 / found.encode_rate for found in figures if found.name == on)
        route = Route(
            link_rate=link_rate,
            encoder_busy=max(0.0, traffic.server_seconds() / computed - encoding),
            decoder_busy=client_seconds / computed,
        )
        chosen = choose(figures, route).name
        self._chosen[split] = next(codec for codec in CODECS if codec == chosen)

    def _measure(
        self, job: ExtractionJob, features: torch.Tensor, names: Sequence[Codec]
    ) -> tuple[CodecFigures, ...]:
        """Return ratio and speeds of the codecs on features of ``job``'s split, measured when it is met first."""
        if job.split not in self._figures:
            parts = _parts(tensor_bytes(features))
            self._figures[job.split] = measure(parts, job.dtype.itemsize, names)
        return self._figures[job.split]

    @property
    def met_older(self) -> bool:
        """True once a server was met that knows of no codecs, whose features come raw."""
        return bool(self._older)

    def costs(self) -> tuple[CutCodecs, ...]:
        """Return the codec that features come in, with what was measured of it, by split; from any thread.

        The seconds of one that is on from the beginning are in what both sides' own work took.
        """
        found = []
        for split in sorted({*self._tried.cuts, *self._figures}):
            met = self._figures.get(split)
            figures = self._tried.at(split, self._wanted) if met is None else met
            if not figures:
                continue
            if self._named is not None:
                figures = tuple(replace(f, encode_rate=math.inf, decode_rate=math.inf) for f in figures)
            # A plan may choose at splits that no choice was made for.
            on = self._named or self._chosen.get(split, None if met is None else NONE)
            found.append(CutCodecs.measured(split, figures, on=on))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return what was asked for, for a run's report."""
        return {
            "wanted": self._wanted,
            "exact": self._wanted not in LOSSY,
            "chosen": {str(split): codec for split, codec in sorted(self._chosen.items())},
            "measured": {
                str(split): [asdict(f) for f in found] for split, found in sorted(self._figures.items())
            },
            "without": sorted(self._older),
        }


def _parts(raw: memoryview) -> list[memoryview]:
    """Parts of ``raw`` in even distances."""
    distance = max(PART_BYTES, len(raw) // PARTS // PART_BYTES * PART_BYTES)
    return [raw[start : start + PART_BYTES] for start in range(0, len(raw), distance)][:PARTS]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
