"""The optimizer steps of one rollout: plan, frozen anchors, clipped loss, AdamW (T4, T6).

Left out on purpose: a KL term and a reference model (S4), and any reuse of a sample.

The anchors of all updates are the log-probs of the policy that sampled, so all are fixed before any weight
moves. The first update needs no pass for it: its own forward is its anchor, and its ratio is exactly 1.
Later updates are scored first, without gradients, in the same forwards that train them later, so that nothing
but the change of the weights moves their ratio.
Called by: `actor`. Next on the reading path: `flowgrpo_trainer/sync.py`.

Shapes: as in `replay`; U updates.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from flowgrpo_math import grpo_clip_loss
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import all_reduced
from flowgrpo_fsdp_actor.errors import MicroBatchCountMismatch, ReplayMismatch
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.optimizer import (
    average_whole_gradients,
    fingerprint,
    gradient_norm,
    lr_at_step,
    scale_gradients,
)
from flowgrpo_fsdp_actor.out_of_memory import OPTIMIZER, REPLAY, memory_phase
from flowgrpo_fsdp_actor.plan import MicroBatch, Transition, join_forwards
from flowgrpo_fsdp_actor.recompute import RecomputableForward
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.sharding import DTYPES

log = logging.getLogger(__name__)
DEGENERATE_VARIANCE = 1e-6
Forwards = Sequence[Sequence[Transition]]


@dataclass
class Policy:
    """The trained model, its optimizer, and how many optimizer steps the learning rate has seen."""

    module: nn.Module
    trainable: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    blocks: list[RecomputableForward]
    lr_scheduler_steps: int = 0


def is_degenerate(advantages_GN: Tensor) -> bool:
    """Whether a rollout has nothing to learn from: the variance of its advantages is below 1e-6 (F6)."""
    return float(advantages_GN.double().var(unbiased=False)) < DEGENERATE_VARIANCE


def run_updates(
    policy: Policy, replay: Replay, plan: Sequence[Sequence[MicroBatch]], join: int, config: ActorConfig, label: str
) -> dict[str, float]:
    """Takes one optimizer step per update of `plan` and returns the metrics. Collective.

    Raises: MicroBatchCountMismatch before anything moved; ReplayMismatch, on all ranks together, if the first
    update's explicit anchor (`fsdp_debug_fingerprint`) is not its own forward, bit for bit.
    """
    updates = [join_forwards(micro_batches, replay.shapes, join) for micro_batches in plan]
    _check_counts(sum(map(len, plan)), sum(map(len, updates)))
    anchors = _freeze_anchors(policy, replay, updates, config, label)
    statistics, steps = ReplayStatistics(), StepCounts()
    for index, (forwards, anchor) in enumerate(zip(updates, anchors, strict=True)):
        with memory_phase(REPLAY):
            ratios = accumulate_gradients(policy, replay, forwards, anchor, config, statistics)
        if index == 0 and anchor is not None:
            _check_first_ratio(ratios)
        with memory_phase(OPTIMIZER):
            _optimizer_step(policy, config, steps)
    return statistics.reduced() | steps.metrics() | {"train/num_microbatches": float(sum(map(len, plan)))}


def _check_counts(micro_batches: int, forwards: int) -> None:
    """T7: a rank with one forward more would wait in a collective that the others never enter."""
    mine = (micro_batches, forwards)
    bounds = all_reduced(torch.tensor([*mine, -micro_batches, -forwards]), dist.ReduceOp.MAX).tolist()
    if (bounds[0], bounds[1]) != (-bounds[2], -bounds[3]):
        raise MicroBatchCountMismatch(dist.get_rank(), mine, (bounds[0], bounds[1]))


def _freeze_anchors(
    policy: Policy, replay: Replay, updates: Sequence[Forwards], config: ActorConfig, label: str
) -> list[list[Tensor] | None]:
    """For each update and forward the log-probs [R] before any step; None for the first update's own forward."""
    explicit_first = config.fsdp_debug_fingerprint
    anchors: list[list[Tensor] | None] = []
    for index, forwards in enumerate(updates):
        if index == 0 and not explicit_first:
            anchors.append(None)
            continue
        anchors.append([replay.score(policy.module, replay.batch(rows)) for rows in forwards])
    if explicit_first:
        _log_parity(replay, updates, anchors, label)
    return anchors


