"""The reward step of a rollout: score once, in batches, and give finite values per prompt group.

Called by the trainer after generation, with every candidate of the rollout. It returns raw component values,
G x N; the trainer combines them into one advantage with `flowgrpo_math.combine_component_advantages`.

Shapes: G prompt groups, N candidates of a group.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowgrpo_rewards.config import RewardConfig
from flowgrpo_rewards.protocol import (
    ROUTING_KEY,
    ComponentFailure,
    GenerativeRewardScorer,
    GroupRewardError,
    Invalid,
    RewardError,
    RewardSample,
    RewardTimeoutError,
    SampleResult,
    ScorerContractError,
    Value,
)

DEGENERATE_VARIANCE = 1e-6
"""Advantage variance under which a rollout teaches nothing (requirements, section 12)."""


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """What one rollout was worth."""

    components: dict[str, list[list[float]]]
    """Component to raw values [G][N], all finite. Where `applies` is False for a group its row is 0 and no value:
    whoever reads a row asks `applies` first."""
    weights: dict[str, float]
    """Component to weight in the advantage, for each of `components`."""
    applies: dict[str, list[bool]]
    """Component to [G]: whether it judges the group (routing) and is whole there."""
    left_out: tuple[ComponentFailure, ...] = ()
    """Optional components that had no value somewhere, and so do not count in that group."""
    incomplete: frozenset[int] = frozenset()
    """Groups, by place in the rollout, that a component with a weight was left out of."""
    score_time: float = 0.0
    """Seconds of scoring alone."""
    score_samples_per_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """`reward/...` series of requirements section 12, but for those of the advantage (`advantage_metrics`)."""

    def values(self, group: int, slot: int) -> dict[str, float]:
        """Component to raw value of one candidate, only those that apply to its group."""
        return {name: rows[group][slot] for name, rows in self.components.items() if self.applies[name][group]}

    def reward(self, group: int, slot: int) -> float | None:
        """Weighted sum of the raw components of one candidate.

        None in an `incomplete` group: a sum without that component cannot be compared with others. A component that
        the prompt is not routed to is no part of the sum and hinders nothing.
        """
        if group in self.incomplete:
            return None
        return math.fsum(self.weights[name] * value for name, value in self.values(group, slot).items())


def post_process(
    groups: Sequence[Sequence[RewardSample]], scorer: GenerativeRewardScorer, config: RewardConfig
) -> RewardReport:
    """Scores all candidates of a rollout.

    Args:
        groups: G groups of N samples each.

    Raises:
        GroupRewardError: a required component is missing or not finite; names group, slot, component (R2).
        RewardTimeoutError, RewardEndpointError: the scorer hangs or cannot be reached.
        ScorerContractError: the scorer returned something that the protocol forbids.
        ValueError: groups of different sizes, or none.
    """
    _check_groups(groups)
    routes = [_route(group, scorer) for group in groups]
    required = set(config.reward_required_components or scorer.components)
    check_components(config, scorer)

    samples = [sample for group in groups for sample in group]
    started = time.perf_counter()
    results = score_in_batches(samples, scorer, batch_size=config.reward_batch_size, timeout_s=config.reward_timeout_s)
    score_time = time.perf_counter() - started

    n = len(groups[0])
    results_GN = [results[start : start + n] for start in range(0, len(results), n)]
    components: dict[str, list[list[float]]] = {}
    applies: dict[str, list[bool]] = {}
    fatal: list[ComponentFailure] = []
    left_out: list[ComponentFailure] = []
    incomplete: set[int] = set()
    for name in scorer.components:
        components[name], applies[name] = [], []
        for place, (group, route, row) in enumerate(zip(groups, routes, results_GN, strict=True)):
            values, failures = _finite_values(name, group, row) if name in route else ([0.0] * n, [])
            (fatal if name in required else left_out).extend(failures)
            components[name].append(values if not failures else [0.0] * n)
            applies[name].append(name in route and not failures)
            if failures and config.weight(name):
                incomplete.add(place)
    if fatal:
        raise GroupRewardError(fatal)

    weights = {name: config.weight(name) for name in scorer.components}
    report = RewardReport(
        components=components,
        weights=weights,
        applies=applies,
        left_out=tuple(left_out),
        incomplete=frozenset(incomplete),
        score_time=score_time,
        score_samples_per_s=len(samples) / score_time if score_time > 0 else math.inf,
    )
    report.metrics.update(reward_metrics(report))
    return report


def score_in_batches(
    samples: Sequence[RewardSample], scorer: GenerativeRewardScorer, *, batch_size: int, timeout_s: float | None
) -> list[SampleResult]:
    """One result per sample, in order. A batch that raises is scored again one sample at a time, so that
    the sample to blame is `Invalid` by name and its neighbours keep their values. `timeout_s` limits one call."""
    results: list[SampleResult] = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        try:
            results += _score(scorer, batch, timeout_s)
        except RewardError:
            raise  # a broken contract, a dead endpoint, a hang: scoring again would not help
        except Exception:
            results += [_score_alone(scorer, sample, timeout_s) for sample in batch]
    return results


def _score_alone(scorer: GenerativeRewardScorer, sample: RewardSample, timeout_s: float | None) -> SampleResult:
    try:
        return _score(scorer, [sample], timeout_s)[0]
    except RewardError:
        raise
    except Exception as error:
        return dict.fromkeys(scorer.components, Invalid(f"the scorer raised {type(error).__name__}: {error}"))


def _score(
    scorer: GenerativeRewardScorer, batch: Sequence[RewardSample], timeout_s: float | None
) -> list[SampleResult]:
    """`scorer.score(batch)` under a time limit (None: the caller keeps its own), checked against the protocol."""
    if timeout_s is None:
        return _checked(scorer, batch, scorer.score(batch))
    outcome: list[Sequence[SampleResult]] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(scorer.score(batch))
        except BaseException as error:  # carried over to the caller's thread below
            raised.append(error)

    # A daemon: a scorer that hangs in native code cannot be stopped, but it must not keep the process alive.
    thread = threading.Thread(target=work, name="reward-scorer", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        first, last = ((s.group_index, s.slot) for s in (batch[0], batch[-1]))
        raise RewardTimeoutError(_name(scorer), timeout_s, first, last, tuple(scorer.components))
    if raised:
        raise raised[0]
    return _checked(scorer, batch, outcome[0])


def _checked(
    scorer: GenerativeRewardScorer, batch: Sequence[RewardSample], results: Sequence[SampleResult]
) -> list[SampleResult]:
    if not isinstance(results, Sequence) or len(results) != len(batch):
        got = len(results) if isinstance(results, Sequence) else type(results).__name__
        raise ScorerContractError(
            _name(scorer),
            f"returned {got} results for {len(batch)} samples, group {batch[0].group_index} slot {batch[0].slot} "
            f"to group {batch[-1].group_index} slot {batch[-1].slot}",
            "score() returns one mapping per sample, in order",
        )
    for sample, result in zip(batch, results, strict=True):
        wrong = not isinstance(result, Mapping) or any(not isinstance(r, Value | Invalid) for r in result.values())
        if wrong:
            raise ScorerContractError(
                _name(scorer),
                f"returned {result!r} for group {sample.group_index} slot {sample.slot}",
                "score() returns a mapping from component to Value(number) or Invalid(reason)",
            )
    return list(results)


def _finite_values(
    name: str, group: Sequence[RewardSample], row: Sequence[SampleResult]
) -> tuple[list[float], list[ComponentFailure]]:
    """The N values of one component in one group, and what is wrong with them."""
    values, failures = [], []
    for sample, result in zip(group, row, strict=True):
        reason = ""
        match result.get(name):
            case Value(value) if isinstance(value, bool) or not isinstance(value, int | float):
                reason = f"the value is a {type(value).__name__}, not a float"
            case Value(value) if not math.isfinite(value):
                reason = f"the value is {value}"
            case Value(value):
                values.append(float(value))
            case Invalid(why):
                reason = why
            case _:
                reason = "the scorer returned no value"
        if reason:
            failures.append(ComponentFailure(sample.group_index, sample.slot, name, reason))
    return values, failures


def _route(group: Sequence[RewardSample], scorer: GenerativeRewardScorer) -> frozenset[str]:
    """The components that judge this group: `metadata["reward"]`, or all."""
    sample = group[0]
    route = sample.metadata.get(ROUTING_KEY)
    if route is None:
        return frozenset(scorer.components)
    names = [route] if isinstance(route, str) else route
    known = isinstance(names, Sequence) and names and all(name in scorer.components for name in names)
    if not known:
        raise ScorerContractError(
            _name(scorer),
            f"group {sample.group_index} is routed to {route!r} by its metadata.{ROUTING_KEY}, but the scorer "
            f"offers {', '.join(scorer.components)}",
            f"use one of these names, a list of them, or leave metadata.{ROUTING_KEY} out",
        )
    return frozenset(names)


def _check_groups(groups: Sequence[Sequence[RewardSample]]) -> None:
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(f"post_process needs groups of one size above 0, got {len(groups)} groups of sizes {sizes}")


def check_components(config: RewardConfig, scorer: GenerativeRewardScorer) -> None:
    """Raises ScorerContractError where a component is required or weighted that the scorer does not offer."""
    names = {*config.reward_required_components, *config.reward_component_weights}
    if unknown := sorted(names - set(scorer.components)):
        raise ScorerContractError(
            _name(scorer),
            f"component {unknown[0]!r} is required or weighted, but the scorer offers {', '.join(scorer.components)}",
            "mend --reward-required-components and --reward-component-weights",
        )


def reward_metrics(report: RewardReport) -> dict[str, float]:
    """The `reward/...` series of a report. Standard deviations are those of the population.

    `reward/mean` is the mean over candidates of `RewardReport.reward`, so `incomplete` groups are no part of it.
    A mean of nothing is not there, for it is not 0.
    `reward/group_std_mean` is the mean over groups of the standard deviation of the weighted sum of the raw
    components that apply: near 0, the scorer cannot tell a group's candidates apart and nothing is learned.
    """
    metrics: dict[str, float] = {}
    for name, values_GN in report.components.items():
        rows = [row for row, applies in zip(values_GN, report.applies[name], strict=True) if applies]
        flat = [value for row in rows for value in row]
        if not flat:
            continue  # no group of this rollout is judged by it
        metrics[f"reward/{name}_mean"] = math.fsum(flat) / len(flat)
        metrics[f"reward/{name}_std"] = _std(flat)
        metrics[f"reward/{name}_min"] = min(flat)
        metrics[f"reward/{name}_max"] = max(flat)
        metrics[f"reward/{name}_group_std_mean"] = math.fsum(map(_std, rows)) / len(rows)
    rows_GN = next(iter(report.components.values()))
    G, N = len(rows_GN), len(rows_GN[0])
    rewards = [reward for g in range(G) for n in range(N) if (reward := report.reward(g, n)) is not None]
    if rewards:
        metrics["reward/mean"] = math.fsum(rewards) / len(rewards)
    totals_GN = [
        [math.fsum(report.weights[c] * value for c, value in report.values(g, n).items()) for n in range(N)]
        for g in range(G)
    ]
    metrics["reward/num_groups"] = float(G)
    metrics["reward/group_std_mean"] = math.fsum(map(_std, totals_GN)) / G
    metrics["reward/invalid"] = float(len(report.left_out))
    metrics["reward/score_time"] = report.score_time
    metrics["reward/score_samples_per_s"] = report.score_samples_per_s
    return metrics


def advantage_metrics(advantages_GN: Sequence[Sequence[float]]) -> dict[str, float]:
    """`reward/advantage_{mean,std}` and `reward/degenerate` (1 when the variance is under 1e-6)."""
    flat = [float(value) for row in advantages_GN for value in row]
    std = _std(flat)
    return {
        "reward/advantage_mean": math.fsum(flat) / len(flat),
        "reward/advantage_std": std,
        "reward/degenerate": float(std * std < DEGENERATE_VARIANCE),
    }


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _name(scorer: GenerativeRewardScorer) -> str:
    return getattr(scorer, "name", type(scorer).__name__)
