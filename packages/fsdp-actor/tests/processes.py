"""Where this package's tests start their ranks: a fork server that has imported what a rank needs, once."""

import torch.multiprocessing as mp

PROCESSES = mp.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("flowgrpo_fsdp_actor.actor", "flowgrpo_fsdp_actor.adapters.qwen_image", "flowgrpo_fsdp_actor.testing"),
        *("flowgrpo_fsdp_actor.checkpoint_files", "flowgrpo_rollout_sglang.wire.receiver", "peft"),
    ]
)
