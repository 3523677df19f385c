"""``POST /v1/warm``: layers that a client is going to ask for, named before it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from hapi.wire.documents import strict_fields
from hapi.wire.messages import PRECISION, prefix_fields
from hapi.wire.references import ModelReference, Precision

WARM_PATH = "/v1/warm"
WarmUpState = Literal["loading", "busy"]
"""Answers: the layers are being loaded, unless they are there or there is no room; or the server has other work."""


@dataclass(frozen=True, kw_only=True)
class WarmUpRequest:
    """Layers 1 to ``split`` of ``model``, as requests for features will name them."""

    model: ModelReference
    split: int
    split_name: str
    precision: Precision = "fp32"

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` names the field that is missing, unknown or wrong."""
        known = {"model": True, "split": True, "split_name": True, PRECISION: False}
        return cls(**prefix_fields(strict_fields(document, known, "request")))

    def to_json(self) -> dict[str, Any]:
        """Return the request's body without fields at their defaults."""
        return {
            **({} if self.precision == "fp32" else {PRECISION: self.precision}),
            "model": self.model.to_json(),
            "split": self.split,
            "split_name": self.split_name,
        }
