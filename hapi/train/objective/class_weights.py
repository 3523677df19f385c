"""Weights of classes: balanced by their samples, or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hapi.errors import UsageError
from hapi.paths import open_file
from hapi.text import class_name
from hapi.wire.documents import parse_document
from hapi.wire.labels import LabelKind

MAX_FILE_BYTES = 64 << 20
MAX_WEIGHT = 1e6
_FORM = 'expected JSON such as {"cat": 1.0, "dog": 2.5}, one number above 0, up to 1e6, for each class'


def weights_file(chosen: str) -> str | None:
    """Return the file that ``--class-weights`` names; None for none and balanced."""
    return None if chosen in ("none", "balanced") else chosen


def read_class_weights(path: str) -> dict[str, float]:
    """Return the weights in a JSON file, by the classes' names; whether they are the dataset's is checked later.

    Raises:
        UsageError: the file cannot be read, or is no object of numbers above 0, up to 1e6.
    """
    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        document = parse_document(content) if len(content) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UsageError(
            f"--class-weights {path}: cannot be read: {error.strerror or error}; give none, balanced or a JSON file"
        ) from None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not document:
        raise UsageError(f"--class-weights {path}: {_FORM}")
    for name, weight in document.items():
        if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
            raise UsageError(f"--class-weights {path}: class {name[:100]!r}: {_FORM}")
    return {name: float(weight) for name, weight in document.items()}


def in_order(given: Mapping[str, float], classes: Sequence[str], path: str) -> tuple[float, ...]:
    """Return the weights of ``classes``; :class:`UsageError` naming ``path`` when a class has none or is unknown."""
    given, known = {class_name(name): weight for name, weight in given.items()}, set(classes)
    strange = next((name for name in given if name not in known), None)
    absent = next((name for name in classes if name not in given), None)
    if strange is not None:
        raise UsageError(f"--class-weights {path}: the dataset has no class {strange[:100]!r}")
    if absent is not None:
        raise UsageError(f"--class-weights {path}: class {absent!r} has no weight")
    return tuple(given[name] for name in classes)


def balanced(counts: Sequence[int], samples: int, kind: LabelKind) -> tuple[float, ...]:
    """Return weights that make up for rare classes.

    Of one class for each sample: samples / (classes x count), as scikit-learn has it; a class without samples has 0 and
    is not counted. Of several: negative per positive samples, for ``pos_weight``; 1 without either.

    Args:
        counts: samples of each class.
        samples: samples in all.
        kind: ``single`` or ``multi``.
    """
    if kind == "single":
        present = sum(1 for count in counts if count)
        return tuple(samples / (present * count) if count else 0.0 for count in counts)
    return tuple((samples - count) / count if 0 < count < samples else 1.0 for count in counts)
