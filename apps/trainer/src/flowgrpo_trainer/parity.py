"""The parity gate: before training, one group is drawn and replayed, and the two log-probs must agree.

If engine and replay disagree on one setting (sigmas, eta, text window, weights), every ratio is wrong and
training looks healthy while it learns nothing. So a run refuses to start, and says which step is off.
Called by: `loop.train`, once, before the first rollout.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from flowgrpo_trainer.fleet import Fleet

if TYPE_CHECKING:
    from flowgrpo_trainer.loop import Run


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
            "hint: all steps off: the weights, eta, sde_type or dtype differ; the first steps off: sigma_max or the "
            "schedule; the last ones: the trajectory was stored in fewer bits than its log-prob was taken from"
        )

    @staticmethod
    def _shown(value: float) -> str:
        return "not a number" if math.isnan(value) else f"{value:.2e}"


@dataclass
class ParityGate:
    """Refuses a run whose engine and replay differ by more than `bound`."""

    bound: float

    def check(self, run: "Run", fleet: Fleet) -> None:
        """Draws the first group of the next rollout, replays it, moves nothing. Raises ParityError."""
        rollout_id = run.next_rollout
        with fleet.colocation.engines_hold_gpus(), run.phase("comparing engine and replay"):
            run.generate(
                run.context,
                run.prompts.batch(rollout_id)[:1],
                group_size=run.group_size,
                rollout_id=rollout_id,
                folder_id=rollout_id,
            )
        with fleet.colocation.actor_holds_gpus():
            by_step, *_ = ray.get([actor.parity.remote(rollout_id, 1) for actor in fleet.actors])
        if not all(value <= self.bound for value in by_step.values()):
            raise ParityError(by_step, self.bound)
        worst = max(by_step.values(), default=0.0)
        run.progress.note(f"engine and replay agree: |ratio - 1| at most {worst:.1e} over steps {list(by_step)}")
        run.seconds.clear()
