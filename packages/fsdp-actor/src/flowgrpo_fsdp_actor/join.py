"""How many transitions share a forward when the settings do not say.

CPU: enough tokens to fill the cores and no more than the caches like. CUDA: as many as the memory holds,
decided from the measured cost of a row, not from a formula.
Called by: `actor`, once per run.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import all_reduced
from flowgrpo_fsdp_actor.plan import MicroBatch, Transition, join_forwards
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.update import Policy

CPU_TOKENS = 3072
"""Image and text tokens of one forward on the CPU; the README has the measurement."""
MEMORY_SHARE = 0.85
"""Of the free device memory: the rest is for gradients, the allocator's gaps and the optimizer's first step."""
PROBE_ROWS = (2, 6)


def choose_join(policy: Policy, replay: Replay, plan: Sequence[Sequence[MicroBatch]], config: ActorConfig) -> int:
    """Rows per forward, the same on every rank, and at most those of one update. Collective."""
    rows = [row for forward in join_forwards(plan[0], replay.shapes, 1) for row in forward]
    longest = max(rows, key=lambda row: replay.tokens(row.group))
    if config.device == "cpu":
        fit = max(1, CPU_TOKENS // replay.tokens(longest.group))
    else:
        fit = _rows_that_fit(policy, replay, longest)
    fit = int(all_reduced(torch.tensor([-min(fit, len(rows))]), dist.ReduceOp.MAX).neg())
    # Equal forwards rather than full ones and a remainder: one shape, and no rank waits for a stray row.
    forwards = -(-len(rows) // fit)
    return -(-len(rows) // forwards)


def _rows_that_fit(policy: Policy, replay: Replay, row: Transition) -> int:
    """From the peak memory of two probes, forward and backward, whose difference is the cost of a row."""
    peaks = []
    for count in PROBE_ROWS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        replay.logp(policy.module, replay.batch([row] * count)).sum().backward()
        policy.optimizer.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    per_row = max(1.0, (peaks[1] - peaks[0]) / (PROBE_ROWS[1] - PROBE_ROWS[0]))
    fixed = max(0.0, peaks[0] - per_row * PROBE_ROWS[0])
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return max(1, int((MEMORY_SHARE * free - fixed) // per_row))
