"""The papers' tables and figures as views of one sweep's results; see :mod:`benchmarks.split.sweep`. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.split import paper
from benchmarks.split.study import (
    NOISE,
    ORDER,
    Measured,
    by_halves,
    errors,
    errors_of_epochs,
    optimality,
    slower_than,
    spreads,
    surely_slower,
)
from hapi.units import format_bandwidth, format_bytes


def optimality_table(cells: Sequence[Measured]) -> list[str]:
    """Table 3 for every strategy: % of the cells, the paper's figures below ours where it has them."""
    names = ("optimal", "<= 5%", "<= 10%", "<= 15%", "beyond", "OOM", "within 5%")
    lines = [f"{'% of cells':<18}" + "".join(f"{name:>10}" for name in names)]
    for strategy in ORDER:
        o = optimality(cells, strategy)
        ours = [100 * count / o.cells for count in o.counts]
        lines.append(f"{strategy:<18}" + "".join(f"{value:>10.1f}" for value in (*ours, 100 * o.good)))
        theirs = paper.OPTIMALITY.get(strategy)
        if theirs is not None:
            row = (*theirs, theirs[0] + theirs[1])
            lines.append(f"{'  in the paper':<18}" + "".join(f"{value:>10.1f}" for value in row))
    lines.append(
        f"{len(cells)} cells here; {NOISE:.0%} counts as the same time; the paper's are 49 cases of its own setting"
    )
    lines.append("goal for auto: 95% within 5%, none beyond 10%, no OOM")
    five, ten = (100 * surely_slower(cells, by) / len(cells) for by in (0.05, 0.10))
    lines.append(
        f"auto slower beyond doubt (rank-sum test of its epochs and the best's; few epochs leave doubt): "
        f"> 5% {five:.1f}, > 10% {ten:.1f}"
    )
    return [*lines, *_halves(cells), *_noise(cells)]


def _halves(cells: Sequence[Measured]) -> list[str]:
    """Resolution of the repeats: the result of an oracle that has half of them, judged by the other half."""
    lines = []
    for name, strategy in (("auto", "auto"), ("oracle: best by the other half", None)):
        found = by_halves(cells, strategy)
        if found:
            within = (100 * sum(slower <= limit for slower in found) / len(found) for limit in (0.05, 0.10))
            shares = "within 5% {:.1f}, within 10% {:.1f}".format(*within)
            lines.append(f"judged by half of the repeated epochs, {name:<32}{shares} of {len(found)}")
    return lines


def _p95(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def _noise(cells: Sequence[Measured]) -> list[str]:
    """Distance of repeats of the same epoch: no difference below it means much."""
    found = sorted(spreads(cells))
    if not found:
        return []
    line = (
        f"noise: the slowest of repeated epochs took {statistics.median(found):.1%} longer than the fastest in the "
        f"median, {_p95(found):.1%} at the 95th percentile, of {len(found)} that were repeated"
    )
    return [line]


def estimates_table(cells: Sequence[Measured]) -> list[str]:
    """Estimated against measured epoch seconds (Figure 11)."""
    lines = [f"{'':<36}{'median':>8}{'p95':>8}{'worst':>8}{'epochs':>8}"]
    rows = (
        ("auto (streamed), all splits", errors(cells, "auto")),
        ("auto (streamed), at its choice", errors(cells, "auto", chosen_by="auto")),
        ("  another epoch of that split", errors_of_epochs(cells, chosen_by="auto")),
        ("hapi (paper's form), all splits", errors(cells, "paper")),
        ("hapi (paper's form), at its choice", errors(cells, "paper", chosen_by="hapi")),
        ("nsg (sum), all splits", errors(cells, "sum")),
        ("nsg (sum), at its choice", errors(cells, "sum", chosen_by="nsg")),
    )
    for name, unordered in rows:
        if unordered:
            found = sorted(unordered)
            median = statistics.median(found)
            lines.append(f"{name:<36}{median:>8.1%}{_p95(found):>8.1%}{found[-1]:>8.1%}{len(found):>8}")
    lines.append("goal for auto: median 5%, p95 15%")
    return [*lines, *_noise(cells)]


def competitors_table(cells: Sequence[Measured]) -> list[str]:
    """Epoch seconds of every strategy over auto's (Figures 7 to 10); ``>`` where it was broken off."""
    names = [s for s in ORDER if s != "auto"]
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}{'auto s':>9}" + "".join(f"{n:>11}" for n in names)]
    lines[0] += f"{'none uint8':>12}{'none fp32':>11}"
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        auto = one.lower_bound(one.choices["auto"])
        if auto is None:
            lines.append(
                f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}{'OOM':>9}"
            )
            continue
        row = f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}{auto:>9.2f}"
        for name in names:
            split = one.choices[name]
            bound = one.lower_bound(split)
            if bound is None:
                row += f"{'OOM':>11}"
                continue
            more = "" if one.seconds(split) is not None else ">"
            row += f"{more + format(bound / auto, '.2f'):>11}"
            ratios[name].append(bound / auto)
        for form, width in (("uint8", 12), ("float32", 11)):
            seconds = one.tensors.get(form)
            row += f"{'>3' if seconds is None else format(seconds / auto, '.2f'):>{width}}"
        lines.append(row)
    for title, of in (("median", statistics.median), ("largest (at least)", max)):
        lines.append(f"{title:<40}" + "".join(f"{of(ratios[n] or [math.nan]):>11.2f}" for n in names))
    lines.append(
        f"times auto's epoch; the paper's HAPI is up to {paper.LARGEST_SPEEDUP} times as fast as NoSplit"
    )
    both = ("none", "freeze")
    slower, surely = slower_than(cells, 0.03, both), surely_slower(cells, 0.03, both)
    lines.append(
        f"auto more than 3% slower than the better of none and freeze (goal: in no cell): {slower} of {len(cells)}, "
        f"beyond doubt (rank-sum test of their epochs): {surely}"
    )
    return lines


