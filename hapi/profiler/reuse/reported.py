"""Facts about keeping in a run's report, to plan again from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from hapi.errors import ConfigError
from hapi.profiler.profile import MAX_PROFILE_BYTES
from hapi.profiler.reading import load_document, read_strictly
from hapi.profiler.reuse.facts import Objective, Prices, ReuseFacts


@dataclass(frozen=True, kw_only=True)
class ReportedReuse:
    """Caches, prices and objective that a run's choice was made from."""

    facts: ReuseFacts
    prices: Prices
    objective: Objective

    @classmethod
    def load(cls, path: str) -> ReportedReuse | None:
        """Read those of the run whose report is at ``path``.

        Returns:
            None for a report without a choice, and for a mere profile.

        Raises:
            UsageError: the file cannot be read.
            ConfigError: a field is wrong; the message names it.
        """
        document = load_document(path, MAX_PROFILE_BYTES, "give a report of hapi-train, or a profile")
        plan = document.get("plan") if isinstance(document, Mapping) else None
        found = plan.get("reuse") if isinstance(plan, Mapping) else None
        return None if found is None else cls._read(found, f"{path}: plan.reuse")

    @classmethod
    def _read(cls, found: Any, where: str) -> ReportedReuse:
        if not isinstance(found, Mapping):
            raise ConfigError(f"{where}: expected an object, found {type(found).__name__}")
        objective = found.get("objective")
        if objective not in get_args(Objective):
            raise ConfigError(f"{where}.objective: expected one of {', '.join(get_args(Objective))}")
        prices = found.get("prices", asdict(Prices()))
        return cls(
            facts=ReuseFacts.from_json(found.get("facts"), f"{where}.facts"),
            prices=cast(Prices, read_strictly(Prices, prices, f"{where}.prices")),
            objective=cast(Objective, objective),
        )