def accumulate_gradients(
    policy: Policy,
    replay: Replay,
    forwards: Forwards,
    anchors: list[Tensor] | None,
    config: ActorConfig,
    statistics: ReplayStatistics,
) -> list[Tensor]:
    """Leaves in `.grad` the gradient of the update's mean loss over all its (sample, step) pairs and ranks.

    Returns the ratios of each forward.
    """
    rows_of_update = sum(map(len, forwards))
    sharded = policy.module if isinstance(policy.module, FSDPModule) else None
    ratios = []
    for index, rows in enumerate(forwards):
        batch = replay.batch(rows)
        if sharded is not None:
            sharded.set_is_last_backward(index == len(forwards) - 1)
        logp_R = replay.logp(policy.module, batch)
        anchor_R = logp_R.detach() if anchors is None else anchors[index]
        loss = grpo_clip_loss(
            logp_R[:, None],
            anchor_R[:, None],
            batch.advantages_R,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            check_finite=False,
        )
        (loss.loss * (len(rows) / rows_of_update)).backward()
        statistics.add(loss)
        ratios.append(loss.ratio_BS)
    average_whole_gradients(policy.trainable, DTYPES[config.fsdp_reduce_dtype])
    return ratios


@dataclass
class StepCounts:
    """The optimizer steps of one rollout."""

    taken: int = 0
    skipped: int = 0
    norm_sum: float = 0.0
    lr: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            "train/grad_norm": self.norm_sum / self.taken if self.taken else float("nan"),
            "train/lr": self.lr,
            "train/optimizer_steps": float(self.taken),
            "train/optimizer_skips": float(self.skipped),
        }


def _optimizer_step(policy: Policy, config: ActorConfig, counts: StepCounts) -> None:
    """Clips and steps; a gradient that is not finite is dropped and counted, on all ranks together."""
    norm = float(gradient_norm(policy.trainable))  # the one wait for the device per optimizer step
    counts.lr = lr_at_step(policy.lr_scheduler_steps, config)
    if not torch.isfinite(torch.tensor(norm)):
        counts.skipped += 1
        log.warning("[optimizer] skipped a step: the gradient norm is %s", norm)
    else:
        if config.clip_grad > 0 and norm > config.clip_grad:
            scale_gradients(policy.trainable, config.clip_grad / (norm + 1e-6))
        _step_with_fingerprint(policy, config, counts.lr)
        policy.lr_scheduler_steps += 1
        counts.taken += 1
        counts.norm_sum += norm
    policy.optimizer.zero_grad(set_to_none=True)


def _step_with_fingerprint(policy: Policy, config: ActorConfig, lr: float) -> None:
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    before = fingerprint(policy.trainable) if config.fsdp_debug_fingerprint else None
    policy.optimizer.step()
    if before is not None:
        after = fingerprint(policy.trainable)
        if _is_first_rank():
            step = policy.lr_scheduler_steps
            log.info("[fingerprint] optimizer step %d: sum |w| %r -> %r, lr %.3e", step, before, after, lr)


def _check_first_ratio(ratios: Sequence[Tensor]) -> None:
    ratio = torch.cat([r.flatten() for r in ratios]).double()
    highest, lowest = all_reduced(torch.stack([ratio.max(), -ratio.min()]), dist.ReduceOp.MAX).tolist()
    if not (highest == 1.0 and lowest == -1.0):
        raise ReplayMismatch(0, -lowest, highest)


def _log_parity(
    replay: Replay, updates: Sequence[Forwards], anchors: Sequence[list[Tensor] | None], label: str
) -> None:
    """F5: one line, the replayed anchors of all transitions against the engine's own log-probs."""
    rows = [row for forwards in updates for rows in forwards for row in rows]
    replayed = torch.cat([logp for update in anchors for logp in update or ()]).double().cpu()
    apart = (replayed - replay.engine_logp(rows).double()).abs()
    total, count = all_reduced(torch.stack([apart.sum(), torch.tensor(float(len(rows)))]), dist.ReduceOp.SUM).tolist()
    worst = float(all_reduced(apart.max(), dist.ReduceOp.MAX))
    if _is_first_rank():
        log.info(
            "[logp parity] %s: |replayed - engine| mean %.3e, max %.3e nats per element over %d transitions",
            label,
            total / count,
            worst,
            int(count),
        )


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
