"""What a run's files say: series, the change on held-out prompts with its standard error, time, warnings."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flowgrpo_trainer.run_folder import EvalSample, Evaluation, MetricsRecord, RunFolder

Value = Callable[[EvalSample], float | None]
COUNTERS = {  # since the start of the process
    "train/weight_sync_failures": ("failed weight sync", "The sync was tried again, or the run ended."),
    "train/checkpoint_failures": ("failed checkpoint", "A resume would start from an older one."),
}

_ENDED = {"interrupted": "interrupted", "failed": "ended by an error"}


@dataclass(frozen=True, slots=True)
class Warned:
    """Something a reader must know before trusting the run."""

    title: str
    detail: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over held-out prompts and its standard error (None for fewer than two prompts)."""

    mean: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of one held-out set, before and after training."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """Paired by prompt where both evaluations have the same prompts."""


class RunData:
    """Everything the report reads of a run folder, read once."""

    def __init__(self, folder: RunFolder):
        folder.check()
        self.folder = folder
        self.info: Mapping[str, Any] = folder.read_settings()
        self.settings: Mapping[str, Any] = self.info.get("settings") or {}
        self.records: Sequence[MetricsRecord] = folder.read_metrics()
        self.evals: Sequence[Evaluation] = folder.read_evals()
        self.ended = folder.read_ended()
        by_step: dict[int, dict[str, float]] = {}
        for record in self.records:
            by_step.setdefault(record.step, {}).update(record.metrics)
        self.by_step = dict(sorted(by_step.items()))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one series, by step; empty where it was never logged."""
        points = [(step, metrics[name]) for step, metrics in self.by_step.items() if name in metrics]
        return [step for step, _ in points], [value for _, value in points]

    def setting(self, name: str) -> float | None:
        """A number among the settings, in whatever group it stands; None where it is not set."""
        found = [value for key, value in flat(self.settings) if key.rpartition(".")[2] == name]
        return next((v for v in found if isinstance(v, int | float) and not isinstance(v, bool)), None)

    def names(self) -> list[str]:
        """All series, in the order of their first appearance."""
        return list(dict.fromkeys(name for metrics in self.by_step.values() for name in metrics))

    def components(self) -> list[str]:
        """Reward components: the X of reward/X_mean, less statistics of something else, and those of evaluations."""
        found = [n.removeprefix("reward/").removesuffix("_mean") for n in self.names() if _is_component(n)]
        trained = [name for name in found if name != "advantage" and not name.endswith("group_std")]
        held_out = [name for e in self.evals for samples in e.sets.values() for s in samples for name in s.components]
        return list(dict.fromkeys([*trained, *held_out]))

    def eval_sets(self) -> list[str]:
        """Names of the held-out prompt sets, in the order of the first evaluation."""
        return list(dict.fromkeys(name for evaluation in self.evals for name in evaluation.sets))

    def set_evals(self, set_name: str) -> list[tuple[int, Sequence[EvalSample]]]:
        """(step, samples) of each evaluation of this set."""
        return [(e.step, e.sets[set_name]) for e in self.evals if e.sets.get(set_name)]

    def total_rollouts(self) -> int | None:
        total = self.info.get("total_rollouts")
        return total if isinstance(total, int) else None


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested settings."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def reward_of(sample: EvalSample) -> float | None:
    return sample.reward


def correct_of(sample: EvalSample) -> float | None:
    return None if sample.correct is None else float(sample.correct)


def estimate(samples: Sequence[EvalSample], value: Value) -> Estimate | None:
    """Mean of `value` over prompts; the error comes from the spread between prompts. None without values."""
    return _estimate(list(_by_prompt(samples, value).values()))


