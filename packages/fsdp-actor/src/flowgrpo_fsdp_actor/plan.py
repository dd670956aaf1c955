"""Which transitions go into which update and which forward: pure Python, the same on every rank.

T6: an update is a disjoint share of the local samples, all of equal size; no sample is used twice.
T7: every rank walks the same groups in the same order, so that the collectives of FSDP meet.
Called by: `update`. Next on the reading path: `replay`.

Words: a *sample* is a candidate of a group, a *micro-batch* some samples of one group, a *transition* a sample
at one trained step, a *forward* the transitions that go through the model together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import NamedTuple

from flowgrpo_fsdp_actor.errors import PlanError


@dataclass(frozen=True)
class Join:
    """The rows of a replay forward, and what the policy's blocks do for them."""

    rows: int
    recomputed: int
    """Blocks that recompute their activations: the first ones."""
    gathered: int = 0
    """Blocks of FSDP2 that stay gathered from their forward to their backward: the last ones."""


@dataclass(frozen=True)
class Units:
    """The blocks that FSDP2 gathers one by one."""

    count: int
    nbytes: float
    """Of the largest, gathered, in the compute dtype."""

    def that_fit(self, available: float) -> int:
        """How many of them can stay gathered in so many bytes."""
        return min(self.count, max(0, int(available // self.nbytes)))


def join_of_memory(
    free: float,
    rows: int,
    fill: int,
    row_bytes: Callable[[int], float],
    blocks: int,
    *,
    recompute_all: bool,
    units: Units | None,
) -> Join:
    """How `free` bytes serve `rows` rows, of which `fill` fill the GPU; `row_bytes` of how many blocks recompute.

    The fewest blocks recompute with which `fill` rows fit in a forward, else all. Without `units` a forward takes as
    many rows as fit; with them no more than fill the GPU in forwards of one size, and the rest keeps blocks gathered.
    Asked by `join` with what probes measured and by `estimate` with formulas.
    """
    for recomputed in range(blocks if recompute_all else 0, blocks + 1):
        row = row_bytes(recomputed)
        if int(free // row) >= min(fill, rows):
            break
    fit = max(1, min(int(free // row), rows))
    if units is None:
        return Join(fit, recomputed)
    fit = min(fit, evenly(rows, max(1, rows // fill)))
    return Join(fit, recomputed, units.that_fit(free - evenly(rows, ceil(rows / fit)) * row))


def evenly(rows: int, forwards: int) -> int:
    """Rows of each of so many forwards: equal ones rather than full ones and a remainder, so that there is one shape
    and no rank waits for a stray row."""
    return -(-rows // forwards)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some candidates of one group, replayed by this rank."""

    group: int
    candidates: tuple[int, ...]


class Transition(NamedTuple):
    """One candidate at one trained step; `step` counts trained steps, not denoising steps."""

    group: int
    candidate: int
    step: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What decides whether two groups may share a forward."""

    height: int
    width: int
    num_steps: int
    text_tokens: int


def local_candidates(group_size: int, *, rank: int, world_size: int) -> tuple[int, ...]:
    """The candidates of each group that `rank` replays: its stride, or all where the world does not divide."""
    if group_size % world_size == 0:
        return tuple(range(rank, group_size, world_size))
    return tuple(range(group_size))


def plan_updates(
    num_groups: int,
    group_size: int,
    *,
    rank: int,
    world_size: int,
    num_updates: int,
    micro_batch_size: int,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of each update, in the order of the optimizer steps.

    `micro_batch_size` cuts a rank's share of a group into equal chunks where it divides it; otherwise (and at
    0) the share is one micro-batch. Raises PlanError where the updates would not be equal (T6).
    """
    slots = local_candidates(group_size, rank=rank, world_size=world_size)
    samples = num_groups * len(slots)
    if samples == 0:
        raise PlanError("this rollout holds no group", "raise --rollout-batch-size")
    if samples % num_updates:
        raise PlanError(
            f"--num-updates-per-batch {num_updates} does not divide this rank's {samples} samples "
            f"({num_groups} groups, {len(slots)} candidates each)",
            "choose a divisor: every update must be of the same size",
        )
    divides = 0 < micro_batch_size <= len(slots) and len(slots) % micro_batch_size == 0
    chunk = micro_batch_size if divides else len(slots)
    per_update = samples // num_updates
    if per_update % chunk:
        raise PlanError(
            f"a micro-batch of {chunk} candidates would cross the boundary of an update of {per_update} samples "
            f"(--num-updates-per-batch {num_updates}, {num_groups} groups, {len(slots)} candidates each)",
            f"set --micro-batch-size to a divisor of {per_update} that also divides {len(slots)}",
        )
    order = [
        MicroBatch(group, slots[first : first + chunk])
        for group in range(num_groups)
        for first in range(0, len(slots), chunk)
    ]
    batches = per_update // chunk
    return tuple(tuple(order[first : first + batches]) for first in range(0, len(order), batches))


def join_forwards(
    micro_batches: Sequence[MicroBatch], shapes: Sequence[GroupShape], join: int
) -> tuple[tuple[Transition, ...], ...]:
    """The transitions of one update, packed into forwards of at most `join` rows.

    Rows run by group, then step, then candidate: with `join` equal to the candidates of a micro-batch a
    forward is exactly one denoising step of it, the batch that the engine ran. Only groups of one size share a
    forward, and they are taken in the order of their text lengths, so that little text is padding.
    """

    def order(batch: MicroBatch) -> tuple[int, int, int]:
        shape = shapes[batch.group]
        return shape.height, shape.width, shape.text_tokens

    forwards: list[tuple[Transition, ...]] = []
    # `sorted` is stable and sees the same shapes on every rank: the order, too, is the same everywhere.
    for _, same_size in groupby(sorted(micro_batches, key=order), key=lambda batch: order(batch)[:2]):
        rows = [row for batch in same_size for row in _transitions(batch, shapes[batch.group].num_steps)]
        forwards += [tuple(rows[first : first + join]) for first in range(0, len(rows), join)]
    return tuple(forwards)


def _transitions(batch: MicroBatch, num_steps: int) -> Iterator[Transition]:
    for step in range(num_steps):
        for candidate in batch.candidates:
            yield Transition(batch.group, candidate, step)
