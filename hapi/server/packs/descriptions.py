"""Schemas of the answers that describe pushed models."""

from __future__ import annotations

from hapi.models.zoo.build import ModelSpec
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import ModelSummary
from hapi.wire.schemas import COUNT, DIGEST, NAME, TEXT, Schema, extended, listed, of_class, of_type, record


def model_list() -> Schema:
    """Return the schema of the list of models."""
    return record({"models": listed(of_class(ModelSummary, {"name": NAME}))})


def model() -> Schema:
    """Return the schema of one version of a model, without its structure."""
    known = {
        "name": NAME,
        "parent": of_type(str | None),
        "spec": of_type(ModelSpec | None),
        "digests": listed(DIGEST, 1),
        "card": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    }
    described = of_class(
        ModelManifest, {**known, "contents": listed(DIGEST, 1)}, leave_out=("structure", "tensors")
    )
    more = {
        "format": COUNT,
        "architecture": of_type(str | None),
        "structure": DIGEST,
        "digest": DIGEST,
        "bytes": COUNT,
        "packs": listed(DIGEST),
        "tensors": listed(_tuple(DIGEST, DIGEST, COUNT, COUNT)),
        "checksum": TEXT,
    }
    return extended(described, more)


def structure() -> Schema:
    """Return the schema of a structure."""
    sides = listed(COUNT)
    layer = _tuple(TEXT, sides, listed(TEXT))
    form = _tuple(TEXT, TEXT, sides)
    graph = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    return record(
        {
            "format": COUNT,
            "layers": listed(layer),
            "tensors": listed(form),
            "identities": listed(DIGEST, 1),
            "graph": graph,
        }
    )


def _tuple(*items: Schema) -> Schema:
    """The schema of an array of just these; readers of schemas that know no positions get what any item may be."""
    return listed({"anyOf": list(items)}, len(items), len(items))
