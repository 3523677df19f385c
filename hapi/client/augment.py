"""``--augment``: the random transforms of the training samples, by the names that torchvision's users know.

Each is a name with options after colons, ``resized-crop:scale=0.2-1``; left out options have torchvision's defaults,
and those of its reference scripts where it has none. :data:`PRESETS` are the usual combinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hapi.config.fields import suggestion
from hapi.errors import BadRequestError, UsageError
from hapi.wire.references import Augmentation

PRESETS = {"imagenet": ("resized-crop", "flip"), "crop-flip": ("crop", "flip")}
"""torchvision's references/classification for ImageNet, and what is usual for CIFAR."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "resized-crop": {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)},
    "crop": {"padding": 4},
    "flip": {"p": 0.5},
    "jitter": dict.fromkeys(Augmentation.JITTER, 0.0),
}


def parsed(texts: Sequence[str]) -> Augmentation:
    """Return the random parts from names with options; :class:`UsageError` names the one that is wrong."""
    document: dict[str, Any] = {}
    names: list[str] = []
    for text in (part for given in texts for part in PRESETS.get(given, (given,))):
        name, *options = text.split(":")
        if name not in _DEFAULTS:
            known = (*PRESETS, *_DEFAULTS)
            raise UsageError(f"--augment: there is no {name!r}{suggestion(name, known)}")
        if name in names:
            raise UsageError(f"--augment: {name} is given twice")
        names.append(name)
        document |= _options(name, options)
    try:
        return Augmentation.from_json(document)
    except BadRequestError as error:
        raise UsageError(str(error).replace("transform.augment", "--augment", 1)) from None


def _options(name: str, options: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(_DEFAULTS[name])
    if name == "jitter" and not options:
        raise UsageError("--augment: jitter needs what to change, such as jitter:brightness=0.4:hue=0.1")
    for option in options:
        key, equals, value = option.partition("=")
        if key not in found or not equals:
            raise UsageError(
                f"--augment: {name} has no option {option!r}; write {name}:{'=..:'.join(found)}=.. or less"
            )
        found[key] = _value(f"--augment: {name}:{option}", key, value)
    if name == "flip":
        return {"flip": found["p"]}
    return found


def _value(what: str, key: str, text: str) -> Any:
    try:
        if key == "padding":
            return int(text)
        if key in ("scale", "ratio"):
            low, high = text.split("-")
            return (float(low), float(high))
        return float(text)
    except ValueError:
        form = {
            "padding": "a whole number",
            "scale": "two numbers such as 0.2-1",
            "ratio": "two numbers such as 0.75-1.33",
        }
        raise UsageError(f"{what}: expected {form.get(key, 'a number')}") from None
