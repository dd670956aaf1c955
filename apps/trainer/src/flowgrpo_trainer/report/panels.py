"""The report's curves: which series make which panel, and a word for each panel that has none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo_trainer.report.curves import Series, curves_svg
from flowgrpo_trainer.report.results import RunData, correct_of, estimate, reward_of
from flowgrpo_trainer.run_folder import EvalSample

PHASES = {"rollout": "drawing", "reward": "scoring", "train": "training", "sync": "weight sync", "eval": "evaluation"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture with the sentence below it."""

    svg: str
    caption: str


def panels(data: RunData) -> tuple[list[Panel], list[str]]:
    """The panels that this run has data for, and one sentence for each one left out."""
    made, missing = [], []
    for build, absent in _PANELS:
        panel = build(data)
        if panel is None:
            missing.append(absent)
        else:
            made.append(panel)
    return made, missing


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds that one phase took in the whole run."""

    name: str
    total: float
    mean: float
    """Per rollout in which the phase ran."""
    share: float
    """Of all phases together."""


def phase_times(data: RunData) -> list[PhaseTime]:
    """The recorded phases, in the order of the loop."""
    times = {words: data.series(f"perf/{phase}_time")[1] for phase, words in PHASES.items()}
    times = {words: values for words, values in times.items() if values}
    everything = sum(sum(values) for values in times.values()) or 1.0
    return [
        PhaseTime(words, sum(values), sum(values) / len(values), sum(values) / everything)
        for words, values in times.items()
    ]


def _reward(data: RunData) -> Panel | None:
    drawn = _trained(data, "reward/mean", "training", 0)
    for place, name in enumerate(data.eval_sets(), start=1):
        drawn += _held_out(data, name, reward_of, f"held out: {name}", place)
    if not data.evals:
        drawn += _logged_evals(data, "reward_mean", 1)
    return _panel(
        drawn,
        "Reward",
        "weighted sum of the raw components, mean over pictures",
        "Pale: each rollout. Line: its moving mean. Points: held-out prompts, with their standard error.",
    )


def _correct(data: RunData) -> Panel | None:
    drawn = _trained(data, "reward/correct_mean", "training", 0, scale=100)
    for place, name in enumerate(data.eval_sets(), start=1):
        drawn += _held_out(data, name, correct_of, f"held out: {name}", place, scale=100)
    if not data.evals:
        drawn += _logged_evals(data, "correct_mean", 1, scale=100)
    return _panel(drawn, "Fully correct pictures", "% of pictures", "A picture counts if every component is right.")


def _components(data: RunData) -> Panel | None:
    drawn: list[Series] = []
    first_set = next(iter(data.eval_sets()), None)
    for place, component in enumerate(c for c in data.components() if c != "correct"):
        drawn += _trained(data, f"reward/{component}_mean", component, place)
        if first_set is not None:
            label = f"{component}, {first_set}"
            points = _held_out(data, first_set, lambda s, c=component: s.components.get(c), label, place)
            drawn += [replace(one, legend=False) for one in points]  # the line's legend names their colour too
    return _panel(
        drawn,
        "Reward by component",
        "raw value, mean over pictures",
        "Lines: moving mean of training rollouts." + (f" Points: held-out prompts ({first_set})." if first_set else ""),
    )


def _ratio(data: RunData) -> Panel | None:
    steps, mean = data.series("train/ratio_mean")
    low, high = (dict(zip(*data.series(f"train/ratio_{end}"), strict=True)) for end in ("min", "max"))
    if not _finite(mean):
        return None
    nan = float("nan")
    band = Series(
        name="ratio",
        legend=False,
        x=steps,
        y=mean,
        low=[low.get(step, nan) for step in steps] if low else None,
        high=[high.get(step, nan) for step in steps] if high else None,
    )
    clip = data.setting("eps_clip")
    edges = [] if clip is None else [1 - clip, 1 + (data.setting("eps_clip_high") or clip)]
    return _panel(
        [band],
        "Policy ratio",
        "probability of the drawn noise, new policy / old policy",
        "1 means unchanged. Line: mean. Band: least to largest ratio of the rollout."
        + (f" Dashed: the clip range, {edges[0]:g} to {edges[1]:g}." if edges else ""),
        y_lines=[1.0, *edges],
    )


def _clip(data: RunData) -> Panel | None:
    drawn = [replace(one, legend=False) for one in _trained(data, "train/clip_fraction", "clipped", 0, scale=100)]
    caption = "Transitions whose ratio left the clip range, so that their gradient was cut."
    return _panel(drawn, "Clipped transitions", "% of transitions", caption, y_range=(0.0, 1.0))


def _grad_norm(data: RunData) -> Panel | None:
    steps, values = data.series("train/grad_norm")
    finite = [value for value in values if value == value]
    log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 50
    drawn = [Series(name="", x=steps, y=values)] if finite else []
    edge = data.setting("clip_grad")
    caption = f"Before clipping{f' to {edge:g} (dashed, where the axis holds it)' if edge else ''}."
    caption += " Log axis." if log else ""
    return _panel(drawn, "Gradient norm", "", caption, y_log=log, y_lines=[edge] if edge else [])


def _times(data: RunData) -> Panel | None:
    drawn = []
    for place, (phase, words) in enumerate(PHASES.items()):
        steps, values = data.series(f"perf/{phase}_time")
        if _finite(values):
            kind = "points" if phase == "eval" else "line"  # it does not run in each rollout
            drawn.append(Series(name=words, x=steps, y=values, kind=kind, color=place))
    return _panel(drawn, "Time per phase", "seconds per rollout", "Where each rollout's time went.", y_range=(0.0, 0.0))


_PANELS: tuple[tuple[Callable[[RunData], Panel | None], str], ...] = (
    (_reward, "Reward: neither reward/mean nor an evaluation was recorded."),
    (_correct, "Fully correct pictures: the scorer says no correct flag."),
    (_components, "Reward by component: no reward/<component>_mean was recorded."),
    (_ratio, "Policy ratio: no train/ratio_mean was recorded."),
    (_clip, "Clipped transitions: no train/clip_fraction was recorded."),
    (_grad_norm, "Gradient norm: no train/grad_norm was recorded."),
    (_times, "Time per phase: no perf/<phase>_time was recorded."),
)


def _panel(drawn: Sequence[Series], title: str, y_label: str, caption: str, **options: Any) -> Panel | None:
    if not any(_finite(one.y) for one in drawn):
        return None
    return Panel(curves_svg(drawn, title, y_label=y_label, width=380, height=264, standalone=False, **options), caption)


def _trained(data: RunData, series: str, name: str, color: int, scale: float = 1.0) -> list[Series]:
    """A training series: its values, pale, and their moving mean."""
    steps, values = data.series(series)
    values = [value * scale for value in values]
    if not _finite(values):
        return []
    window = max(1, len(values) // 12)
    if window == 1:
        return [Series(name=name, x=steps, y=values, color=color)]
    mean = moving_mean(values, window)
    return [
        Series(name=name, x=steps, y=values, faint=True, color=color),
        Series(name=name, x=steps, y=mean, color=color),
    ]


def _held_out(
    data: RunData,
    set_name: str,
    value: Callable[[EvalSample], float | None],
    name: str,
    color: int,
    scale: float = 1.0,
) -> list[Series]:
    estimates = [(step, estimate(samples, value)) for step, samples in data.set_evals(set_name)]
    known = [(step, found) for step, found in estimates if found is not None]
    if not known:
        return []
    means = [found.mean * scale for _, found in known]
    errors = [(found.error or 0.0) * scale for _, found in known]
    return [
        Series(
            name=name,
            x=[step for step, _ in known],
            y=means,
            low=[mean - error for mean, error in zip(means, errors, strict=True)],
            high=[mean + error for mean, error in zip(means, errors, strict=True)],
            kind="points",
            color=color,
        )
    ]


def _logged_evals(data: RunData, ending: str, color: int, scale: float = 1.0) -> list[Series]:
    """Held-out means of a run whose evaluation files are gone: from its metrics, without errors."""
    found = [name for name in data.names() if name.startswith("eval/") and name.endswith(f"/{ending}")]
    drawn = []
    for place, name in enumerate(found, start=color):
        steps, values = data.series(name)
        label = "held out: " + name.removeprefix("eval/").removesuffix(f"/{ending}")
        drawn.append(Series(name=label, x=steps, y=[v * scale for v in values], kind="points", color=place))
    return drawn


def _finite(values: Sequence[float]) -> bool:
    return any(value == value and abs(value) != float("inf") for value in values)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over `window` values on each side and the value itself, fewer at the ends; NaNs are left out."""
    means = []
    for index in range(len(values)):
        near = [v for v in values[max(0, index - window) : index + window + 1] if v == v]
        means.append(sum(near) / len(near) if near else float("nan"))
    return means
