"""What each spawned rank of `test_two_ranks` runs: every case in turn, so that torch is imported once."""

import errno
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, checkpoint_files, gather, init_process_group, sharding
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree, save_checkpoint
from flowgrpo_fsdp_actor.lora import is_lora
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.plan import join_forwards
from flowgrpo_fsdp_actor.sharding import gathered_units, keep_gathered
from flowgrpo_fsdp_actor.update import accumulate_gradients
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers
from torch.distributed.tensor import DTensor

from .saver import documents

BALLAST = 256 << 20
"""Bytes that rank 1 of two holds for nothing, so that the ranks' memory differs."""


@dataclass(frozen=True)
class Case:
    """One setting to train with, on one rank or on two."""

    name: str
    group_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    stay_gathered: int = 0
    """Blocks of FSDP2, as `choose_join` finds on a GPU."""


@dataclass
class Outcome:
    """What must not depend on the number of ranks."""

    gradients: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    published: dict[str, torch.Tensor]


def config_of(case: Case, folder: Path, sampling: Any) -> ActorConfig:
    common = {"fsdp_param_dtype": "fp32", "lr": 1e-3, "eps_clip": 1e-3, "replay_join": 6, "clip_grad": 0.01}
    common |= {"replay_compile": False}  # on a GPU: a minute for each shape, and held to in test_gpu_replay
    return ActorConfig(
        model_path=str(folder),
        sampling=sampling,
        n_samples_per_prompt=case.group_size,
        **(common | case.settings),
    )


def run_case(case: Case, config: ActorConfig, sidecars: list[Path], rank: int, world_size: int) -> Outcome:
    """The gradients of the first update, then two rollouts of training, then everything that is published."""
    actor = FsdpActor(config, rank, world_size)
    advantages = advantages_of(case, len(sidecars))
    policy = actor._policy
    if case.stay_gathered:
        keep_gathered(policy.module, case.stay_gathered)
    replay = actor._replay(sidecars, advantages)
    plan = actor._plan(*advantages.shape, num_updates=1)
    forwards = join_forwards(plan[0], replay.shapes, 6)
    if world_size > 1:
        _check_what_stays_gathered(
            actor, case, sidecars, lambda: replay.score(policy.module, replay.batch(forwards[0]))
        )
    accumulate_gradients(policy, replay, forwards, None, config, ReplayStatistics())
    named = [(strip_transport_wrappers(n), p) for n, p in policy.module.named_parameters() if p.requires_grad]
    # The last block's text stream leads nowhere, so some weights of a full model have no gradient.
    gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}
    policy.optimizer.zero_grad(set_to_none=True)
    metrics = [actor.update(rollout, sidecars, advantages).metrics for rollout in range(2)]
    weights = {name: whole(p.data) for name, p in named}
    published = {name: tensor.cpu().clone() for name, tensor in actor.wire_tensors()}
    assert [(name, tuple(t.shape)) for name, t in published.items()] == actor.wire_manifest_entries()
    return Outcome(gradients, metrics, weights, published)


def _check_what_stays_gathered(
    actor: FsdpActor, case: Case, sidecars: list[Path], forward: Callable[[], object]
) -> None:
    """After a forward without a backward, and after the parity check, beside which the engine may need the memory."""
    units = gathered_units(actor._policy.module)

    def gathered() -> list[bool]:
        return [not any(isinstance(p, DTensor) for p in unit.parameters()) for unit in units]

    forward()
    kept = len(units) if not actor.config.fsdp_reshard_after_forward else case.stay_gathered
    assert gathered() == [False] * (len(units) - kept) + [True] * kept
    actor.replay_parity(sidecars)
    assert all(isinstance(p, DTensor) for name, p in actor._policy.module.named_parameters() if not is_lora(name))


def advantages_of(case: Case, groups: int) -> torch.Tensor:
    return torch.randn(groups, case.group_size, generator=torch.Generator().manual_seed(7))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def rank_main(
    rank: int, world_size: int, port: int, jobs: list[tuple[Case, ActorConfig, list[Path]]], out: Path
) -> None:
    """Runs all jobs as one of `world_size` ranks; rank 0 leaves {case name: Outcome} in `out`."""
    torch.set_num_threads(1)
    device = jobs[0][1].device
    if device == "cuda":
        torch.cuda.set_device(rank)
    if world_size > 1:
        init_process_group(rank, world_size, "127.0.0.1", port, device)
    ballast = torch.ones(BALLAST if rank == 1 else 0, dtype=torch.uint8, device=device)
    outcomes = {case.name: run_case(case, config, sidecars, rank, world_size) for case, config, sidecars in jobs}
    del ballast
    if rank == 0:
        out.write_bytes(pickle.dumps(outcomes))


