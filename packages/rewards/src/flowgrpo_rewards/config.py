"""Reward settings, as the flags of the trainer spell them. No torch: preflight reads this file."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

RewardRuntime = Literal["cpu", "colocate", "remote"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the settings: the value, the rule it breaks, the remedy."""

    where: str
    """The setting and its value, as the user would write it."""
    why: str
    """The rule, in one or two sentences."""
    fix: str
    """What to type instead."""

    def __str__(self) -> str:
        return f"{self.where}\n   {self.why}\n   fix: {self.fix}"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which scorer judges the pictures, where it runs, and how its components count."""

    reward_scorer_path: str | None = None
    """Dotted path of a GenerativeRewardScorer class or factory. Not needed with a remote endpoint."""
    reward_model_path: str | None = None
    """Local folder of the scorer's weights."""
    reward_runtime: RewardRuntime = "cpu"
    """`cpu` hides CUDA from the scorer, `colocate` uses the rollout GPU while the actor sleeps, `remote` POSTs."""
    reward_endpoint: str | None = None
    """Base URL of a `reward-server`, for `remote`."""
    reward_required_components: tuple[str, ...] = ()
    """Components that must be finite for each candidate; empty: all that the scorer offers."""
    reward_component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each normalised component in the advantage; empty: every component counts 1."""
    reward_batch_size: int = 64
    """Samples given to the scorer at once."""
    reward_timeout_s: float = 600.0
    """Longest time for one batch, in seconds; past it the step fails by name."""

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with these settings alone. Never raises, never edits."""
        yield from self._runtime_problems()
        yield from self._component_problems()
        if self.reward_batch_size < 1:
            yield Problem(
                f"--reward-batch-size {self.reward_batch_size}", "A batch holds at least one sample.", "use 64"
            )
        if not self.reward_timeout_s > 0:
            yield Problem(f"--reward-timeout-s {self.reward_timeout_s}", "The time limit must be positive.", "use 600")

    def _runtime_problems(self) -> Iterator[Problem]:
        runtimes = get_args(RewardRuntime)
        if self.reward_runtime not in runtimes:
            yield Problem(
                f"--reward-runtime {self.reward_runtime}",
                f"It must be one of {', '.join(runtimes)}.",
                "use colocate on a GPU, cpu without one",
            )
        elif self.reward_runtime == "remote":
            if not self.reward_endpoint:
                yield Problem(
                    "--reward-runtime remote",
                    "A remote scorer needs an address, and --reward-endpoint is not set.",
                    "add --reward-endpoint http://HOST:PORT, where `reward-server` listens",
                )
            elif not self.reward_endpoint.startswith(("http://", "https://")):
                yield Problem(
                    f"--reward-endpoint {self.reward_endpoint}",
                    "An endpoint is an http or https address.",
                    f"use http://{self.reward_endpoint}",
                )
        elif not self.reward_scorer_path:
            yield Problem(
                f"--reward-runtime {self.reward_runtime}",
                "A scorer in this process needs a class, and --reward-scorer-path is not set.",
                "add --reward-scorer-path flowgrpo_rewards.pickscore.PickScoreScorer",
            )

    def _component_problems(self) -> Iterator[Problem]:
        weights = self.reward_component_weights
        for name in self.reward_required_components:
            if weights and name not in weights:
                yield Problem(
                    f"--reward-required-components {json.dumps(list(self.reward_required_components))}",
                    f"Component {name!r} is required, but --reward-component-weights gives it no weight.",
                    f"""add "{name}": 1.0 to --reward-component-weights""",
                )
            elif not weights:
                yield Problem(
                    f"--reward-required-components {json.dumps(list(self.reward_required_components))}",
                    f"Component {name!r} is required, and --reward-component-weights is not set.",
                    f"""add --reward-component-weights '{{"{name}": 1.0}}'""",
                )
        for name, weight in weights.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not math.isfinite(weight):
                yield Problem(
                    f"--reward-component-weights {name} = {weight!r}",
                    "A weight is a finite number.",
                    "use 1.0",
                )
        if weights and all(weight == 0 for weight in weights.values()):
            yield Problem(
                f"--reward-component-weights {json.dumps(dict(weights))}",
                "All weights are 0, so every advantage would be 0 and nothing would be learned.",
                "give at least one component a weight",
            )

    def weight(self, component: str) -> float:
        """Weight of `component` in the advantage: 1 where no weights are set, 0 where it has none."""
        return float(self.reward_component_weights.get(component, 0.0)) if self.reward_component_weights else 1.0


def parse_required_components(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """`--reward-required-components`, a JSON list of names. Raises ValueError in words."""
    value = _json(text, "--reward-required-components") if isinstance(text, str) else text
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(
            f"""--reward-required-components must be a JSON list of names, got {text!r}; use '["pickscore"]'"""
        )
    return tuple(value)


def parse_component_weights(text: str | Mapping[str, float] | None) -> dict[str, float]:
    """`--reward-component-weights`, a JSON object from name to number. Raises ValueError in words."""
    value = _json(text, "--reward-component-weights") if isinstance(text, str) else text
    if value is None:
        return {}
    numbers = isinstance(value, Mapping) and all(
        isinstance(weight, int | float) and not isinstance(weight, bool) for weight in value.values()
    )
    if not numbers:
        raise ValueError(
            f"""--reward-component-weights must be a JSON object of numbers, got {text!r}; use '{{"pickscore": 1.0}}'"""
        )
    return {name: float(weight) for name, weight in value.items()}


def _json(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error}; got {text!r}") from None
