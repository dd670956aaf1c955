"""Held-out prompts, drawn with noise that never changes, so that pictures and numbers compare over a run.

Called by: `loop`, before the first rollout, every `--eval-interval` rollouts and after the last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from flowgrpo_dataprep.source import Prompt
from flowgrpo_rewards import RewardReport

from flowgrpo_trainer.fleet import Fleet
from flowgrpo_trainer.rollout import RolloutContext, RolloutGroup
from flowgrpo_trainer.run_folder import EvalSample, Evaluation, RunFolder

CORRECT = "correct"
"""A scorer's 0-or-1 component of this name is the share of pictures right in everything."""


@dataclass(frozen=True)
class Evaluator:
    """One held-out prompt set."""

    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    interval: int
    generate: Callable[..., list[RolloutGroup]]
    folder: RunFolder

    def is_due(self, trained_rollouts: int, total: int) -> bool:
        """Before training, after the last rollout, and at each interval between."""
        if trained_rollouts in (0, total):
            return True
        return self.interval > 0 and trained_rollouts % self.interval == 0

    def run(
        self, fleet: Fleet, context: RolloutContext, trained_rollouts: int, on_group: Callable[[], None]
    ) -> dict[str, float]:
        """Draws, scores and files the held-out pictures; returns `eval/<name>/...` metrics."""
        with fleet.colocation.engines_hold_gpus():
            groups = self.generate(
                context,
                self.prompts,
                group_size=self.samples_per_prompt,
                rollout_id=None,
                folder_id=trained_rollouts,
                on_group=on_group,
            )
            report = fleet.score(groups)
        samples = [
            self._sample(group, slot, report, trained_rollouts)
            for group in groups
            for slot in range(self.samples_per_prompt)
        ]
        self.folder.write_eval(Evaluation(step=trained_rollouts, sets={self.name: samples}))
        series = {"reward": [s.reward for s in samples if s.reward is not None]}
        for component in report.components:
            series[component] = [s.components[component] for s in samples if component in s.components]
        # A mean of nothing is left out: it is not 0.
        return {f"eval/{self.name}/{name}_mean": fmean(values) for name, values in series.items() if values}

    def _sample(self, group: RolloutGroup, slot: int, report: RewardReport, step: int) -> EvalSample:
        values = report.values(group.group_index, slot)
        index = group.group_index * self.samples_per_prompt + slot
        picture = self.folder.keep_image(group.files.images[slot], step=step, set_name=self.name, index=index)
        return EvalSample(
            prompt=group.prompt.prompt,
            reward=report.reward(group.group_index, slot),
            components=values,
            correct=values[CORRECT] == 1.0 if CORRECT in values else None,
            image=picture,
        )
