"""Checkpoints as a training rank saves them, by a test or by a process that is killed."""

from pathlib import Path
from typing import Any

import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, init_process_group
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree, rotate, save_checkpoint
from flowgrpo_fsdp_actor.contract import adapter_contract, base_model_hash
from flowgrpo_fsdp_actor.testing import SAMPLING

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_merge_mode": True}
ADVANTAGES = torch.tensor([[1.0, -1.0, 0.5, -0.5], [2.0, -2.0, 0.0, 0.0]])


def documents(actor: FsdpActor, model_folder: Path, n: int = 0) -> dict[str, Any]:
    """The JSON files of iteration `n`, as the trainer writes them."""
    contract = adapter_contract(actor.config, actor._adapter.lora_target_modules, base_model_hash(model_folder, None))
    state = {"rollout_id": n, "policy_version": n + 1, "lr_scheduler_steps": actor.lr_scheduler_steps}
    return {"trainer_state.json": state, "weight_sync_manifest.json": {}, "adapter_contract.json": contract}


def save(actor, model_folder, folder, n=0):
    tree = CheckpointTree(folder, "t2i")
    save_checkpoint(actor, tree, n, documents(actor, model_folder, n), "{}\n")
    return tree


def weights(actor):
    state = actor.checkpoint_state()
    return {f"{part}/{name}": t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone()
            for part in state for name, t in state[part].items()}  # fmt: skip


def saver_main(model_folder: Path, folder: Path, port: int) -> None:
    """Rotates and saves, as the trainer does at each interval, from the newest committed iteration on."""
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", port, "cpu")
    config = ActorConfig(model_path=str(model_folder), sampling=SAMPLING, fsdp_param_dtype="fp32", **LORA)
    actor = FsdpActor(config, 0, 1)
    tree = CheckpointTree(folder, "t2i")
    n = (tree.committed() or [-1])[-1] + 1
    while True:
        rotate(tree, 2)
        save_checkpoint(actor, tree, n, documents(actor, model_folder, n), "{}\n")
        n += 1
