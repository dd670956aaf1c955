"""A process that saves checkpoints as a training rank does, until it is killed."""

from pathlib import Path
from typing import Any

import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, init_process_group
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree, rotate, save_checkpoint
from flowgrpo_fsdp_actor.contract import adapter_contract, base_model_hash
from flowgrpo_fsdp_actor.testing import SAMPLING


def documents(actor: FsdpActor, model_folder: Path, n: int = 0) -> dict[str, Any]:
    """The JSON files of iteration `n`, as the trainer writes them."""
    contract = adapter_contract(actor.config, actor._adapter.lora_target_modules, base_model_hash(model_folder, None))
    state = {"rollout_id": n, "policy_version": n + 1, "lr_scheduler_steps": actor.lr_scheduler_steps}
    return {"trainer_state.json": state, "weight_sync_manifest.json": {}, "adapter_contract.json": contract}


def saver_main(model_folder: Path, folder: Path, port: int) -> None:
    """Rotates and saves, as the trainer does at each interval, from the newest committed iteration on."""
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", port, "cpu")
    lora = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_merge_mode": True}
    config = ActorConfig(model_path=str(model_folder), sampling=SAMPLING, fsdp_param_dtype="fp32", **lora)
    actor = FsdpActor(config, 0, 1)
    tree = CheckpointTree(folder, "t2i")
    n = (tree.committed() or [-1])[-1] + 1
    while True:
        rotate(tree, 2)
        save_checkpoint(actor, tree, n, documents(actor, model_folder, n), "{}\n")
        n += 1
