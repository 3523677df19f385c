"""``benchmarks stragglers``: its figures are of pairs of runs, whose ratios it compares one by one."""

from __future__ import annotations

from benchmarks.load.stragglers import Pair, Stragglers, StragglersSettings, Waits


def run(p99: float, extra: int = 0) -> Waits:
    """A hundred requests of a millisecond, but for the slowest two."""
    return Waits(seconds=(*[0.001] * 98, p99, 2 * p99), extra=extra, retries=0)


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    """One of them met a machine that was busy in both runs, another one in one run alone."""
    pairs = [
        Pair(even=run(0.1), slow=run(0.11, extra=1)),
        Pair(even=run(0.4), slow=run(0.48, extra=2)),
        Pair(even=run(0.1), slow=run(0.3)),
    ]
    found = Stragglers(settings=StragglersSettings(), conditions={}, alone=0.01, pairs={"hedged": pairs})
    way = found.to_json()["ways"]["hedged"]
    assert way["p99_ratios"] == [1.1, 1.2, 3.0] and way["p99_ratio"] == 1.2
    assert way["with"]["requests"] == 300 and way["with"]["extra"] == 3
    assert way["without"]["p99"] == 0.2
    table = "\n".join(found.table())
    assert "1.20, the median of 1.10, 1.20, 3.00" in table and "extra 1.00%" in table
