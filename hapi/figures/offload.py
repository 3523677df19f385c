"""The optimiser's states elsewhere, in a run's page: where, how many bytes, and what each step took for it."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.figures.fields import Fields
from hapi.figures.markup import escaped, section, table
from hapi.units import format_bytes, format_duration


@dataclass(frozen=True, kw_only=True)
class OffloadPart:
    """The report's part about offloading."""

    where: str
    why: str
    folders: tuple[str, ...]
    state_bytes: int
    """Bytes of the states of all trained parameters."""
    disk_bytes: int
    """Bytes that they take on disk."""
    freed: int
    """Bytes of memory that were free for it."""
    steps: int
    """Steps of the process that wrote the report."""
    redone: int
    read: int
    """Bytes of the whole run."""
    written: int
    step_seconds: float
    """Seconds of all these steps, forward and backward included."""
    waited: float
    """Seconds of them in which training waited for states."""
    drive_seconds: float
    """Seconds in which the drives read and wrote."""
    read_rate: float | None
    """Bytes a second as measured before the run; None where they were not."""
    write_rate: float | None

    @classmethod
    def of(cls, f: Fields) -> OffloadPart | None:
        """Parse the report; None where all was in memory, or the report does not say what it cost."""
        found = f.inner("offload") if f.has("offload") else None
        if found is None or not found.has("cost") or not found.has("state_bytes"):
            return None
        cost = found.inner("cost")
        return cls(
            where=found.text("where"),
            why=found.text("why"),
            folders=tuple(str(folder)[:1000] for folder in found.items("folders")),
            state_bytes=found.integer("state_bytes"),
            disk_bytes=found.integer("disk_bytes"),
            freed=found.integer("bytes_freed"),
            steps=cost.integer("taken_steps"),
            redone=cost.integer("redone_steps"),
            read=cost.integer("bytes_read"),
            written=cost.integer("bytes_written"),
            step_seconds=found.seconds("step_seconds"),
            waited=cost.seconds("waited_seconds"),
            drive_seconds=cost.seconds("read_seconds") + cost.seconds("write_seconds"),
            read_rate=found.optional("read_rate"),
            write_rate=found.optional("write_rate"),
        )

    @property
    def share(self) -> float:
        """Return the share of the steps' time in which training waited for states."""
        return self.waited / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def words(self) -> str:
        """Return the sentence that matters."""
        place = "on disk" if self.where == "disk" else "in the host's memory"
        cost = (
            "steps hardly waited for them"
            if self.share < 0.01
            else f"steps waited for them {self.share:.0%} of their time"
        )
        return f"The optimiser's states were {place}: {cost}."


def offload_part(part: OffloadPart | None) -> str:
    """Return the part of the page; empty where all was in memory."""
    if part is None:
        return ""
    steps = max(1, part.steps)
    computing = max(0.0, part.step_seconds - part.waited)
    rows = [
        ("states of the optimiser", format_bytes(part.state_bytes)),
        ("memory that they left", format_bytes(part.freed)),
        ("place", ", ".join(part.folders) or "host memory"),
        ("bytes there", format_bytes(part.disk_bytes)),
        ("read in a step", format_bytes(part.read // steps)),
        ("written in a step", format_bytes(part.written // steps)),
        ("a step", format_duration(part.step_seconds / steps)),
        ("of it computing", format_duration(computing / steps)),
        ("of it waiting for states", format_duration(part.waited / steps)),
        ("reads and writes of a step, partly behind computing", format_duration(part.drive_seconds / steps)),
    ]
    longer = max(computing, part.drive_seconds)
    if longer > 0:
        rows.append(("a step over the longer of computing and disk", f"{part.step_seconds / longer:.2f}×"))
    for name, rate in (("read", part.read_rate), ("write", part.write_rate)):
        if rate is not None:
            rows.append((f"{name} rate before the run", f"{format_bytes(rate)}/s"))
    rows.append(("steps of this process", str(part.steps)))
    rows.append(("of them computed again", str(part.redone)))
    why = f"<p>{escaped(part.words)} Why: {escaped(part.why)}.</p>"
    measured = table("States elsewhere, and what they cost", ("What", "Value"), rows, left={0, 1}, long={1})
    return section("Offloaded states", why + measured)
