"""One life of a training rank in `test_lives`: begins afresh or from a checkpoint, and ends by being killed."""

import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, gather, init_process_group
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree, load_checkpoint, save_checkpoint
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, WeightSyncError
from torch.distributed.tensor import DTensor

from .saver import documents

ADVANTAGES = torch.tensor([[1.0, -1.0, 0.5, -0.5], [2.0, -2.0, 0.0, 0.0]])


@dataclass(frozen=True)
class Life:
    """What the ranks of one life do, in this order, and what rank 0 leaves in `<name>.pkl`."""

    name: str
    config: ActorConfig
    load: Path | None = None
    updates: tuple[int, ...] = ()
    save: Path | None = None


@dataclass
class Left:
    """After loading, and at the end: every trained weight and AdamW's state, whole. The curve: metrics by update."""

    loaded: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    curve: list[dict[str, float]]
    lr_scheduler_steps: int


def rank_main(rank: int, world: int, port: int, lives: list[Life], sidecars: list[list[Path]], folder: Path) -> None:
    """Lives through all `lives`, then dies by SIGKILL, as a killed run would."""
    torch.set_num_threads(1)
    device = lives[0].config.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(rank, world, "127.0.0.1", port, device)
    for life in lives:
        left = _live(life, rank, world, sidecars)
        if rank == 0:
            (folder / f"{life.name}.pkl").write_bytes(pickle.dumps(left))
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _live(life: Life, rank: int, world: int, sidecars: list[list[Path]]) -> Left:
    actor = FsdpActor(life.config, rank, world)
    if life.load is not None:
        tree = CheckpointTree(life.load, "t2i")
        load_checkpoint(actor, tree, tree.newest())
    loaded = _whole(actor)
    curve = [actor.update(update, sidecars[update], ADVANTAGES).metrics for update in life.updates]
    if life.save is not None:
        n = max(life.updates, default=0)
        documents_n = documents(actor, Path(life.config.model_path), n)
        save_checkpoint(actor, CheckpointTree(life.save, "t2i"), n, documents_n, "{}\n")
    compared = [{k: v for k, v in metrics.items() if not k.startswith("perf/")} for metrics in curve]
    return Left(loaded, _whole(actor), compared, actor.lr_scheduler_steps)


def _whole(actor: FsdpActor) -> dict[str, torch.Tensor]:
    state = actor.checkpoint_state()
    named = ((f"{part}/{name}", tensor) for part in state for name, tensor in state[part].items())
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu().clone() for name, t in named}


def publishing_rank_main(rank: int, port: int, config: ActorConfig, sidecars: list[Path], out: Path) -> None:
    """Rank 0's engine is well, rank 1's is behind by a version, and takes the same weights when asked again."""
    torch.set_num_threads(1)
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(rank, 2, "127.0.0.1", port, config.device)
    gather.CHUNK_BYTES = 2**16  # several gathers, also of a tiny model
    actor = FsdpActor(config, rank, 2)
    held = {name: torch.zeros(shape, device=config.device) for name, shape in actor.wire_manifest_entries()}
    engine = WeightReceiver(held, f"engine{rank}", version=4 + rank)
    transport = "cuda_ipc" if config.device == "cuda" else "shm"
    sender = WeightSender(transport, bucket_size_mb=1, wire_dtype="fp32")
    left: dict[str, Any] = {"reasons": [], "versions": []}
    for version, base in ((5, 4), (6, None)):
        actor.update(version, sidecars, ADVANTAGES)
        manifest = sender.manifest(actor.wire_manifest_entries(), version=version, base_version=base)
        try:
            actor.send_weights(sender, manifest, engine)
            left["reasons"].append("")
        except WeightSyncError as error:
            left["reasons"].append(error.reason)
        torch.distributed.barrier()
        if version == 6:
            engine.commit(6)
        else:
            engine.abort()
        left["versions"].append(engine.version)
    left["policy"] = {n: t.cpu().clone() for n, t in actor.wire_tensors()}
    left["engine"] = {n: t.cpu() for n, t in held.items()}
    out.with_suffix(f".{rank}").write_bytes(pickle.dumps(left))
    sender.close()
