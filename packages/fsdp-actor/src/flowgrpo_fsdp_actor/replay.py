"""Replay: the stored transitions of a rollout through the policy again, many in one forward.

A row of a forward is one candidate at one trained step. Candidates, steps and groups are joined: rows of
groups whose texts differ in length are padded, with a mask that keeps the padding out of the attention. Compiled
blocks see texts of a few lengths only, the buckets.
Called by: `update`. Next on the reading path: `update`.

Shapes: as in `adapters.base`; R rows of a forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from flowgrpo_math import replay_transition_logp
from flowgrpo_rollout_sglang.config import SamplingConfig
from torch import Tensor, nn

from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter, PackedTrajectory, ReplayConditions
from flowgrpo_fsdp_actor.distributed import all_reduced
from flowgrpo_fsdp_actor.plan import GroupShape, MicroBatch, Transition, join_forwards

TEXT_BUCKET = 64
"""Where blocks are compiled, texts are padded to a multiple of this: a graph for each would be hundreds of them."""


@dataclass(frozen=True)
class ReplayBatch:
    """The inputs of one forward, on the policy's device (the schedule stays on the CPU)."""

    x_RPC: Tensor
    x_next_RPC: Tensor
    sigma_R: Tensor
    sigma_next_R: Tensor
    conditions: ReplayConditions
    advantages_R: Tensor


