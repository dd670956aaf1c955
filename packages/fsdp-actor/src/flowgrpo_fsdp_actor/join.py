"""How many transitions share a forward, how many blocks recompute and stay gathered, when the settings do not say.

CPU: enough tokens to fill the cores and no more than the caches like. CUDA: as many as the memory holds, decided from
the measured cost of a row, not from a formula; a rollout with longer texts has fewer rows in a forward. Where the rows
that fit are too few to fill the GPU, the first blocks recompute their activations, as few as make them enough. Under
FSDP2 memory beyond that keeps the last blocks gathered between forward and backward: where a forward fills the GPU,
that saves more than further rows would.
Called by: `actor`, once per run.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import all_reduced
from flowgrpo_fsdp_actor.optimizer import missing_moments
from flowgrpo_fsdp_actor.plan import Join, MicroBatch, Transition, Units, evenly, join_of_memory
from flowgrpo_fsdp_actor.recompute import recompute_first
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.sharding import DTYPES, gathered_units, keep_gathered
from flowgrpo_fsdp_actor.update import Policy

log = logging.getLogger(__name__)
CPU_TOKENS = 3072
"""Image and text tokens of one forward on the CPU; the README has the measurement."""
CUDA_TOKENS = 8192
"""Tokens that fill a GPU: more of them in a forward are hardly faster, and recomputing a block costs more."""
MEMORY_SHARE = 0.85
"""Of the device memory that is free once AdamW has its moments: the rest is for gradients and the allocator's gaps."""
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

    def choose(
        self, available: float, rows: int, fill: int, *, recompute_all: bool = False, units: Units | None = None
    ) -> Join:
        """How `available` bytes serve `rows` rows, of which `fill` fill the GPU: `plan.join_of_memory`."""
        free = available - self.fixed
        return join_of_memory(free, rows, fill, self.row, self.blocks, recompute_all=recompute_all, units=units)

    def rows_beside(self, available: float, join: Join, units: Units | None) -> int:
        """How many rows would fit, with what `join` recomputes and keeps gathered; at least those of `join`."""
        gathered = join.gathered * units.nbytes if units else 0.0
        return max(join.rows, int((available - self.fixed - gathered) // self.row(join.recomputed)))


@dataclass(frozen=True)
class ForwardLimit:
    """How much a forward may hold. Set once a run; good for rollouts with texts of any length."""

    sizes: Sequence[int]
    """The rows that it may have."""
    tokens: int
    """Image and text tokens of all its rows, padding included."""

    def rows_of(self, replay: Replay, plan: Sequence[Sequence[MicroBatch]]) -> int:
        """Rows of each forward of this rollout: what its longest text leaves room for, in forwards of one size."""
        count, longest = rows_of_update(replay, plan), replay.tokens(longest_group(replay, plan))
        fit = max((size for size in self.sizes if size * longest <= self.tokens), default=1)
        return evenly(count, ceil(count / min(fit, count)))


def few_sizes(most: int) -> list[int]:
    """`most` and three quarters of it, then the halves of both, and so on down to 1.

    Each size of a forward is a graph to compile for each bucket of text: so a run has few of them.
    """
    sizes = {most >> halvings for halvings in range(most.bit_length())}
    return sorted(sizes | {3 * most >> halvings for halvings in range(2, most.bit_length() + 1)} - {0}, reverse=True)


def choose_join(
    policy: Policy, replay: Replay, plan: Sequence[Sequence[MicroBatch]], config: ActorConfig
) -> ForwardLimit:
    """What a forward may hold, the same on every rank. Collective.

    Leaves as many blocks of the policy recomputing as that takes, and as many gathered as the memory then allows.
    """
    rows, longest = rows_of_update(replay, plan), longest_group(replay, plan)
    tokens = replay.tokens(longest)
    if config.device == "cpu":
        recompute_first(policy.blocks, len(policy.blocks) if config.fsdp_activation_checkpointing else 0)
        return ForwardLimit(range(1, rows + 1), CPU_TOKENS)
    units, fill = _units(policy, config), ceil(CUDA_TOKENS / tokens)
    memory = _probe(policy, replay, _a_row_of(longest, plan))
    available = MEMORY_SHARE * (_free_bytes() - missing_moments(policy.optimizer))
    mine = memory.choose(available, rows, fill, recompute_all=config.fsdp_activation_checkpointing, units=units)
    join, fit = _for_all_ranks(mine, memory.rows_beside(available, mine, units))
    recompute_first(policy.blocks, join.recomputed)
    if config.fsdp_reshard_after_forward:
        keep_gathered(policy.module, join.gathered)
    limit = ForwardLimit(few_sizes(join.rows), fit * tokens)
    counts = (join.rows, limit.tokens, len(policy.blocks), join.recomputed, join.gathered)
    log.info("[replay] up to %d rows and %d tokens in a forward; of %d blocks %d recompute, %d stay gathered", *counts)
    return limit


def _units(policy: Policy, config: ActorConfig) -> Units | None:
    """None where nothing is gathered, or where `fsdp_reshard_after_forward` leaves all of it gathered anyhow."""
    units = gathered_units(policy.module)
    if not units or not config.fsdp_reshard_after_forward:
        return None
    numels = [sum(p.numel() for p in unit.parameters() if isinstance(p, DTensor)) for unit in units]
    return Units(len(units), float(max(numels) * DTYPES[config.fsdp_param_dtype].itemsize))


def rows_of_update(replay: Replay, plan: Sequence[Sequence[MicroBatch]]) -> int:
    """This rank's rows of an optimizer step; every step has as many, on every rank."""
    return sum(len(batch.candidates) * replay.shapes[batch.group].num_steps for batch in plan[0])


def longest_group(replay: Replay, plan: Sequence[Sequence[MicroBatch]]) -> int:
    """The group with most tokens in a row, of all updates."""
    return max((batch.group for update in plan for batch in update), key=replay.tokens)


def _a_row_of(group: int, plan: Sequence[Sequence[MicroBatch]]) -> Transition:
    candidates = next(batch.candidates for update in plan for batch in update if batch.group == group)
    return Transition(group, candidates[0], 0)


def _for_all_ranks(join: Join, fit: int) -> tuple[Join, int]:
    """The fewest rows, the most recomputation and the fewest gathered blocks that any rank needs."""
    needs = torch.tensor([-join.rows, join.recomputed, -join.gathered, -fit])
    rows, recomputed, gathered, fit = all_reduced(needs, dist.ReduceOp.MAX).tolist()
    return Join(-rows, recomputed, -gathered), -fit


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
