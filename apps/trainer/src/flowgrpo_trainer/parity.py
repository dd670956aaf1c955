"""The parity gate: before training, two groups are drawn and replayed, and their log-probs must agree.

If engine and replay disagree on one setting (sigmas, eta, text window, weights), every ratio is wrong and
training looks healthy while it learns nothing. So a run refuses to start, and says which step is off.
The two groups differ most in the length of their texts, for a rollout's forwards are padded and masked, and a
forward of one text alone is not.
Called by: `loop.train`, once, before the first rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray
from flowgrpo_dataprep.source import Prompt

from flowgrpo_trainer.fleet import Engines, Fleet

if TYPE_CHECKING:
    from flowgrpo_trainer.loop import Run

SHARED = 32
"""Candidates that one call to an engine holds, and by default one forward of the server."""


class ParityError(RuntimeError):
    """Engine and replay disagree about the probability of what the engine drew."""

    def __init__(self, by_step: dict[int, float], bound: float):
        super().__init__(by_step, bound)  # pickle rebuilds from these
        self.by_step, self.bound = by_step, bound

    def __str__(self) -> str:
        steps = ", ".join(f"step {step}: {self._shown(value)}" for step, value in self.by_step.items())
        off = [step for step, value in self.by_step.items() if not value <= self.bound]
        return (
            f"engine and replay disagree: |ratio - 1| exceeds {self.bound} at SDE steps {off} ({steps})\n"
            "hint: all steps off: the weights, eta, sde_type, dtype or the mask of padded texts differ; the first: "
            "sigma_max or the schedule; the last: the trajectory was stored in fewer bits than its log-prob was "
            "taken from"
        )

    @staticmethod
    def _shown(value: float) -> str:
        return "not a number" if math.isnan(value) else f"{value:.2e}"


@dataclass
class ParityGate:
    """Refuses a run whose engine and replay differ by more than `bound`."""

    bound: float

    def check(self, run: "Run", fleet: Fleet) -> None:
        """Draws two prompts of the next rollout in one wave, replays them, moves nothing. Raises ParityError.

        One engine draws both, for several would take a group each. A group has as many candidates as in training, but
        no more than lets both share a forward.
        """
        rollout_id = run.next_rollout
        prompts = shortest_and_longest(run.prompts.batch(rollout_id))
        with fleet.colocation.engines_hold_gpus(), run.phase("comparing engine and replay"):
            run.generate(
                replace(run.context, engines=Engines(fleet.engines.workers[:1])),
                prompts,
                group_size=min(run.group_size, SHARED // len(prompts)),
                rollout_id=rollout_id,
                folder_id=rollout_id,
            )
        with fleet.colocation.actor_holds_gpus():
            by_step, *_ = ray.get([actor.parity.remote(rollout_id, len(prompts)) for actor in fleet.actors])
        if not all(value <= self.bound for value in by_step.values()):
            raise ParityError(by_step, self.bound)
        worst = max(by_step.values(), default=0.0)
        run.progress.note(f"engine and replay agree: |ratio - 1| at most {worst:.1e} over steps {list(by_step)}")
        run.seconds.clear()


def shortest_and_longest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """By their bytes, which tokens follow; one prompt where there is no other text."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.prompt.encode()))
    shortest, longest = ordered[0], ordered[-1]
    return [shortest] if longest.prompt == shortest.prompt else [shortest, longest]
