"""Datasets, models and endpoints that a tenant may see. To it, all others are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hapi.data.manifest import unknown_dataset
from hapi.errors import UsageError
from hapi.repository.versions import hidden_model
from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest
from hapi.wire.references import ModelReference
from hapi.wire.warm_up import WarmUpRequest

ALL = ("*",)
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,128}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Rights of one tenant. ``*`` in a name stands for any text."""

    datasets: tuple[str, ...] = ALL
    models: tuple[str, ...] = ALL
    """Pushed models; what a server builds itself belongs to nobody."""
    status: bool = True
    """May ask for the server's state."""
    metrics: bool = True

    @property
    def whole(self) -> bool:
        """True for a tenant that may know of the others, and of all datasets and models."""
        return "*" in self.datasets and "*" in self.models

    def sees_dataset(self, name: str) -> bool:
        """Return whether the tenant may know of the dataset."""
        return _pattern(self.datasets).fullmatch(name) is not None

    def sees_model(self, reference: str) -> bool:
        """Return whether the tenant may know of a pushed model; ``reference`` may have a version."""
        return _pattern(self.models).fullmatch(reference.partition("@")[0]) is not None

    def check_dataset(self, name: str) -> None:
        """Raise the :class:`NotFoundError` of a dataset that is not there for one that may not be seen."""
        if not self.sees_dataset(name):
            raise unknown_dataset(name)

    def check_model(self, reference: str) -> None:
        """Raise the :class:`NotFoundError` of a model that is not there for one that may not be seen."""
        if not self.sees_model(reference):
            raise hidden_model(reference.partition("@")[0])

    def check(self, asked: ExtractRequest | SamplesRequest | TensorsRequest | WarmUpRequest) -> None:
        """Check all that a request names; errors are those of the other checks."""
        if isinstance(asked, ExtractRequest | SamplesRequest):
            self.check_dataset(asked.dataset.name)
        if isinstance(asked, TensorsRequest):
            self.check_model(asked.name)
        elif not isinstance(asked, SamplesRequest):
            self._check_reference(asked.model)

    def _check_reference(self, model: ModelReference) -> None:
        if model.source == "store":
            self.check_model(model.name)


EVERYTHING = Access()


def check_patterns(patterns: Sequence[str], what: str) -> None:
    """Raise :class:`UsageError` for a pattern that no name can match."""
    for pattern in patterns:
        if _PATTERN.fullmatch(pattern) is None:
            raise UsageError(f"{what}: expected names, * for any text in them, got {pattern[:80]!r}")


@cache
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(p).replace(r"\*", ".*") for p in patterns) or "(?!)", re.DOTALL)