def change(before: Sequence[EvalSample], after: Sequence[EvalSample], value: Value) -> Change | None:
    """From one evaluation to another. None where either has no such value.

    The same prompts are compared pairwise, standard error sd(d) / sqrt(prompts), because a hard prompt is hard
    both times; different prompts as two independent means. Several pictures of a prompt count as one: their mean.
    """
    first, second = _by_prompt(before, value), _by_prompt(after, value)
    start, end = _estimate(list(first.values())), _estimate(list(second.values()))
    if start is None or end is None:
        return None
    if first.keys() == second.keys():
        difference = _estimate([second[prompt] - first[prompt] for prompt in first])
    else:
        known = start.error is not None and end.error is not None
        difference = Estimate(end.mean - start.mean, math.hypot(start.error, end.error) if known else None)
    assert difference is not None  # both have values
    return Change(start, end, difference)


def increases(steps: Sequence[int], counts: Sequence[float]) -> tuple[int, list[int]]:
    """Total growth of a counter that starts again at 0 after a resume, and the steps at which it grew."""
    total, grew, last = 0.0, [], 0.0
    for step, count in zip(steps, counts, strict=True):
        growth = count - last if count >= last else count
        if growth > 0:
            total += growth
            grew.append(step)
        last = count
    return round(total), grew


def running_seconds(data: RunData) -> float | None:
    """Wall time spent running, without the gaps between a kill and its resume. None before the first rollout."""
    starts = [_time(start["time"]) for start in data.info.get("starts", ())]
    events = [_time(record.time) for record in data.records] + [_time(e.time) for e in data.evals if e.time]
    if data.ended is not None:
        events.append(_time(data.ended["time"]))
    if not events:
        return None
    starts = sorted(starts) or [min(events)]
    spent = 0.0
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        inside = [moment for moment in events if start <= moment and (end is None or moment < end)]
        spent += (max(inside) - start).total_seconds() if inside else 0.0
    return spent


def warnings(data: RunData) -> list[Warned]:
    """Everything that went wrong without ending the run, and what the run never reached."""
    found = []
    steps, degenerate = data.series("reward/degenerate")
    degenerate_steps = [step for step, value in zip(steps, degenerate, strict=True) if value == 1.0]
    if degenerate_steps:
        found.append(
            Warned(
                f"{len(degenerate_steps)} of {len(steps)} rollouts were degenerate",
                "All candidates of each prompt got the same reward, so there was nothing to learn and no step was "
                f"taken: {_at(degenerate_steps)}.",
            )
        )
    steps, skips = data.series("train/optimizer_skips")  # per rollout
    broken = {step: skip for step, skip in zip(steps, skips, strict=True) if skip and step not in degenerate_steps}
    if broken:
        found.append(
            Warned(
                f"{_count(sum(broken.values()), 'optimizer step')} skipped",
                f"Their gradient was not finite: {_at(list(broken))}.",
            )
        )
    steps, invalid = data.series("reward/invalid")
    lost = {step: count for step, count in zip(steps, invalid, strict=True) if count}
    if lost:
        found.append(
            Warned(
                f"{_count(sum(lost.values()), 'component value')} could not be used",
                "The scorer gave none, or none that is finite, so that component did not count in their group: "
                f"{_at(list(lost))}.",
            )
        )
    for name, (noun, meaning) in COUNTERS.items():
        total, grew = increases(*data.series(name))
        if total:
            found.append(Warned(_count(total, noun), f"{meaning} At {_at(grew)}."))
    if data.ended is not None and data.ended.get("state") != "finished":
        found.append(Warned(f"The run was {_ENDED[data.ended['state']]}", data.ended.get("detail", "")))
    if not data.evals:
        found.append(Warned("There is no held-out evaluation", "Only training rewards can be shown."))
    return found


def _is_component(name: str) -> bool:
    return name.startswith("reward/") and name.endswith("_mean")


def _by_prompt(samples: Sequence[EvalSample], value: Value) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        if (number := value(sample)) is not None:
            values.setdefault(sample.prompt, []).append(number)
    return {prompt: sum(numbers) / len(numbers) for prompt, numbers in values.items()}


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean, math.sqrt(variance / len(values)))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def _at(steps: Sequence[int]) -> str:
    """The rollouts, the first few by number."""
    shown = ", ".join(str(step) for step in steps[:8])
    more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
    return f"rollout{'s' if len(steps) > 1 else ''} {shown}{more}"
