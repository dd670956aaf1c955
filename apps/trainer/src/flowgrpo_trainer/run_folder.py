"""One folder per run: its layout, and files that a kill at any moment cannot spoil.

    <run>/settings.json               resolved settings, versions, git revision, every start
    <run>/metrics.jsonl               one object a rollout step: {"step", "time", "metrics": {name: float}}
    <run>/evals/step_0000010.json     one held-out evaluation: prompts, rewards, components, pictures
    <run>/evals/step_0000010/*.png    its pictures
    <run>/events/                     TensorBoard
    <run>/ended.json                  how the run ended; absent while it runs, and after a kill
    <run>/report.html                 written by `report.write_report`, at any time

A JSON file is either the whole old one or the whole new one (temporary file, fsync, rename, fsync of the folder).
A line of metrics.jsonl counts once its newline is on the disk: a torn last line is not read, and the next append
removes it. The writer is one process, the driver.

`step` of a metrics line is the rollout's id. `step` of an evaluation is the number of rollouts that the evaluated
policy was trained on: 0 before training, so a resume from step k keeps evaluation k and drops metrics line k.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from flowgrpo_rollout_sglang.files import fsync_folder, write_atomic

from flowgrpo_trainer import provenance

EndState = Literal["finished", "interrupted", "failed"]
_URL_PASSWORD = re.compile(r'(?<=://)[^/@\s"]+(?=@)')


class RunFolderError(RuntimeError):
    """A run folder cannot be used: which path, why, and what to do."""

    def __init__(self, path: Path, why: str, fix: str):
        super().__init__(path, why, fix)  # pickle, and so Ray, rebuilds from these
        self.path, self.why, self.fix = path, why, fix

    def __str__(self) -> str:
        return f"{self.path}: {self.why}\n   fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """One line of metrics.jsonl."""

    step: int
    time: str
    """ISO 8601, with its offset from UTC."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One picture of a held-out prompt, scored."""

    prompt: str
    reward: float | None
    """Weighted sum of the raw components; none where one with a weight had no value."""
    components: Mapping[str, float]
    """Those that judge the prompt and had a value."""
    correct: bool | None = None
    """Whether the picture is right in every component; none where the scorer cannot tell."""
    image: str | None = None
    """Path relative to the run folder, as `RunFolder.keep_image` returns it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's results on its held-out prompts."""

    step: int
    """Rollouts that this policy was trained on."""
    sets: Mapping[str, Sequence[EvalSample]]
    """Samples by the name of their prompt set, in the same order at every step."""
    time: str = ""
    """ISO 8601, with its offset from UTC; filled in when written."""


