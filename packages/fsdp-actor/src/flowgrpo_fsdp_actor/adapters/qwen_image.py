"""Qwen-Image: only the transformer is trained; VAE and text encoder live frozen in the engine (A2, A3).

Shapes: as in `adapters.base`; Z latent channels of the VAE.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flowgrpo_math import qwen_image_sigmas
from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.noise import noise_seed
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.velocity import PATCH, latent_grid, qwen_image_velocity
from torch import Tensor, nn

from flowgrpo_fsdp_actor.adapters.base import PackedTrajectory, ReplayConditions, TrainModel
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.errors import ModelFolderError, RequestRefused, TrajectoryRefused
from flowgrpo_fsdp_actor.weights import SafetensorsFolder

SIGMA_ATOL = 1e-6
"""Echoed sigmas are float32 of the driver's float64: they differ by at most half a unit in the last place, 3e-8."""

SCHEDULE_KEYS = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "shift_terminal")
SCHEDULER_MUST = {
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "shift": 1.0,
    "invert_sigmas": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}
SCHEDULER_DEFAULTS = {
    # What diffusers' FlowMatchEulerDiscreteScheduler takes for a key that its config leaves out.
    **SCHEDULER_MUST,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
}


class QwenImageAdapter:
    """The `GenerativeModelAdapter` of Qwen-Image. Names match SGLang's without renaming."""

    family = "qwen_image"
    supported_tasks = ("t2i",)
    artifact_tracks = ("image",)
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(self, model_path: str | Path):
        self._folder = Path(model_path)

    # ------------------------------------------------------------------ the model

    def load_train_model(self, config: ActorConfig) -> TrainModel:
        """`QwenImageTransformer2DModel` from the folder's `transformer`, on meta, with its weight files."""
        from diffusers import QwenImageTransformer2DModel

        from flowgrpo_fsdp_actor.adapters.qwen_image_blocks import prepare_for_compile

        folder = self._folder / config.fsdp_trainable_attr
        settings = self._read_json(f"{config.fsdp_trainable_attr}/config.json")
        if (found := settings.get("_class_name")) != "QwenImageTransformer2DModel":
            raise ModelFolderError(str(folder), f"holds a {found}, not a QwenImageTransformer2DModel")
        with torch.device("meta"):
            module = QwenImageTransformer2DModel.from_config(settings)
        # The rotary tables are plain attributes, so no weight file fills them: make them again, for real.
        rope = module.pos_embed
        module.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim, scale_rope=rope.scale_rope)
        if config.compiles:
            prepare_for_compile(module, config.device)
        blocks = [f"transformer_blocks.{i}" for i in range(len(module.transformer_blocks))]
        return TrainModel(module=module, blocks=blocks, read_weight=SafetensorsFolder(folder).read)

    def replay_transition(
        self, model: nn.Module, latents_BPC: Tensor, sigma_B: Tensor, conditions: ReplayConditions
    ) -> Tensor:
        return qwen_image_velocity(
            model,
            latents_BPC,
            sigma_B,
            conditions.prompt_embeds_BLE,
            conditions.mask_BL,
            conditions.height,
            conditions.width,
            self.vae_scale_factor,
        )

    def weight_name_map(self, name: str) -> str:
        return name

    # ------------------------------------------------------------------ requests

    def build_rollout_request(
        self,
        *,
        prompt: str,
        group_index: int,
        group_size: int,
        sampling: SamplingConfig,
        rollout_id: int | None,
        generation_seed: int,
        sde_indices: tuple[int, ...] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> GroupRequest:
        """The request of one prompt group, complete: schedule, trained steps, ids and noise.

        `rollout_id` None is an evaluation: its noise is `generation_seed`'s own, the same every time.
        `sde_indices` None resolves them from `sampling`; pass the rollout's own to resolve them once (T1).
        Raises RequestRefused for guidance (S5), a size that does not divide, or another latent shape.
        """
        if sampling.guidance_scale != 1.0:
            raise RequestRefused(
                "guidance_scale",
                str(sampling.guidance_scale),
                "replay runs one conditional forward, so a guided rollout is a policy it cannot score (S5)",
                "set guidance_scale to 1.0",
            )
        grid = self._latent_grid(sampling.height, sampling.width)
        shape = (self.latent_channels, *grid)
        if sampling.init_noise_latent_shape not in (None, shape):
            raise RequestRefused(
                "init_noise_latent_shape",
                str(list(sampling.init_noise_latent_shape)),
                f"this model's VAE makes {list(shape)} of {sampling.height} x {sampling.width} pixels",
                "leave init_noise_latent_shape out",
            )
        metadata = dict(metadata or {})
        tokens = grid[0] * grid[1] // PATCH**2
        return GroupRequest(
            group_index=group_index,
            prompt=prompt,
            sample_ids=sample_ids(sampling.sample_id_mode, metadata, group_index, group_size),
            sampling=replace(sampling, init_noise_latent_shape=shape),
            sigmas=self.sigmas(sampling.num_inference_steps, tokens),
            sde_indices=sampling.sde_steps(rollout_id) if sde_indices is None else sde_indices,
            noise_seed=noise_seed(generation_seed, rollout_id),
            metadata=metadata,
        )

    def sigmas(self, num_steps: int, tokens: int) -> tuple[float, ...]:
        """[T + 1] the schedule of the folder's scheduler for `tokens` packed image tokens.

        Raises ModelFolderError where the scheduler asks for something that the formula does not have.
        """
        settings = {**SCHEDULER_DEFAULTS, **self._read_json("scheduler/scheduler_config.json")}
        if wrong := {key: settings[key] for key, value in SCHEDULER_MUST.items() if settings[key] != value}:
            raise ModelFolderError(
                str(self._folder), f"scheduler_config.json has {wrong}", f"Qwen-Image's schedule needs {SCHEDULER_MUST}"
            )
        return tuple(qwen_image_sigmas(num_steps, tokens, **{k: settings[k] for k in SCHEDULE_KEYS}).tolist())

    # ------------------------------------------------------------------ answers

    def validate_rollout_response(self, trajectory: GroupTrajectory) -> None:
        """Demands latents, schedule, trained steps and size that agree with each other and with the request."""
        request = trajectory.request

        def refuse(field: str, why: str) -> None:
            raise TrajectoryRefused(request.group_index, field, why)

        if not request.sde_indices:
            refuse("sde_indices", "no step was sampled with noise, so there is nothing to train; set num_sde_steps")
        if trajectory.height < 1 or trajectory.width < 1:
            refuse("height, width", f"{trajectory.height} x {trajectory.width}: the engine must echo the size it drew")
        rows, columns = self._latent_grid(trajectory.height, trajectory.width)
        P, C = rows * columns // PATCH**2, self.latent_channels * PATCH**2
        expected = (len(request.sample_ids), len(request.state_indices), P, C)
        if tuple(trajectory.latents_NUPC.shape) != expected:
            refuse("trajectory_latents", f"shape {list(trajectory.latents_NUPC.shape)}, expected {list(expected)}")
        expected = (len(request.sample_ids), len(request.sde_indices))
        if tuple(trajectory.log_probs_NS.shape) != expected:
            refuse("log_probs", f"shape {list(trajectory.log_probs_NS.shape)}, expected {list(expected)}")
        sent = torch.tensor(request.sigmas, dtype=torch.float64)
        if trajectory.sigmas.shape != sent.shape:
            refuse("timesteps", f"{trajectory.sigmas.numel()} sigmas for {sent.numel()} that were sent")
        apart = (trajectory.sigmas.double().cpu() - sent).abs()
        if not bool((apart <= SIGMA_ATOL).all()):
            k = int(apart.argmax())
            refuse("timesteps", f"step {k} used sigma {float(trajectory.sigmas[k])}, {request.sigmas[k]} was sent")
        for field, values in (("trajectory_latents", trajectory.latents_NUPC), ("log_probs", trajectory.log_probs_NS)):
            if not bool(torch.isfinite(values).all()):
                refuse(field, "holds values that are not finite")

    def pack_trajectory(self, trajectory: GroupTrajectory) -> PackedTrajectory:
        self.validate_rollout_response(trajectory)
        request = trajectory.request
        state_of = {k: u for u, k in enumerate(request.state_indices)}
        starts = torch.tensor([state_of[k] for k in request.sde_indices])
        ends = torch.tensor([state_of[k + 1] for k in request.sde_indices])
        sigmas = torch.tensor(request.sigmas, dtype=torch.float64)
        steps = torch.tensor(request.sde_indices)
        return PackedTrajectory(
            x_NSPC=trajectory.latents_NUPC[:, starts],
            x_next_NSPC=trajectory.latents_NUPC[:, ends],
            sigma_S=sigmas[steps],
            sigma_next_S=sigmas[steps + 1],
            engine_logp_NS=trajectory.log_probs_NS,
            prompt_embeds_LE=trajectory.prompt_embeds_LE,
            step_indices=tuple(request.sde_indices),
            height=trajectory.height,
            width=trajectory.width,
        )

    # ------------------------------------------------------------------ the folder

    @cached_property
    def vae_scale_factor(self) -> int:
        """Pixels on a side of one latent pixel: the VAE halves once per entry of `temperal_downsample`."""
        return 2 ** len(self._read_json("vae/config.json").get("temperal_downsample", (False, True, True)))

    @cached_property
    def latent_channels(self) -> int:
        """Z, the VAE's latent channels."""
        return int(self._read_json("vae/config.json").get("z_dim", 16))

    def _latent_grid(self, height: int, width: int) -> tuple[int, int]:
        try:
            return latent_grid(height, width, self.vae_scale_factor)
        except ValueError as error:
            size, unit = f"{height}, {width}", self.vae_scale_factor * PATCH
            raise RequestRefused("height, width", size, str(error), f"use multiples of {unit}") from None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self._folder / name).read_text())
        except FileNotFoundError:
            raise ModelFolderError(str(self._folder), f"there is no {name}") from None
        except json.JSONDecodeError as error:
            raise ModelFolderError(str(self._folder), f"{name} is not JSON: {error}") from None


def sample_ids(mode: str, metadata: Mapping[str, Any], group_index: int, group_size: int) -> tuple[str, ...]:
    """[N] ids of a group's candidates (E5): `prompt:<id>:sample:<slot>`.

    `metadata` takes the prompt's own `prompt_id` or `sample_id`, so that a prompt keeps its noise wherever it
    stands in a batch, and the group index where it has neither; the other modes take the group index.
    """
    prompt_id: Any = group_index
    if mode == "metadata":
        prompt_id = metadata.get("prompt_id", metadata.get("sample_id", group_index))
    return tuple(f"prompt:{prompt_id}:sample:{slot}" for slot in range(group_size))
