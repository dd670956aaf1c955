"""How many transitions share a forward, and how many blocks recompute, when the settings do not say.

CPU: enough tokens to fill the cores and no more than the caches like. CUDA: as many as the memory holds,
decided from the measured cost of a row, not from a formula. Where the rows that fit are too few to fill the GPU,
the first blocks recompute their activations, as few as make them enough.
Called by: `actor`, once per run.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import all_reduced
from flowgrpo_fsdp_actor.plan import MicroBatch, Transition, join_forwards
from flowgrpo_fsdp_actor.recompute import recompute_first
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.update import Policy

log = logging.getLogger(__name__)
CPU_TOKENS = 3072
"""Image and text tokens of one forward on the CPU; the README has the measurement."""
CUDA_TOKENS = 8192
"""Tokens that fill a GPU: more of them in a forward are hardly faster, and recomputing a block costs more."""
MEMORY_SHARE = 0.85
"""Of the free device memory: the rest is for gradients, the allocator's gaps and the optimizer's first step."""
PROBE_ROWS = (1, 3)
PROBE_KEPT = 4
"""Blocks that keep their activations in the second pair of probes: few, so that a probe itself always fits."""


@dataclass(frozen=True)
class RowMemory:
    """Bytes of a forward and backward, from probes: `fixed`, and for each row what a block keeps."""

    fixed: float
    inputs: float
    """What a block that recomputes keeps of one row."""
    activations: float
    """What a block that does not keeps of it."""
    blocks: int

    @classmethod
    def of_peaks(cls, recomputed: tuple[float, float], kept: tuple[float, float], blocks: int) -> "RowMemory":
        """From the peaks of PROBE_ROWS rows: all blocks recomputing, and all but PROBE_KEPT of them.

        A row takes blocks * inputs + activations (of the one block that is run again) in the first, and
        (blocks - K) * inputs + K * activations in the second.
        """
        K = min(PROBE_KEPT, blocks)
        few, many = PROBE_ROWS
        first, second = (max(1.0, (peaks[1] - peaks[0]) / (many - few)) for peaks in (recomputed, kept))
        inputs = max(0.0, (K * first - second) / ((K - 1) * blocks + K))
        activations = max(1.0, first - blocks * inputs)
        return cls(max(0.0, recomputed[0] - first * few), inputs, activations, blocks)

    def row(self, recomputed: int) -> float:
        """Bytes of one row where `recomputed` blocks recompute."""
        return recomputed * self.inputs + max(1, self.blocks - recomputed) * self.activations

    def choose(self, available: float, wanted: int) -> tuple[int, int]:
        """(rows that fit, blocks that recompute): the fewest blocks with which `wanted` rows fit, else all."""
        for recomputed in range(self.blocks + 1):
            rows = int((available - self.fixed) // self.row(recomputed))
            if rows >= wanted:
                break
        return max(1, rows), recomputed


def choose_join(policy: Policy, replay: Replay, plan: Sequence[Sequence[MicroBatch]], config: ActorConfig) -> int:
    """Rows per forward, the same on every rank, and at most those of one update. Collective.

    Leaves as many blocks of the policy recomputing as that takes.
    """
    rows = [row for forward in join_forwards(plan[0], replay.shapes, 1) for row in forward]
    longest = max(rows, key=lambda row: replay.tokens(row.group))
    recomputed = len(policy.blocks) if config.fsdp_activation_checkpointing else 0
    if config.device == "cpu":
        fit = max(1, CPU_TOKENS // replay.tokens(longest.group))
    else:
        wanted = min(len(rows), ceil(CUDA_TOKENS / replay.tokens(longest.group)))
        memory = _probe(policy, replay, longest)
        available = MEMORY_SHARE * _free_bytes()
        if not config.fsdp_activation_checkpointing:
            fit, recomputed = memory.choose(available, wanted)
        else:
            fit = max(1, int((available - memory.fixed) // memory.row(recomputed)))
    fit, recomputed = _for_all_ranks(min(fit, len(rows)), recomputed)
    recompute_first(policy.blocks, recomputed)
    # Equal forwards rather than full ones and a remainder: one shape, and no rank waits for a stray row.
    forwards = ceil(len(rows) / fit)
    join = ceil(len(rows) / forwards)
    log.info("[replay] %d transitions in a forward, %d of %d blocks recompute", join, recomputed, len(policy.blocks))
    return join


def _for_all_ranks(fit: int, recomputed: int) -> tuple[int, int]:
    """The fewest rows and the most recomputation that any rank needs."""
    needs = all_reduced(torch.tensor([-fit, recomputed]), dist.ReduceOp.MAX).tolist()
    return -needs[0], needs[1]


def _probe(policy: Policy, replay: Replay, row: Transition) -> RowMemory:
    """Peaks of small forwards and backwards. Not compiled: eager blocks keep more, so what fits them fits compiled."""
    blocks = len(policy.blocks)
    peaks = []
    for recomputed in (blocks, max(0, blocks - PROBE_KEPT)):
        recompute_first(policy.blocks, recomputed)
        for count in PROBE_ROWS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.compiler.set_stance("force_eager"):
                replay.logp(policy.module, replay.batch([row] * count)).sum().backward()
            policy.optimizer.zero_grad(set_to_none=True)
            peaks.append(float(torch.cuda.max_memory_allocated() - before))
    return RowMemory.of_peaks((peaks[0], peaks[1]), (peaks[2], peaks[3]), blocks)


def _free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