def cpu_client_table(cells: Sequence[Measured]) -> list[str]:
    """auto's speed-up over not splitting, with the client on a CPU (earlier HAPI text, Figure 9b, section 5.2)."""
    lines = [f"{'over NoSplit with':<26}{'mean':>8}{'largest':>9}{'cells':>7}"]
    for name, form in (("stored images", None), ("uint8 tensors", "uint8"), ("float32 tensors", "float32")):
        ratios = []
        for one in cells:
            auto, none = one.seconds(one.choices["auto"]), one.seconds(0)
            if form is not None:
                none = one.tensors.get(form)
            if auto and none:
                ratios.append(none / auto)
        if ratios:
            lines.append(f"{name:<26}{statistics.mean(ratios):>8.2f}{max(ratios):>9.2f}{len(ratios):>7}")
    mean, largest = paper.CPU_SPEEDUP
    lines.append(f"{'the paper, float32':<26}{mean:>8.2f}{largest:>9.2f}")
    lines.append("cells whose NoSplit was broken off are left out, so these are lower bounds")
    lines.append(
        "in the paper a client without GPUs faces a server with two, so pushing down also means a faster device;"
    )
    lines.append(
        "where both tiers have one core of the same kind, two cores cannot be more than twice as fast as one"
    )
    return lines


def traffic_table(cells: Sequence[Measured]) -> list[str]:
    """Bytes of an epoch over the wire by strategy (earlier HAPI text, Figures 9 and 10), estimated where not run."""
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}" + "".join(f"{n:>12}" for n in ORDER)]
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        row = f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}"
        for name in ORDER:
            split = one.choices[name]
            row += f"{format_bytes(one.bytes_received.get(split, one.wire[split])):>12}"
        lines.append(row)
    sums = {
        name: sum(one.bytes_received.get(one.choices[name], one.wire[one.choices[name]]) for one in cells)
        for name in ORDER
    }
    lines.append(f"{'sum':<31}" + "".join(f"{format_bytes(sums[name]):>12}" for name in ORDER))
    return lines


def splits_table(cells: Sequence[Measured]) -> list[str]:
    """Epoch seconds at every split (Figure 3); ``>`` where it was broken off, ``*`` the best, ``a`` auto's choice."""
    lines = []
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        lines.append(f"{one.cell.model}, batch {one.cell.bs}, {format_bandwidth(one.cell.bandwidth)}:")
        row = "  "
        for split in sorted(one.times.keys() | one.bounds.keys()):
            seconds = one.seconds(split)
            text = f">{one.bounds[split]:.2f}" if seconds is None else f"{seconds:.2f}"
            marks = ("*" if seconds == one.best else "") + ("a" if split == one.choices["auto"] else "")
            row += f"{split}: {text}{marks}  "
        lines.append(row.rstrip())
    return lines


def bandwidth_table(cells: Sequence[Measured]) -> list[str]:
    """auto's split and epoch by bandwidth (Figure 13)."""
    lines = [f"{'model':<13}{'bs':>5}{'bandwidth':>13}{'split':>7}{'seconds':>9}{'best':>6}{'seconds':>9}"]
    for one in sorted(cells, key=lambda m: (m.cell.model, m.cell.bs, m.cell.bandwidth)):
        split = one.choices["auto"]
        seconds = one.seconds(split)
        best = min(one.times, key=lambda s: one.seconds(s) or 0.0)
        bound = one.lower_bound(split)
        shown = "OOM" if bound is None else f">{bound:.2f}" if seconds is None else f"{bound:.2f}"
        lines.append(
            f"{one.cell.model:<13}{one.cell.bs:>5}{format_bandwidth(one.cell.bandwidth):>13}"
            f"{split:>7}{shown:>9}{best:>6}{one.best:>9.2f}"
        )
    theirs = ", ".join(f"{bits:g} Gbit/s: {split}" for bits, split in paper.BANDWIDTH_SPLITS.items())
    lines.append(f"AlexNet's split in the earlier text (batch 8000, Table 2): {theirs}")
    lines.append(
        "DenseNet121's in the later text (Figure 13): 9 where bandwidth is large, 19 where it is scarce"
    )
    return lines


VIEWS = {
    "optimality": optimality_table,
    "estimates": estimates_table,
    "competitors": competitors_table,
    "splits": splits_table,
    "bandwidth": bandwidth_table,
    "traffic": traffic_table,
    "cpu-client": cpu_client_table,
}
"""The lines that ``benchmarks NAME`` prints of a sweep."""