class Replay:
    """One rollout's trajectories, ready to be scored in any grouping of their transitions."""

    def __init__(
        self,
        adapter: GenerativeModelAdapter,
        groups: Sequence[PackedTrajectory],
        advantages_GN: Tensor,
        sampling: SamplingConfig,
        device: torch.device,
        *,
        compiled: bool = False,
    ):
        self._adapter = adapter
        self._groups = groups
        self._advantages_GN = advantages_GN.float().cpu()
        self._sampling = sampling
        self._device = device
        self._compiled = compiled
        self._embeds: dict[int, Tensor] = {}

    @property
    def shapes(self) -> list[GroupShape]:
        """What the plan needs to know of each group."""
        return [
            GroupShape(g.height, g.width, num_steps=g.sigma_S.shape[0], text_tokens=g.prompt_embeds_LE.shape[0])
            for g in self._groups
        ]

    @property
    def groups_and_candidates(self) -> tuple[int, int]:
        """(G, N)."""
        G, N = self._advantages_GN.shape
        return G, N

    def batch(self, rows: Sequence[Transition]) -> ReplayBatch:
        """Gathers `rows`, which must be of one image size, in the given order."""
        groups = [self._groups[row.group] for row in rows]
        picked = list(zip(groups, rows, strict=True))
        advantages = [self._advantages_GN[row.group, row.candidate] for row in rows]
        return ReplayBatch(
            x_RPC=self._joined([packed.x_NSPC[row.candidate, row.step] for packed, row in picked]),
            x_next_RPC=self._joined([packed.x_next_NSPC[row.candidate, row.step] for packed, row in picked]),
            sigma_R=torch.stack([packed.sigma_S[row.step] for packed, row in picked]),
            sigma_next_R=torch.stack([packed.sigma_next_S[row.step] for packed, row in picked]),
            conditions=self._conditions([row.group for row in rows]),
            advantages_R=self._to_device(torch.stack(advantages)),
        )

    def logp(self, policy: nn.Module, batch: ReplayBatch) -> Tensor:
        """float32 [R]: log-prob of each stored x_next under the policy's current weights, nats per element."""
        sampling = self._sampling
        velocity_RPC = self._adapter.replay_transition(
            policy, batch.x_RPC, self._to_device(batch.sigma_R.float()), batch.conditions
        )
        return replay_transition_logp(
            batch.x_RPC,
            velocity_RPC,
            batch.x_next_RPC,
            batch.sigma_R,
            batch.sigma_next_R,
            sde_type=sampling.sde_type,
            eta=sampling.eta,
            sigma_max=sampling.sigma_max,
            backend="triton" if self._device.type == "cuda" else "torch",
            # A gradient that is not finite skips its optimizer step, on every device and on all ranks alike.
            check_finite=False,
        )

    def score(self, policy: nn.Module, batch: ReplayBatch) -> Tensor:
        """`logp` bit for bit, without a gradient: anchors and parity.

        Where gradients are off, compiled blocks are another graph with other roundings. So there they stay on, and
        what the forward kept for a backward is let go.
        """
        with torch.set_grad_enabled(self._compiled):
            return self.logp(policy, batch).detach()

    def engine_logp(self, rows: Sequence[Transition]) -> Tensor:
        """float32 [R] on the CPU: what the engine said of the same transitions."""
        return torch.stack([self._groups[row.group].engine_logp_NS[row.candidate, row.step] for row in rows])

    def tokens(self, group: int) -> int:
        """Image and text tokens of one row of `group`, its text padded to its bucket."""
        packed = self._groups[group]
        return packed.x_NSPC.shape[2] + self._padded(packed.prompt_embeds_LE.shape[0])

    def parity(self, policy: nn.Module, micro_batches: Sequence[MicroBatch], join: int) -> dict[int, float]:
        """Largest |ratio - 1| over the ranks of replay against the engine's log-probs, by trained step index."""
        worst: dict[int, float] = {k: 0.0 for group in self._groups for k in group.step_indices}
        for rows in join_forwards(micro_batches, self.shapes, join):
            apart = self.score(policy, self.batch(rows)).double().cpu() - self.engine_logp(rows).double()
            for row, ratio_off in zip(rows, torch.expm1(apart).abs().tolist(), strict=True):
                step = self._groups[row.group].step_indices[row.step]
                worst[step] = max(worst[step], ratio_off)
        reduced = all_reduced(torch.tensor(list(worst.values()), dtype=torch.float64), dist.ReduceOp.MAX)
        return dict(zip(worst, reduced.tolist(), strict=True))

    def _conditions(self, groups: Sequence[int]) -> ReplayConditions:
        first = self._groups[groups[0]]
        members = list(dict.fromkeys(groups))
        embeds = [self._group_embeds(group) for group in members]
        lengths = torch.tensor([e.shape[0] for e in embeds])
        width = self._padded(int(lengths.max()))
        if len(members) == 1 and width == int(lengths[0]):
            return ReplayConditions(embeds[0][None].expand(len(groups), -1, -1), None, first.height, first.width)
        row_of = torch.tensor([members.index(group) for group in groups])
        padded_MLE = torch.stack([nn.functional.pad(e, (0, 0, 0, width - e.shape[0])) for e in embeds])
        mask_RL = None
        if bool((lengths != width).any()):
            mask_RL = self._to_device(torch.arange(width) < lengths[row_of, None])
        return ReplayConditions(padded_MLE[self._to_device(row_of)], mask_RL, first.height, first.width)

    def _padded(self, text_tokens: int) -> int:
        bucket = TEXT_BUCKET if self._compiled else 1
        return -(-text_tokens // bucket) * bucket

    def _group_embeds(self, group: int) -> Tensor:
        """[L, E] of one prompt, sent to the device once a rollout."""
        if group not in self._embeds:
            self._embeds[group] = self._to_device(self._groups[group].prompt_embeds_LE)
        return self._embeds[group]

    def _joined(self, states_PC: Sequence[Tensor]) -> Tensor:
        """[R, P, C] on the device.

        numpy copies on this thread alone. torch would wake all threads of the process for these few MB, and wait for
        each: 46 ms a forward instead of 1 were seen with 32 threads beside another busy process.
        """
        shape, on_gpu = (len(states_PC), *states_PC[0].shape), self._device.type == "cuda"
        joined_RPC = torch.empty(shape, dtype=states_PC[0].dtype, pin_memory=on_gpu)
        np.stack([state_PC.numpy() for state_PC in states_PC], out=joined_RPC.numpy())
        return joined_RPC.to(self._device, non_blocking=True)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
