"""A run against the baselines of its machine kind: one table, and whether anything got slower than it may."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowgrpo_bench.results import COPY, OURS, Report, Row

NOISE_FACTOR = 3.0
"""A change counts once it is this many times the noise of the two measurements."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measurement now and in the baseline."""

    now: Row
    baseline: Row | None
    limit: float
    """Largest relative slowdown that passes: the case's tolerance, or if more, `NOISE_FACTOR` times the noise."""

    @property
    def change(self) -> float | None:
        """Relative change of the time; above 0 is slower. None without a baseline."""
        return None if self.baseline is None else self.now.seconds / self.baseline.seconds - 1.0

    @property
    def verdict(self) -> str:
        """`new`, `slower`, `faster` or `ok`."""
        if self.change is None:
            return "new"
        if self.change > self.limit:
            return "slower"
        return "faster" if self.change < -self.limit else "ok"


def compare(now: Report, baselines: Sequence[Report]) -> list[Comparison]:
    """Each of our rows in `now` beside its baseline. Rivals and copies are context, not promises: left out."""
    known = {row.key: row for report in baselines for row in report.rows}
    comparisons = []
    for row in now.rows:
        if row.variant != OURS:
            continue
        baseline = known.get(row.key)
        noise = NOISE_FACTOR * max(row.spread, baseline.spread if baseline else 0.0)
        comparisons.append(Comparison(row, baseline, max(now.tolerance.get(row.case, 0.0), noise)))
    return comparisons


def passed(now: Report, comparisons: Sequence[Comparison]) -> bool:
    """False if a gate failed or something is slower than its limit."""
    return not now.failed and all(c.verdict != "slower" for c in comparisons)


def rivals_of(row: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """The other variants of the same size under the same timer, the copy last."""
    others = [r for r in rows if r.key[:3] == row.key[:3] and r.variant != row.variant]
    yield from sorted(others, key=lambda r: r.variant == COPY)
