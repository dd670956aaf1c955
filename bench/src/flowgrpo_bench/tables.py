"""What `bench` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flowgrpo_bench.compare import Comparison, rivals_of
from flowgrpo_bench.results import FLOPS, OURS, Report, Row


def wide_console() -> Console:
    """A console that keeps columns whole where output is no terminal (a file, CI)."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def run_table(report: Report) -> Table:
    """Each size: our time and noise, GB/s, launches, peak memory, the arithmetic floor and its share of our time, then
    every rival as a multiple of ours."""
    table = Table(title=f"{report.machine['kind']}, {report.date}, commit {report.machine['commit']}")
    for column in (
        "case",
        "size",
        "timer",
        "time",
        "noise",
        "GB/s",
        "launches",
        "peak",
        "floor",
        "others (time / ours)",
    ):
        table.add_column(column, justify="left" if column in ("case", "size", "timer") else "right")
    for row in report.rows:
        if row.variant == OURS:
            rivals = ", ".join(f"{r.variant} {r.seconds / row.seconds:.2f}" for r in rivals_of(row, report.rows))
            launches = "" if row.launches is None else str(row.launches)
            gb_per_s = f"{row.gb_per_s:.0f}" if row.bytes_moved else ""
            noise = f"{row.spread:.1%}"
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.3g} GB"
            least = row.operations / FLOPS.get(report.machine["kind"], float("inf"))
            floor = f"{time(least)}, {least / row.seconds:.0%}" if least else ""
            now = time(row.seconds)
            table.add_row(row.case, row.size, row.timer, now, noise, gb_per_s, launches, peak, floor, rivals)
    return table


def compare_table(comparisons: Sequence[Comparison]) -> Table:
    """Each measurement now, in the baseline, and its verdict."""
    table = Table()
    for column in ("case", "size", "timer", "now", "baseline", "change", "limit", "verdict"):
        table.add_column(column, justify="left" if column in ("case", "size", "timer") else "right")
    colors = {"slower": "red", "faster": "green", "new": "yellow", "ok": "default"}
    for c in comparisons:
        baseline = "" if c.baseline is None else time(c.baseline.seconds)
        change = "" if c.change is None else f"{c.change:+.1%}"
        verdict = f"[{colors[c.verdict]}]{c.verdict}[/]"
        row: Row = c.now
        table.add_row(row.case, row.size, row.timer, time(row.seconds), baseline, change, f"+{c.limit:.0%}", verdict)
    return table


def time(seconds: float) -> str:
    """With a unit that leaves one to four digits before the point."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 10_000:
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 100 else f"{seconds * scale:.0f} {unit}"
    return f"{seconds:.3g} s"
