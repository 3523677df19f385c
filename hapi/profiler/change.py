"""A change of the split while a job runs, as the report and the checkpoint have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the split."""

    epoch: int
    batch: int
    """The first batch that is extracted at the new split."""
    before: int
    after: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return the change for the report."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "from": self.before,
            "to": self.after,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse the output of :meth:`to_json`; ValueError, KeyError or TypeError for anything else."""
        epoch, batch, before, after = (document[name] for name in ("epoch", "batch", "from", "to"))
        if not all(type(v) is int and v >= 0 for v in (epoch, batch, before, after)):
            raise ValueError("a change of split is not made of whole numbers")
        return cls(epoch=epoch, batch=batch, before=before, after=after, why=str(document["why"]))