PHASES = ("loading", "parity", "preparing", "forward", "backward", "optimizer", "publishing", "sleep", "wake")
"""In the order of a run, and of `_turn`."""


def failing_rank_main(rank: int, ports: list[int], job: tuple[Case, ActorConfig, list[Path]], out: Path) -> None:
    """Two ranks of which rank 1 fails in each phase in turn; leaves {phase: (error that it saw, seconds)}."""
    torch.set_num_threads(1)
    gather.CHUNK_BYTES = 2**16  # many gathers, also of a tiny model
    seen = {phase: _fail_in(phase, rank, port, job) for phase, port in zip(PHASES, ports, strict=True)}
    out.with_suffix(f".{rank}").write_bytes(pickle.dumps(seen))


def _fail_in(
    phase: str, rank: int, port: int, job: tuple[Case, ActorConfig, list[Path]]
) -> tuple[Exception | None, float]:
    case, config, sidecars = job
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(rank, 2, "127.0.0.1", port, config.device)
    fill, started = sharding._fill, time.perf_counter()
    try:
        if rank == 1 and phase == "loading":
            sharding._fill = _failing(phase)
        actor = FsdpActor(config, rank, 2)
        if rank == 1:
            break_phase(actor, phase)
        _turn(actor, case, sidecars, fewer=rank == 1 and phase == "preparing")
    except Exception as error:
        return error, time.perf_counter() - started
    finally:
        sharding._fill = fill
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return None, time.perf_counter() - started


def _turn(actor: FsdpActor, case: Case, sidecars: list[Path], *, fewer: bool) -> None:
    """What a run asks of its ranks, in order, and the next update."""
    advantages = advantages_of(case, len(sidecars))
    actor.replay_parity(sidecars)
    actor.update(0, sidecars[:-1] if fewer else sidecars, advantages)
    list(actor.wire_tensors())
    actor.sleep()
    actor.wake()
    actor.update(1, sidecars, advantages)


def _failing(phase: str) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError(f"a test's fault in {phase}")

    return fail


def break_phase(actor: FsdpActor, phase: str) -> None:
    """Makes `actor` raise a MemoryError in `phase`."""
    fail = _failing(phase)
    block = actor._policy.module.get_submodule("transformer_blocks.1")
    if phase == "parity":
        actor._adapter.replay_transition = fail
    elif phase == "forward":  # of the update: the parity check runs without gradients
        block.register_forward_hook(lambda *_: fail() if torch.is_grad_enabled() else None)
    elif phase == "backward":
        block.register_full_backward_pre_hook(fail)
    elif phase == "optimizer":
        actor._policy.optimizer.register_step_pre_hook(fail)
    elif phase == "publishing":
        actor._publisher._wire_name = fail  # asked for the first tensor, with most gathers still to come
    elif phase in ("sleep", "wake"):
        setattr(actor._memory, phase, fail)


def full_disk_main(rank: int, port: int, job: tuple[Case, ActorConfig, list[Path]], folder: Path) -> None:
    """Rank 1's disk is full in a save; then both train on, and save again. Leaves the errors that a rank saw."""
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port, "cpu")
    case, config, sidecars = job
    actor, tree, errors = FsdpActor(config, rank, 2), CheckpointTree(folder / "saved", "t2i"), []
    write = checkpoint_files.write_shards
    for n in range(2):
        actor.update(n, sidecars, advantages_of(case, len(sidecars)))
        if rank == 1 and n == 0:
            checkpoint_files.write_shards = _no_space
        try:
            save_checkpoint(actor, tree, n, documents(actor, Path(config.model_path), n))
        except Exception as error:
            errors.append(error)
        checkpoint_files.write_shards = write
    (folder / f"errors.{rank}").write_bytes(pickle.dumps(errors))


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
