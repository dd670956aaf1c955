"""For tests of this package and of those above it: a tiny random Qwen-Image folder, and trajectories drawn from it.

The folder has what the actor reads (transformer, VAE and scheduler settings), not a whole pipeline.
"""

import json
import resource
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flowgrpo_math.transition import transition, transition_logp, transition_mean, transition_sample
from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.noise import candidate_noise, initial_latent
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from torch import Tensor, nn

from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter, ReplayConditions, TrainModel
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.config import ActorConfig

TEXT_WIDTH = 64
SAMPLING = SamplingConfig(height=24, width=16, num_inference_steps=5, sde_indices=(1, 2, 3), num_sde_steps=3)
"""Not square, so that rows and columns cannot be taken for each other."""


def tiny_qwen_image(folder: Path, *, dtype: torch.dtype = torch.float32, num_layers: int = 2) -> Path:
    """Writes a random model with a VAE of scale 2 and 12 channels to `folder`, and returns it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=48,
        out_channels=12,
        num_layers=num_layers,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    transformer.to(dtype).save_pretrained(folder / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    )
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "vae").mkdir(exist_ok=True)
    vae = {"_class_name": "AutoencoderKLQwenImage", "z_dim": 12, "temperal_downsample": [False]}
    (folder / "vae" / "config.json").write_text(json.dumps(vae))
    return folder


def prompt_embeds(prompt: str, tokens: int, width: int = TEXT_WIDTH) -> Tensor:
    """[L, E] a stand-in for the text encoder: of the prompt alone, unit normal."""
    return candidate_noise(0, prompt, "text", (tokens, width))


@torch.no_grad()
def draw_trajectory(
    policy: nn.Module,
    adapter: GenerativeModelAdapter,
    request: GroupRequest,
    *,
    text_tokens: int = 7,
    text_width: int = TEXT_WIDTH,
    version: int = 0,
) -> GroupTrajectory:
    """What an engine would answer to `request`, drawn with `policy`, all candidates in one forward per step."""
    sampling, N = request.sampling, len(request.sample_ids)
    device = next(policy.parameters()).device
    embeds_LE = prompt_embeds(request.prompt, text_tokens, text_width).to(device)
    conditions = ReplayConditions(embeds_LE[None].expand(N, -1, -1), None, sampling.height, sampling.width)
    x_NPC = torch.stack(
        [initial_latent(request.noise_seed, s, sampling.init_noise_latent_shape) for s in request.sample_ids]
    ).to(device)
    states, log_probs = {0: x_NPC}, []
    for k in range(sampling.num_inference_steps):
        sigma, sigma_next = request.sigmas[k], request.sigmas[k + 1]
        velocity = adapter.replay_transition(policy, x_NPC, torch.full((N,), sigma, device=device), conditions)
        if k in request.sde_indices:
            step = transition(sampling.sde_type, sigma, sigma_next, eta=sampling.eta, sigma_max=sampling.sigma_max)
            shape = tuple(x_NPC.shape[1:])
            noise = torch.stack([candidate_noise(request.noise_seed, s, k, shape) for s in request.sample_ids])
            x_next = transition_sample(x_NPC, velocity, noise.to(device), step)
            log_probs.append(transition_logp(x_NPC, velocity, x_next, step))
        else:
            x_next = transition_mean(x_NPC, velocity, transition("ode", sigma, sigma_next, eta=0.0))
        states[k + 1] = x_NPC = x_next
    return GroupTrajectory(
        request=request,
        height=sampling.height,
        width=sampling.width,
        sigmas=torch.tensor(request.sigmas, dtype=torch.float32),
        latents_NUPC=torch.stack([states[k] for k in request.state_indices], dim=1).cpu(),
        log_probs_NS=torch.stack(log_probs, dim=1).cpu(),
        prompt_embeds_LE=embeds_LE.cpu(),
        images_NHWC=None,
        policy_version=version,
    )


def draw_rollout(
    policy: nn.Module,
    adapter: GenerativeModelAdapter,
    *,
    group_size: int,
    text_tokens: Sequence[int] = (7, 7, 7, 7),
    text_width: int = TEXT_WIDTH,
    sampling: SamplingConfig = SAMPLING,
    rollout_id: int = 0,
) -> list[GroupTrajectory]:
    """One trajectory per entry of `text_tokens`, each for a prompt of that length."""
    return [
        draw_trajectory(
            policy,
            adapter,
            adapter.build_rollout_request(
                prompt=f"prompt {index}",
                group_index=index,
                group_size=group_size,
                sampling=sampling,
                rollout_id=rollout_id,
                generation_seed=1234,
            ),
            text_tokens=tokens,
            text_width=text_width,
        )
        for index, tokens in enumerate(text_tokens)
    ]


class RandomQwenImage(QwenImageAdapter):
    """Qwen-Image with random weights drawn where the actor trains: no file, so that a full-size one is quick.

    `model_path` needs only the JSON files that `random_qwen_image` writes. The weights depend on their names alone:
    every rank holds its part of the same model.
    """

    def load_train_model(self, config: ActorConfig) -> TrainModel:
        model = super().load_train_model(config)
        shapes = {name: p.shape for name, p in model.module.named_parameters()}

        def draw(name: str, start: int, end: int) -> Tensor:
            generator = torch.Generator(config.device).manual_seed(zlib.crc32(name.encode()))
            # As large as a trained model's weights are; norms scale by about 1.
            values = torch.randn(shapes[name], generator=generator, device=config.device).mul_(0.02)
            return (values + 1.0 if "norm_" in name or "txt_norm" in name else values)[start:end]

        return replace(model, read_weight=draw)


def random_qwen_image(folder: Path, **settings: Any) -> Path:
    """Writes the settings of a Qwen-Image to `folder`, full size but for `settings`, without weights."""
    transformer = {"_class_name": "QwenImageTransformer2DModel", **settings}
    scheduler = {
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "shift_terminal": 0.02,
        "use_dynamic_shifting": True,
    }
    vae = {"_class_name": "AutoencoderKLQwenImage", "z_dim": 16, "temperal_downsample": [False, True, True]}
    files = {
        "transformer/config.json": transformer,
        "scheduler/scheduler_config.json": scheduler,
        "vae/config.json": vae,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file may grow beyond `nbytes`: a real refusal in the middle of a write, as of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def waits_for_the_gpu_raise() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
