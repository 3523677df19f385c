"""Codecs that a run has measured, from its report, so that they can be planned with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hapi.codecs.choose import CodecFigures
from hapi.codecs.names import EXACT
from hapi.errors import ConfigError
from hapi.profiler.profile import MAX_PROFILE_BYTES
from hapi.profiler.reading import load_document, read_strictly
from hapi.profiler.reuse.facts import CutCodecs


class ReportedCodecs(NamedTuple):
    """Codecs by the layer on whose output they were measured."""

    kept: tuple[CutCodecs, ...] = ()
    """At rest."""
    wire: tuple[CutCodecs, ...] = ()
    """On the wire."""


def reported_codecs(path: str) -> ReportedCodecs:
    """Return the exact codecs that the run whose report is in ``path`` has measured; none where it is another file.

    Raises:
        UsageError: it cannot be read.
        ConfigError: it is no JSON, or its codecs are not of the form that a run writes.
    """
    document = load_document(path, MAX_PROFILE_BYTES, "give a report of hapi-train")
    if not isinstance(document, Mapping) or "epochs" not in document:
        return ReportedCodecs()
    try:
        cache, wire = document.get("cache", {}), document.get("wire_codec", {})
        kept = {int(one["cut"]): one["measured"] for one in cache.get("codecs", ())}
        sent = {int(split): measured for split, measured in wire.get("measured", {}).items()}
        return ReportedCodecs(_measured(kept), _measured(sent))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: codecs are not as a run reports them ({error})") from None


def _measured(by_layer: Mapping[int, Iterable[Any]]) -> tuple[CutCodecs, ...]:
    found = []
    for layer, documents in sorted(by_layer.items()):
        figures = [read_strictly(CodecFigures, document, f"codec at layer {layer}") for document in documents]
        exact = [one for one in figures if one.name in EXACT]
        if exact:
            found.append(CutCodecs.measured(layer, exact))
    return tuple(found)
