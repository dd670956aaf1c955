"""The report: one HTML file of a run folder, at any time of the run, that needs no other file and no network."""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flowgrpo_trainer.report.curves import curves_css
from flowgrpo_trainer.report.panels import panels, phase_times
from flowgrpo_trainer.report.pictures import comparisons
from flowgrpo_trainer.report.results import (
    Change,
    RunData,
    Warned,
    change,
    correct_of,
    flat,
    reward_of,
    running_seconds,
    warnings,
)
from flowgrpo_trainer.run_folder import RunFolder, write_bytes_atomic


def write_report(run_folder: RunFolder | str | os.PathLike[str], out: Path | None = None) -> Path:
    """Write `report.html` of a run that ended, goes on, or was killed, and return its path.

    Args:
        out: another place for the file, such as when the run folder is read-only.

    Raises:
        RunFolderError: the folder is no run folder, or one of its files was damaged.
    """
    folder = run_folder if isinstance(run_folder, RunFolder) else RunFolder(run_folder)
    data = RunData(folder)
    target = out or folder.report_path
    write_bytes_atomic(target, render(data).encode())
    return target


def render(data: RunData) -> str:
    """The page as text. Everything that the run wrote is escaped: prompts and settings are not ours."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["seconds"] = duration
    template = environment.from_string(_resource("page.html.jinja"))
    drawn, left_out = panels(data)
    compared = comparisons(data)
    warned = warnings(data)
    if lost := sum(one.missing for one in compared):
        warned.append(Warned(f"{lost} pictures cannot be shown", "Their files are missing or damaged."))
    return template.render(
        css=Markup(_resource("page.css") + curves_css()),
        name=data.folder.path.resolve().name,
        state=_state(data),
        headlines=headlines(data),
        warnings=warned,
        panels=[(Markup(panel.svg), panel.caption) for panel in drawn],
        left_out=left_out,
        comparisons=compared,
        phases=phase_times(data),
        settings=[(name, _setting_text(value)) for name, value in flat(data.settings)],
        versions=data.info.get("versions") or {},
        git=data.info.get("git"),
        machine=data.info.get("machine") or {},
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


@dataclass(frozen=True, slots=True)
class Headline:
    """What the run changed, in large figures and in words."""

    what: str
    before: str
    after: str
    difference: str
    better: bool | None
    """None where the change is within two standard errors."""
    sentence: str


def headlines(data: RunData) -> list[Headline]:
    """Share correct and mean reward of each held-out set, first evaluation against last; else training's reward."""
    found = []
    for name in data.eval_sets():
        (first, before), (last, after) = data.set_evals(name)[0], data.set_evals(name)[-1]
        if first == last:
            continue
        prompts = len({sample.prompt for sample in before})
        whose = f"on {prompts} held-out prompts ({name}), after {_rollouts(last)}"
        if (correct := change(before, after, correct_of)) is not None:
            found.append(_headline("Fully correct pictures", correct, whose, percent=True))
        if (reward := change(before, after, reward_of)) is not None:
            found.append(_headline("Mean reward", reward, whose, percent=False))
    return found or _training_headline(data)


def _headline(what: str, moved: Change, whose: str, *, percent: bool) -> Headline:
    def level(value: float) -> str:
        return f"{value:.0%}" if percent else f"{value:.3f}"

    delta, error = moved.difference.mean, moved.difference.error
    difference = f"{delta * 100:+.1f} points" if percent else f"{delta:+.3f}"
    if error is None:
        return Headline(
            what,
            level(moved.before.mean),
            level(moved.after.mean),
            difference,
            None,
            f"{whose[0].upper()}{whose[1:]}. One prompt has no standard error.",
        )
    spread = f"{error * 100:.1f} points" if percent else f"{error:.3f}"
    clear = abs(delta) > 2 * error
    verdict = (
        f"{'a rise' if delta > 0 else 'a fall'} beyond what chance explains"
        if clear
        else "within two standard errors, so it may be chance"
    )
    sentence = (
        f"From {level(moved.before.mean)} to {level(moved.after.mean)} {whose}: {difference}, "
        f"standard error {spread}, {verdict}."
    )
    better = delta > 0 if clear else None
    return Headline(what, level(moved.before.mean), level(moved.after.mean), difference, better, sentence)


def _training_headline(data: RunData) -> list[Headline]:
    """Without two evaluations: the first tenth of the rollouts against the last, which are other prompts."""
    _, values = data.series("reward/mean")
    tenth = max(1, len(values) // 10)
    if len(values) < 2 * tenth:
        return []
    before, after = sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
    sentence = (
        f"Mean of the first and of the last {_rollouts(tenth)} of training. These are not the same prompts, and "
        "there is no second held-out evaluation yet, so no standard error is given."
    )
    return [Headline("Mean training reward", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", None, sentence)]


def _state(data: RunData) -> str:
    """How far the run got, how it ended, and how long it took, in a sentence or two."""
    done, total = (max(data.by_step) + 1 if data.by_step else 0), data.total_rollouts()
    progress = f"{done} of {_rollouts(total)}" if total is not None else _rollouts(done)
    seconds = running_seconds(data)
    took = f" in {duration(seconds)}" if seconds is not None else ""
    each = f" ({seconds / done:.1f} s each, evaluation included)" if seconds is not None and done else ""
    resumes = len(data.info.get("starts", ())) - 1
    again = f" It was resumed {resumes} time{'s' if resumes > 1 else ''}." if resumes > 0 else ""
    if data.ended is None:
        when = f" Its last rollout ended at {_clock(data.records[-1].time)}." if data.records else ""
        return f"{progress}{took}{each}. It is still going, or it was killed: no end is recorded.{when}{again}"
    words = {"finished": "finished", "interrupted": "was interrupted", "failed": "ended by an error"}
    end = words[data.ended["state"]]
    return f"{progress}{took}{each}. The run {end}.{again}"


def duration(seconds: float) -> str:
    """In the two units that matter: 4.2 s, 42 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _clock(time: str) -> str:
    """An ISO time as a person reads it, in UTC like the page's own."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _rollouts(count: int) -> str:
    return f"{count} rollout{'' if count == 1 else 's'}"


def _setting_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resource(name: str) -> str:
    return files("flowgrpo_trainer.report").joinpath(name).read_text(encoding="utf-8")
