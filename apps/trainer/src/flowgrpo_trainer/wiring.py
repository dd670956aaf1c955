"""From a run's settings to the configs that the packages take. No torch here.

Called by: `preflight` (to ask each package's own rules) and `fleet` (to build the workers).
"""

from dataclasses import fields
from typing import Any, Literal

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_rewards.config import RewardConfig
from flowgrpo_rollout_sglang.config import EngineConfig

from flowgrpo_trainer.settings import Settings

Device = Literal["cpu", "cuda"]


def actor_config(settings: Settings, *, device: Device) -> ActorConfig:
    """What every training rank reads."""
    flat = settings.flat()
    values = {item.name: flat[item.name] for item in fields(ActorConfig) if item.name in flat}
    values.update(
        model_path=settings.model.model_path or "",
        generation_task=settings.model.generation_task or "",
        sampling=settings.rollout.sampling_config,
        lr_decay_iters=settings.optimizer.lr_decay_iters or 0,
        seed=settings.rollout.rollout_seed,
        device=device,
    )
    return ActorConfig(**values)


def engine_config(
    settings: Settings, index: int, *, device: Device, targets: tuple[str, ...], log: str, visible: str | None = None
) -> EngineConfig:
    """What engine number `index` reads; `targets` are the modules that carry the adapter, `visible` the cards of its
    ranks where they are not those that its worker sees."""
    rollout, lora = settings.rollout, settings.lora
    return EngineConfig(
        name=f"engine{index}",
        model_path=settings.model.model_path or "",
        model_revision=settings.model.model_revision,
        device=device,
        num_gpus=rollout.rollout_num_gpus_per_engine,
        visible_devices=visible,
        dtype=rollout.engine_dtype,
        candidates_per_forward=rollout.candidates_per_forward,
        cuda_graphs=None if rollout.rollout_cuda_graphs else False,
        weight_sync_mode=settings.weight_sync_mode,
        lora_rank=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_target_modules=lora.lora_target_modules or targets,
        log_folder=log,
        start_timeout_s=rollout.engine_start_timeout_s,
    )


def reward_config(settings: Settings) -> RewardConfig:
    """What the scorer's worker reads."""
    values: dict[str, Any] = {item.name: getattr(settings.reward, item.name) for item in fields(RewardConfig)}
    return RewardConfig(**values)
