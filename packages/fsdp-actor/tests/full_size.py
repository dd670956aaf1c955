"""The full-size Qwen-Image, the recipe and the settings that `test_estimate` and `test_estimate_verdict` ask about."""

from flowgrpo_fsdp_actor import ActorConfig
from flowgrpo_fsdp_actor.estimate import ModelSize, RunShape
from flowgrpo_fsdp_actor.estimate.architecture import Transformer
from flowgrpo_fsdp_actor.estimate.cards import H200
from flowgrpo_fsdp_actor.estimate.memory import MemoryModel
from flowgrpo_rollout_sglang.config import SamplingConfig

QWEN_IMAGE = ModelSize(
    transformer=Transformer.from_config({"_class_name": "QwenImageTransformer2DModel"}, ""),
    text_encoder_parameters=8_292_166_656,
    vae_parameters=126_892_531,
    vae_scale=8,
    vae_channels=96,
)
SAMPLING = SamplingConfig(height=384, width=384, num_inference_steps=12, sde_indices=(3, 4, 5), num_sde_steps=3)
LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 64, "lora_alpha": 128.0, "lora_adapter_mode": True}
MASTERS, RECOMPUTED = {"fsdp_master_dtype": "fp32"}, {"fsdp_activation_checkpointing": True}


def memory_of(*, world_size=1, **settings):
    eager = {"replay_compile": False}  # as most of what was measured
    config = ActorConfig(**({"model_path": "", "sampling": SAMPLING, "device": "cuda"} | eager | LORA | settings))
    return MemoryModel(QWEN_IMAGE, config, RunShape(world_size=world_size), H200)


def recomputed(memory):
    return memory.model.transformer.blocks if memory.config.fsdp_activation_checkpointing else 0
