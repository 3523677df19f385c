"""JSON Schemas (draft 2020-12) of the interface's documents, made from the classes that parse and write them.

A field that is added to a class appears in its schema by itself. Each bound is the parser's own constant.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hapi.wire import messages
from hapi.wire.frames import MAX_ID
from hapi.wire.references import (
    ARCHITECTURE_PATTERN,
    DIGEST_PATTERN,
    MAX_IMAGE_SIDE,
    MAX_SEED,
    MAX_SIDE,
    MODEL_PATTERN,
    NAME_PATTERN,
    WEIGHTS_PATTERN,
    Augmentation,
    DatasetReference,
    ModelReference,
    TransformSpec,
)
from hapi.wire.sequences import FULL, MOST_GROUP, MOST_PLACE, ChunkWindows
from hapi.wire.warm_up import WarmUpRequest

Schema = dict[str, Any]

_PLAIN: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


def whole(low: int, high: int) -> Schema:
    """Return the schema of an integer from ``low`` to ``high``."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """Return the schema of a number from ``low`` to ``high``."""
    return {"type": "number", "minimum": low, "maximum": high}


def text(pattern: re.Pattern[str], *, dots: bool = True) -> Schema:
    """Return the schema of a string that matches ``pattern`` wholly; if ``dots`` is False, without two dots
    in a row.
    """
    return {"type": "string", "pattern": ("^" if dots else r"^(?!.*\.\.)") + f"(?:{pattern.pattern})$"}


def listed(items: Schema, min_items: int = 0, max_items: int | None = None) -> Schema:
    """Return the schema of an array of ``min_items`` to ``max_items`` (None: any number of) ``items``."""
    bounds = {"minItems": min_items} if max_items is None else {"minItems": min_items, "maxItems": max_items}
    return {"type": "array", "items": items, **bounds}


def or_null(schema: Schema) -> Schema:
    """Return ``schema`` with null allowed."""
    return {"anyOf": [schema, {"type": "null"}]}


def extended(schema: Schema, properties: Mapping[str, Schema]) -> Schema:
    """Return the schema of an object with more properties, all of which must be there."""
    return {
        **schema,
        "properties": {**schema["properties"], **properties},
        "required": [*schema["required"], *properties],
    }


def record(
    properties: Mapping[str, Schema], optional: tuple[str, ...] = (), *, closed: bool = False
) -> Schema:
    """Return the schema of an object.

    Args:
        properties: schema of each property.
        optional: properties that may be absent.
        closed: refuse all other properties.
    """
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        **({"additionalProperties": False} if closed else {}),
    }


def of_class(
    cls: type[Any],
    known: Mapping[str, Schema] | None = None,
    *,
    closed: bool = False,
    optional: bool = False,
    leave_out: tuple[str, ...] = (),
) -> Schema:
    """Return the schema of a dataclass's JSON form, from the types of its fields.

    Args:
        cls: the dataclass; the first line of its docstring describes it.
        known: schemas of fields that say more than their type.
        closed: other fields than these are an error (in strictly parsed documents).
        optional: fields with a default may be left out (requests).
        leave_out: fields that are not in the JSON form.

    Raises:
        TypeError: a field in ``known`` or ``leave_out`` does not exist in the class, or a type has no JSON
            form.
    """
    known = known or {}
    found = {field.name: field for field in fields(cls)}
    if strangers := {*known, *leave_out} - set(found):
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(strangers))}")
    hints = get_type_hints(cls)
    schemas = {name: known.get(name) or of_type(hints[name]) for name in found if name not in leave_out}
    free = tuple(name for name in schemas if optional and _has_default(found[name]))
    return {"description": _first_line(cls), **record(schemas, free, closed=closed)}


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def of_type(hint: Any) -> Schema:
    """Return the schema of a type's JSON form; TypeError when it has none."""
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if is_dataclass(hint) and isinstance(hint, type):
        return of_class(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(one) for one in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return listed(of_type(arguments[0]))
    if origin is tuple:
        return listed(of_type(arguments[0]), len(arguments), len(arguments))
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": of_type(arguments[1])}
    raise TypeError(f"no JSON form of {hint}")


def _first_line(cls: type[Any]) -> str:
    """The first sentence of a class's docstring, without its markup."""
    line = (cls.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", lambda found: found[1] or found[2], line).split())


NAME = text(NAME_PATTERN, dots=False)
MODEL = text(MODEL_PATTERN, dots=False)
DIGEST = text(DIGEST_PATTERN)
TEXT, COUNT, SECONDS = of_type(str), {"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0}
SEED = whole(0, MAX_SEED)
GROUP = whole(1, MOST_GROUP)
IDS = listed(whole(0, MAX_ID), 1, messages.MAX_SAMPLES)
JOB: Schema = {"type": "string", "pattern": "^[A-Za-z0-9]*$", "maxLength": messages.MAX_JOB}
LAYER_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": messages.MAX_NAME}


def dataset_reference() -> Schema:
    """Return the schema of a dataset and version in a request."""
    return of_class(DatasetReference, {"name": NAME, "version": DIGEST}, closed=True)


def _model_reference() -> Schema:
    architecture = text(ARCHITECTURE_PATTERN, dots=False)
    known = {
        "name": architecture,
        "weights": text(WEIGHTS_PATTERN),
        "digest": DIGEST,
        "blocks": listed(text(ARCHITECTURE_PATTERN), 0, 1000),
        "input_shape": listed(whole(1, MAX_SIDE), 1, 4),
    }
    schema = of_class(ModelReference, known, closed=True, optional=True)
    pushed = {"properties": {"source": {"const": "store"}, "weights": {"const": "pushed"}, "name": MODEL}}
    built = {"properties": {"source": {"const": "zoo"}, "weights": {"not": {"const": "pushed"}}}}
    return {**schema, "oneOf": [pushed, built]}


def _augmentation() -> Schema:
    share = number(0.0, 1.0)
    known = {
        "scale": listed(number(1e-6, 1.0), 2, 2),
        "ratio": listed(number(0.1, 10.0), 2, 2),
        "padding": whole(0, MAX_IMAGE_SIDE),
        "flip": share,
        **{name: number(0.0, maximum) for name, maximum in Augmentation.JITTER.items()},
    }
    schema = of_class(Augmentation, known, closed=True, optional=True)
    together = {"scale": ["ratio"], "ratio": ["scale"]}
    apart = {"not": {"required": ["scale", "padding"]}}
    return {**schema, "minProperties": 1, "dependentRequired": together, **apart}


def transform(*, random: bool) -> Schema:
    """Return the schema of a transform; ``random`` allows a random one, with seed and epoch."""
    known = {
        "resize": whole(1, MAX_IMAGE_SIDE),
        "crop": whole(1, MAX_IMAGE_SIDE),
        "mean": listed(number(-1e3, 1e3), 3, 3),
        "std": listed(number(1e-6, 1e3), 3, 3),
    }
    fixed = of_class(TransformSpec, known, closed=True, leave_out=("augment", "draw"))
    if not random:
        return fixed
    drawn = record({**known, "augment": _augmentation(), "seed": SEED, "epoch": SEED}, closed=True)
    return {"anyOf": [fixed, drawn]}


def chunk_windows() -> Schema:
    """Return the schema of the chunk windows that ids come from."""
    return of_class(ChunkWindows, {"seed": SEED, "epoch": SEED, "group": GROUP, "window": GROUP}, closed=True)


def extract_request() -> Schema:
    """Return the schema of a request for features."""
    known = {
        "dataset": dataset_reference(),
        "model": _model_reference(),
        "split": whole(1, messages.MAX_SPLIT),
        "split_name": LAYER_NAME,
        "ids": IDS,
        "transform": or_null(transform(random=True)),
        "job": JOB,
        "windows": chunk_windows(),
    }
    return of_class(messages.ExtractRequest, known, closed=True, optional=True)


def warm_up_request() -> Schema:
    """Return the schema of a request that names layers ahead."""
    known = {"model": _model_reference(), "split": whole(1, messages.MAX_SPLIT), "split_name": LAYER_NAME}
    return of_class(WarmUpRequest, known, closed=True, optional=True)


def samples_request() -> Schema:
    """Return the schema of a request for stored bytes: of ids, or of a range of the dataset's sequence."""
    known = {"dataset": dataset_reference(), "job": JOB}
    by_ids = of_class(
        messages.SamplesRequest, {**known, "ids": IDS, "windows": chunk_windows()}, closed=True, optional=True
    )
    shuffle = {"anyOf": [{"const": FULL}, record({"group": GROUP, "window": GROUP}, closed=True)]}
    sequence = record({"seed": SEED, "epoch": SEED, "shuffle": shuffle}, closed=True)
    positions = {"start": whole(0, MOST_PLACE), "stop": whole(1, MOST_PLACE + 1)}
    by_range = record({**known, "sequence": sequence, **positions}, ("job",), closed=True)
    return {"anyOf": [by_ids, by_range]}


def tensors_request() -> Schema:
    """Return the schema of a request for tensors of a pushed model."""
    names = {**listed(LAYER_NAME, 1, messages.MAX_SAMPLES), "uniqueItems": True}
    return of_class(messages.TensorsRequest, {"name": MODEL, "digest": DIGEST, "names": names}, closed=True)


def dataset_description(layout: Schema) -> Schema:
    """Return the schema of a dataset's description, with ``layout`` as the schema of its samples' layout."""
    known = {
        "reference": dataset_reference(),
        "layout": layout,
        "transform": or_null(transform(random=False)),
        "group": GROUP,
        "window": GROUP,
    }
    return of_class(messages.DatasetDescription, known, optional=True)
