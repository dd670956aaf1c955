"""Results as JSON, and the baselines under `bench/baselines/<machine kind>/<case>.json`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BASELINES = Path(__file__).resolve().parents[2] / "baselines"
OURS = "ours"
FLOPS = {"h200": 788e12}
"""Machine kind -> operations a second of large bf16 products, as measured: the rate of the arithmetic floor."""
COPY = "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant of one size under one timer."""

    case: str
    size: str
    timer: str
    variant: str
    """`ours`, a rival's name, or `copy`: as many bytes read and written once, the floor."""
    seconds: float
    """Median time of a call."""
    spread: float
    """Relative noise of the measurement (`measure.Timing`)."""
    launches: int | None = None
    """What one call puts on the GPU; None where it was not counted."""
    bytes_moved: int = 0
    operations: int = 0
    peak_bytes: int | None = None
    """Most that torch held on the GPU during the calls; None on a CPU."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.case, self.size, self.timer, self.variant)

    @property
    def gb_per_s(self) -> float:
        """Bytes that must move over the time, in 1e9 bytes a second."""
        return self.bytes_moved / self.seconds / 1e9


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one `bench run` measured."""

    date: str
    """UTC, ISO 8601."""
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    tolerance: dict[str, float] = field(default_factory=dict)
    """Case -> relative tolerance on this machine's device."""
    failed: dict[str, str] = field(default_factory=dict)
    """Case and size -> why it was not timed: its gate's error."""

    def write(self, path: Path) -> None:
        """As JSON; replaces the file whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".tmp")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Raises ValueError for a file that is no report."""
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            data["rows"] = [Row(**row) for row in data["rows"]]
            return cls(**data)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no bench report ({error}); write one with `bench run --out`") from error


def save_baselines(report: Report, folder: Path = BASELINES) -> list[Path]:
    """Writes one file a case for the report's machine kind; returns them. Refuses a report with a failed gate."""
    if report.failed:
        raise ValueError(f"no baseline from a run with failed gates: {', '.join(report.failed)}")
    paths = []
    for case in sorted({row.case for row in report.rows}):
        path = folder / report.machine["kind"] / f"{case}.json"
        rows = [row for row in report.rows if row.case == case]
        tolerance = {case: report.tolerance[case]}
        Report(date=report.date, machine=report.machine, rows=rows, tolerance=tolerance).write(path)
        paths.append(path)
    return paths


def read_baselines(kind: str, folder: Path = BASELINES) -> list[Report]:
    """One report a case for a machine kind; empty if there is none."""
    return [Report.read(path) for path in sorted((folder / kind).glob("*.json"))]