class RunFolder:
    """The files of one run. Opening it touches nothing; `start` makes it."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.settings_path = self.path / "settings.json"
        self.ended_path = self.path / "ended.json"
        self.evals_dir = self.path / "evals"
        self.events_dir = self.path / "events"
        self.report_path = self.path / "report.html"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    # -- written by the driver ---------------------------------------------------------------------------------

    def start(self, settings: Any, *, total_rollouts: int, resume_step: int | None = None) -> None:
        """Begin or resume a run here; writes settings.json last, so a folder that has one is whole.

        Args:
            settings: a mapping or dataclass; paths, enums and tuples are written as JSON writes them, and
                passwords inside URLs are masked.
            resume_step: first rollout that will run. None begins a new run, and refuses a folder that holds one.

        Raises:
            RunFolderError: the folder cannot be written, or it already holds a run.
        """
        try:
            self.events_dir.mkdir(parents=True, exist_ok=True)
            self.evals_dir.mkdir(exist_ok=True)
            for leftover in self.path.glob(".*.tmp"):  # of a killed writer
                leftover.unlink()
            with tempfile.TemporaryFile(dir=self.path):
                pass  # a read-only folder must be known before the first rollout, not after it
        except OSError as error:
            raise RunFolderError(
                self.path, f"cannot be written: {error.strerror}", "give a folder that you may write"
            ) from error
        old = read_json(self.settings_path) if self.settings_path.exists() else {}
        starts = list(old.get("starts", ()))
        if resume_step is None:
            if starts or self.read_metrics():
                raise RunFolderError(self.path, "already holds a run", "resume it, or give another folder")
        else:
            self.drop_from(resume_step)
        self.ended_path.unlink(missing_ok=True)
        starts.append({"time": now(), "from_step": resume_step or 0})
        write_json_atomic(
            self.settings_path,
            {
                "settings": json.loads(_URL_PASSWORD.sub("***", json.dumps(settings, default=_plain))),
                "total_rollouts": total_rollouts,
                "starts": starts,
                "versions": provenance.package_versions(),
                "git": provenance.git_revision(),
                "machine": provenance.machine(),
            },
        )

    def append_metrics(self, step: int, metrics: Mapping[str, float], time: str | None = None) -> None:
        """Add one line, on the disk when this returns. NaN is written as null, which JSON has and NaN it has not."""
        values = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        append_jsonl(self.metrics_path, {"step": step, "time": time or now(), "metrics": values})

    def drop_from(self, step: int) -> None:
        """Forget what a resume from `step` will do again: metrics lines >= step, evaluations > step."""
        if self.metrics_path.exists():
            kept = [json.dumps(line) for line in read_jsonl(self.metrics_path) if line["step"] < step]
            write_bytes_atomic(self.metrics_path, "".join(f"{line}\n" for line in kept).encode())
        for path in self._eval_paths():
            if _eval_step(path) > step:
                path.unlink()
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)

    def keep_image(self, source: Path, *, step: int, set_name: str, index: int) -> str:
        """Give an evaluation picture a home that artifact pruning never reaches; returns its relative path.

        Hard-linked where the file system can, else copied. Raises FileNotFoundError if `source` is missing.
        """
        folder = self.evals_dir / f"step_{step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", set_name)
        target = folder / f"{safe}_{index:06d}{source.suffix.lower()}"
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
        return target.relative_to(self.path).as_posix()

    def write_eval(self, evaluation: Evaluation) -> Path:
        """Write one evaluation, whole or not at all. Its pictures must already be there (`keep_image`)."""
        path = self.evals_dir / f"step_{evaluation.step:07d}.json"
        record = asdict(evaluation) | {"time": evaluation.time or now()}
        write_json_atomic(path, record)
        return path

    def mark_ended(self, state: EndState, detail: str = "") -> None:
        """Say how the run ended; a killed run never says it."""
        write_json_atomic(self.ended_path, {"state": state, "detail": detail, "time": now()})

    # -- read at any time --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RunFolderError unless this is the folder of a run."""
        if not self.path.is_dir():
            raise RunFolderError(self.path, "is not a folder", "name the folder that the run printed at its start")
        if not (self.settings_path.exists() or self.metrics_path.exists()):
            raise RunFolderError(
                self.path,
                "is no run folder: it has neither settings.json nor metrics.jsonl",
                "name the folder that the run printed at its start",
            )

    def read_settings(self) -> dict[str, Any]:
        """settings.json, or {} where it is missing."""
        return read_json(self.settings_path) if self.settings_path.exists() else {}

    def read_metrics(self) -> list[MetricsRecord]:
        """All whole lines, in file order; null reads as NaN."""
        if not self.metrics_path.exists():
            return []
        records = []
        for number, line in enumerate(read_jsonl(self.metrics_path), start=1):
            try:
                metrics = {n: math.nan if v is None else float(v) for n, v in line["metrics"].items()}
                records.append(MetricsRecord(int(line["step"]), str(line["time"]), metrics))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise _damaged(self.metrics_path, f"line {number} is no metrics record") from error
        return records

    def metrics_text(self) -> str:
        """All whole lines as they lie on disk, for a checkpoint to keep."""
        if not self.metrics_path.exists():
            return ""
        return "".join(f"{json.dumps(line)}\n" for line in read_jsonl(self.metrics_path))

    def read_evals(self) -> list[Evaluation]:
        """All evaluations, by step."""
        return [self._read_eval(path) for path in self._eval_paths()]

    def read_ended(self) -> dict[str, str] | None:
        """{"state", "detail", "time"}; None while the run goes on, and after a kill."""
        return read_json(self.ended_path) if self.ended_path.exists() else None

    def _eval_paths(self) -> list[Path]:
        return sorted(path for path in self.evals_dir.glob("step_*.json") if _eval_step(path) >= 0)

    def _read_eval(self, path: Path) -> Evaluation:
        record = read_json(path)
        try:
            sets = {str(name): [EvalSample(**sample) for sample in samples] for name, samples in record["sets"].items()}
            return Evaluation(step=int(record["step"]), sets=sets, time=str(record["time"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _damaged(path, "is no evaluation") from error


# -- crash-safe files ------------------------------------------------------------------------------------------


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: a reader, or a later start, finds the old file or the new one."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    write_bytes_atomic(path, (text + "\n").encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, in one step."""
    write_atomic(path, lambda temporary: temporary.write_bytes(data))


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line, on the disk when this returns; a torn last line goes first.

    A write that fails half way (a full disk) takes its bytes back before it raises.
    """
    line = json.dumps(record, allow_nan=False, default=_plain).encode() + b"\n"
    existed = path.exists()
    with open(path, "ab+", buffering=0) as file:
        end = _intact_size(file)
        file.truncate(end)
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
            os.fsync(file.fileno())
        except BaseException as error:
            file.truncate(end)
            _say_where(error, path)
            raise
    if not existed:
        fsync_folder(path.parent)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of `path`; a torn last one is left out, a bad one before it raises RunFolderError."""
    lines = path.read_bytes().split(b"\n")
    whole = lines[:-1]  # what follows the last newline is empty, or torn
    for number, line in enumerate(whole, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(whole):  # a crash of the machine can leave zeros in front of the newline
                return
            raise _damaged(path, f"line {number} is not JSON") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises RunFolderError where it is not one: we write no half file, somebody else did."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, "is not JSON") from error
    if not isinstance(value, dict):
        raise _damaged(path, "is not a JSON object")
    return value


def now() -> str:
    """The time of now, ISO 8601 in UTC to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _intact_size(file: Any) -> int:
    """Bytes up to and with the last newline that ends a JSON line (the last two lines are looked at)."""
    size = file.seek(0, os.SEEK_END)
    block = 1 << 16
    while True:
        start = max(0, size - block)
        file.seek(start)
        tail = file.read(size - start)
        end = tail.rfind(b"\n") + 1
        before = tail.rfind(b"\n", 0, max(end - 1, 0)) + 1
        if start == 0 or before > 0:
            break
        block *= 2  # the last line is longer than the block
    try:
        json.loads(tail[before:end] or b"{}")
    except ValueError:
        end = before
    return start + end


def _say_where(error: BaseException, path: Path) -> None:
    """A write on a full disk raises an OSError that names no file."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def _eval_step(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _damaged(path: Path, why: str) -> RunFolderError:
    return RunFolderError(path, why, "the trainer leaves no such file: restore it, or move it away")


def _plain(value: Any) -> Any:
    """JSON's form of what settings hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"settings hold {value!r} of type {type(value).__name__}, which JSON cannot hold")
