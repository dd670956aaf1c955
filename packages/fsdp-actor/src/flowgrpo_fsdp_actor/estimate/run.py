"""One recipe's estimate: phases, seconds, whether it fits, and what to change if it does not, or to be faster.

What to change is not a list of advice: each change is estimated too, and only those that help are named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.estimate.architecture import ModelSize
from flowgrpo_fsdp_actor.estimate.cards import GIB, Card
from flowgrpo_fsdp_actor.estimate.memory import MemoryModel, Phase, RunShape
from flowgrpo_fsdp_actor.estimate.speed import replay_seconds, rollout_seconds, waits_for_host

TIGHT = 0.94
"""Above this share of the card a run may still fail: the allocator held 2.4 to 5.5 % more than the tensors' peak in six
runs of the actor on the H200 (2026-11-30), and no formula here knows how much."""
MOST_CARDS = 1024
WORTH_A_CHANGE = 0.98
"""Of the seconds of a rollout: a change that saves less is not named."""


@dataclass(frozen=True)
class Remedy:
    """A change of settings, and the largest phase with it."""

    change: str
    peak: float


@dataclass(frozen=True)
class Speedup:
    """A change of settings that spends memory on time, the largest phase with it, and the seconds of a rollout."""

    change: str
    peak: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """What `estimate_run` found. Bytes and seconds of one card."""

    card: Card
    world_size: int
    phases: list[Phase]
    seconds: dict[str, float]
    join: int
    """Transitions of a replay forward."""
    recomputed: int
    """Blocks that recompute their activations, of `blocks`."""
    gathered: int
    """Blocks that stay gathered from their forward to their backward because memory allows it, of `blocks`."""
    blocks: int
    transitions_per_s: float
    """Of one card, while it replays."""
    waits_for_host: bool
    """A replay forward is so small that the host's processor, which launches it, decides how long it takes."""
    trained: int
    """Parameters that move."""
    parameters: int
    """Of the transformer, without adapters."""
    host_bytes: float
    """Host memory that one card's sleepers take."""
    remedies: list[Remedy]
    """What makes it fit; empty where it fits, or where nothing that was tried does."""
    speedups: list[Speedup]
    """What makes it faster and still fits with room to spare."""

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.card.memory

    @property
    def tight(self) -> bool:
        return self.fits and self.worst.total > TIGHT * self.card.memory

    def as_json(self) -> dict[str, Any]:
        """Plain values; memory in GiB."""
        return {
            "card": self.card.name,
            "card_measured": self.card.measured,
            "card_gib": self.card.memory / GIB,
            "cards": self.world_size,
            "fits": self.fits,
            "tight": self.tight,
            "worst_phase": self.worst.name,
            "peak_gib": {phase.name: phase.total / GIB for phase in self.phases},
            "parts_gib": {phase.name: {k: v / GIB for k, v in phase.parts.items()} for phase in self.phases},
            "host_gib_per_card": self.host_bytes / GIB,
            "seconds": self.seconds | {"total": sum(self.seconds.values())},
            "replay_join": self.join,
            "recomputed_blocks": self.recomputed,
            "gathered_blocks": self.gathered,
            "transitions_per_s_per_card": self.transitions_per_s,
            "replay_waits_for_host": self.waits_for_host,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "remedies": [{"change": r.change, "peak_gib": r.peak / GIB} for r in self.remedies],
            "speedups": [{"change": s.change, "peak_gib": s.peak / GIB, "seconds": s.seconds} for s in self.speedups],
        }


def estimate_run(model: ModelSize, config: ActorConfig, run: RunShape, card: Card) -> Estimate:
    """Memory and time of a recipe on `run.world_size` cards. Raises TrainableBoundaryError for an unknown target."""
    memory = MemoryModel(model, config, run, card)
    phases, join, seconds = memory.phases(), memory.join(), rollout_seconds(memory)
    worst = max(phase.total for phase in phases)
    return Estimate(
        card=card,
        world_size=run.world_size,
        phases=phases,
        seconds=seconds,
        join=join.rows,
        recomputed=join.recomputed,
        gathered=join.gathered,
        blocks=model.transformer.blocks,
        transitions_per_s=join.rows / replay_seconds(memory, join.rows, join.recomputed, join.gathered),
        waits_for_host=waits_for_host(memory, join.rows, join.recomputed),
        trained=memory.trained,
        parameters=model.transformer.parameters,
        host_bytes=memory.host_bytes(),
        remedies=list(_remedies(model, config, run, card)) if worst > card.memory else [],
        speedups=list(_speedups(memory, sum(seconds.values()))) if worst <= card.memory else [],
    )


def _remedies(model: ModelSize, config: ActorConfig, run: RunShape, card: Card) -> Iterator[Remedy]:
    """Each single change that fits; then the number of cards that does."""
    for change, new_config, new_run in _changes(config, run):
        peak = _peak(model, new_config, new_run, card)
        if peak <= card.memory:
            yield Remedy(change, peak)
    memory = MemoryModel(model, config, run, card)
    for join in range(memory.join().rows - 1, 0, -1):
        if (peak := _peak(model, replace(config, replay_join=join), run, card)) <= card.memory:
            yield Remedy(f"--replay-join {join}", peak)
            break
    cards = run.world_size * 2
    while cards <= MOST_CARDS:
        if (peak := _peak(model, config, replace(run, world_size=cards), card)) <= card.memory:
            yield Remedy(f"{cards} cards (--resource)", peak)
            break
        cards *= 2


def _speedups(memory: MemoryModel, now: float) -> Iterator[Speedup]:
    """Each single change that is worth it, beside a rollout of `now` seconds."""
    config, card = memory.config, memory.card
    changes = []
    if memory.sharded and config.fsdp_reshard_after_forward:
        changes.append(("--no-fsdp-reshard-after-forward", replace(config, fsdp_reshard_after_forward=False)))
    if config.fsdp_activation_checkpointing:
        without = replace(config, fsdp_activation_checkpointing=False)
        changes.append(("without --fsdp-activation-checkpointing", without))
    for change, new_config in changes:
        changed = MemoryModel(memory.model, new_config, memory.run, card)
        seconds, peak = sum(rollout_seconds(changed).values()), max(phase.total for phase in changed.phases())
        if peak <= TIGHT * card.memory and seconds <= WORTH_A_CHANGE * now:
            yield Speedup(change, peak, seconds)


def _changes(config: ActorConfig, run: RunShape) -> Iterator[tuple[str, ActorConfig, RunShape]]:
    if not run.offload_train:
        yield "--offload-train", config, replace(run, offload_train=True)
    if not run.offload_rollout:
        yield "--offload-rollout", config, replace(run, offload_rollout=True)
    if not (run.offload_train or run.offload_rollout):
        yield "--offload-train --offload-rollout", config, replace(run, offload_train=True, offload_rollout=True)
    if not config.fsdp_activation_checkpointing:
        yield "--fsdp-activation-checkpointing", replace(config, fsdp_activation_checkpointing=True), run
    if not config.fsdp_reshard_after_forward:
        yield "without --no-fsdp-reshard-after-forward", replace(config, fsdp_reshard_after_forward=True), run
    if run.engine_rows > 8:
        yield "--candidates-per-forward 8", config, replace(run, candidates_per_forward=8)
    if run.bucket_mb > 256:
        yield "--weight-sync-bucket-size-mb 256", config, replace(run, bucket_mb=256)


def _peak(model: ModelSize, config: ActorConfig, run: RunShape, card: Card) -> float:
    return max(phase.total for phase in MemoryModel(model, config, run, card).phases())
