"""The training loop, on one page. It names every phase and decides nothing: what a run leaves out is decided
where it is wired (`main`, `fleet`).

Left out on purpose: no KL and no reference model (S4); the ratio is per (sample, step), never summed over
steps; no classifier-free guidance (S5).

Reading path: `rollout` -> `flowgrpo_rewards/post_process.py` -> `flowgrpo_math/advantage.py` ->
`flowgrpo_fsdp_actor/replay.py` -> `flowgrpo_fsdp_actor/update.py` -> `sync`.

Shapes: G prompt groups, N candidates of a group.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import ray
import torch
from flowgrpo_dataprep.source import PromptSource
from flowgrpo_math import combine_component_advantages
from flowgrpo_rewards import RewardReport
from flowgrpo_rewards.post_process import advantage_metrics
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_trainer.checkpoints import Checkpoints, NoCheckpoints
from flowgrpo_trainer.evaluate import Evaluator
from flowgrpo_trainer.fleet import Fleet
from flowgrpo_trainer.parity import ParityGate
from flowgrpo_trainer.progress import RunProgress
from flowgrpo_trainer.rollout import RolloutContext, RolloutGroup
from flowgrpo_trainer.sync import Publisher
from flowgrpo_trainer.tracking import Trackers


@dataclass
class Run:
    """Everything the loop needs beside the workers."""

    num_rollouts: int
    group_size: int
    """N."""
    std_mode: Literal["group", "batch", "none"]
    prompts: PromptSource
    context: RolloutContext
    generate: Callable[..., list[RolloutGroup]]
    convert: Callable[..., TensorDict]
    parity: ParityGate
    evaluator: Evaluator
    publisher: Publisher
    checkpoints: Checkpoints | NoCheckpoints
    tracker: Trackers
    progress: RunProgress
    next_rollout: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each phase of the current rollout."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Shows and times one phase; yields what counts its progress."""
        started = time.perf_counter()
        with self.progress.phase(name, total=total) as shown:
            yield shown.advance
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def train(run: Run, fleet: Fleet) -> None:
    """Runs to the end, or raises the first error of any worker, by name; everything logged so far is kept."""
    if run.next_rollout == 0:
        run.tracker.log_before_training(evaluate(run, fleet, trained=0))
    run.parity.check(run, fleet)
    run.progress.start_timing()
    for rollout_id in range(run.next_rollout, run.num_rollouts):
        prompts = run.prompts.batch(rollout_id)
        G, N = len(prompts), run.group_size

        with fleet.colocation.engines_hold_gpus():
            with run.phase("rollout", total=G) as advance:
                groups = run.generate(
                    run.context, prompts, group_size=N, rollout_id=rollout_id, folder_id=rollout_id, on_group=advance
                )
            fleet.read_ahead(rollout_id, G)
            with run.phase("reward"):
                rewards = fleet.score(groups)

        advantages_GN = advantages(rewards, run.std_mode)
        fleet.rows.put(rollout_id, run.convert(groups, advantages_GN, rollout_id))

        with fleet.colocation.actor_holds_gpus():
            with run.phase("update"):
                report, *_ = ray.get([actor.update.remote(rollout_id, G, N) for actor in fleet.actors])
            fleet.rows.clear(rollout_id)
            fleet.relay_logs()
            with run.phase("sync"):
                synced = run.publisher.publish(fleet, report.policy_version, must_change=_moved(report.metrics))

        metrics = rewards.metrics | advantage_metrics(advantages_GN.tolist()) | report.metrics | synced
        metrics |= evaluate(run, fleet, trained=rollout_id + 1) | run.checkpoints.metrics()
        run.tracker.log(rollout_id, metrics | run_times(run))
        run.progress.rollout_done(rollout_id, metrics)
        run.next_rollout = rollout_id + 1

        with run.phase("checkpoint"):  # after the metrics, which it keeps
            run.checkpoints.save_if_due(fleet, rollout_id, report.policy_version)


def evaluate(run: Run, fleet: Fleet, trained: int) -> dict[str, float]:
    """Held-out metrics if an evaluation is due after `trained` rollouts, else none."""
    if not run.evaluator.is_due(trained, run.num_rollouts):
        return {}
    with run.phase("evaluate", total=len(run.evaluator.prompts)) as advance:
        return run.evaluator.run(fleet, run.context, trained, advance)


def advantages(rewards: RewardReport, std_mode: Literal["group", "batch", "none"]) -> Tensor:
    """[G, N] float64: every component normalised over the groups it applies to, combined by weight (T3, M4)."""
    components = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in rewards.components.items()}
    return combine_component_advantages(components, rewards.weights, applies=rewards.applies, std_mode=std_mode)


def _moved(metrics: dict[str, float]) -> bool:
    """Whether an optimizer step with a learning rate was taken, so that the weights on the wire must differ."""
    return metrics["train/optimizer_steps"] > 0 and metrics["train/lr"] > 0


def run_times(run: Run) -> dict[str, float]:
    """`perf/<phase>_time` of the rollout that ends, in seconds."""
    names = {"update": "train", "evaluate": "eval"}
    times = {f"perf/{names.get(name, name)}_time": seconds for name, seconds in run.seconds.items()}
    run.seconds.clear()
    return times
