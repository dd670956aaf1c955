"""What the cases `rollout` and `weight_sync_server` share: one model folder, our engine, the stock server, diffusers.

Each is started at its first use and kept until the process ends: a server takes a minute to start on a GPU.
"""

import atexit
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flowgrpo_math import qwen_image_sigmas
from flowgrpo_math.transition import transition, transition_logp
from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.sglang_engine import SGLangNativeGenerationEngine
from flowgrpo_rollout_sglang.sglang_process import ServerProcess
from flowgrpo_rollout_sglang.testing import start_stock_server
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity
from torch import Tensor

from flowgrpo_bench.mid_qwen_image import write_mid_qwen_image

STEPS, TRAINED = 12, (1, 3, 5)
PROMPT = "a red circle on a blue background"
VAE_SCALE_FACTOR, HEAD = 8, 128
PARITY_ATOL = 2e-3
"""Nats per element, SGLang's bf16 forward against diffusers': a gate that the two draw from one policy, no more."""


@lru_cache
def model_folder(device: str, layers: int, heads: int) -> Path:
    """The random model, below TMPDIR; 8.2 GB at 12 layers and 24 heads."""
    root = tempfile.TemporaryDirectory(prefix="mid-qwen-image-")
    atexit.register(root.cleanup)
    return write_mid_qwen_image(Path(root.name) / "qwen-image", layers=layers, heads=heads, device=device)


def engine_config(name: str, device: str, layers: int, heads: int) -> EngineConfig:
    """bf16, as in training."""
    return EngineConfig(name=name, model_path=str(model_folder(device, layers, heads)), device=device)


@lru_cache
def our_engine(device: str, layers: int, heads: int) -> SGLangNativeGenerationEngine:
    """The patched server's engine, started."""
    engine = SGLangNativeGenerationEngine(engine_config("ours", device, layers, heads))
    engine.start()
    atexit.register(engine.stop)
    return engine


@lru_cache
def stock_server(device: str, layers: int, heads: int) -> ServerProcess:
    """The unpatched server, started."""
    server = start_stock_server(engine_config("stock", device, layers, heads))
    atexit.register(server.stop)
    return server


@lru_cache
def pipeline(device: str, layers: int, heads: int) -> Any:
    """diffusers' own pipeline in this process."""
    from diffusers import QwenImagePipeline

    loaded = QwenImagePipeline.from_pretrained(model_folder(device, layers, heads), torch_dtype=torch.bfloat16)
    loaded.set_progress_bar_config(disable=True)
    return loaded.to(device)


def start_together(device: str, layers: int, heads: int, *, stock: bool = False) -> None:
    """Our engine, the pipeline and, if asked for, the stock server, all at once: most of it is imports."""
    model = (device, layers, heads)
    model_folder(*model)
    servers = [our_engine, stock_server] if stock else [our_engine]
    with ThreadPoolExecutor(len(servers)) as threads:
        starting = [threads.submit(start, *model) for start in servers]
        pipeline(*model)
        for server in starting:
            server.result()


def request(candidates: int, side: int) -> GroupRequest:
    """One prompt's candidates at side x side pixels, as the shipped recipes sample them."""
    tokens = (side // (2 * VAE_SCALE_FACTOR)) ** 2
    return GroupRequest(
        group_index=0,
        prompt=PROMPT,
        sample_ids=tuple(f"prompt:0:sample:{n}" for n in range(candidates)),
        sampling=SamplingConfig(height=side, width=side, num_inference_steps=STEPS, sde_indices=TRAINED),
        sigmas=tuple(qwen_image_sigmas(STEPS, tokens).tolist()),
        sde_indices=TRAINED,
        noise_seed=1234,
    )


def stock_body(device: str, side: int) -> dict[str, Any]:
    """The same for the stock server, one candidate: on CUDA it fails for more."""
    return {
        "prompt": PROMPT,
        "seed": 42,
        "generator_device": device,
        "width": side,
        "height": side,
        "num_inference_steps": STEPS,
        "num_outputs_per_prompt": 1,
        "guidance_scale": 1.0,
        "true_cfg_scale": 1.0,
        "rollout": True,
        "rollout_sde_type": "sde",
        "rollout_noise_level": 0.7,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": list(TRAINED),
        "rollout_return_step_indices": sorted({k + d for k in TRAINED for d in (0, 1)}),
    }


def assert_fast(info: dict[str, Any]) -> None:
    """Raises AssertionError where a server on a GPU fell back to slower kernels, from its `info`."""
    if info["device"].startswith("cuda"):
        found = {name: info[name] for name in ("fused_rope", "attention", "fused_gelu")}
        assert found == {"fused_rope": True, "attention": "cudnn", "fused_gelu": True}, (
            f"SGLang runs slower kernels: {found}; see the server's log"
        )


@torch.no_grad()
def replay(transformer: torch.nn.Module, drawn: GroupTrajectory) -> dict[int, Tensor]:
    """[N] log-probs under diffusers' `transformer`, from the stored states, by SDE step."""
    asked, sampling = drawn.request, drawn.request.sampling
    N, states = len(asked.sample_ids), asked.state_indices
    device = next(transformer.parameters()).device
    embeds = drawn.prompt_embeds_LE.to(device)[None].expand(N, -1, -1)
    found = {}
    for k in asked.sde_indices:
        x, x_next = (drawn.latents_NUPC[:, states.index(k + d)].to(device) for d in (0, 1))
        sigma = torch.full((N,), asked.sigmas[k], device=device)
        velocity = qwen_image_velocity(transformer, x, sigma, embeds, None, drawn.height, drawn.width, VAE_SCALE_FACTOR)
        sigmas = asked.sigmas[k], asked.sigmas[k + 1]
        step = transition(sampling.sde_type, *sigmas, eta=sampling.eta, sigma_max=sampling.sigma_max)
        found[k] = transition_logp(x, velocity, x_next, step).cpu()
    return found


def parity(transformer: torch.nn.Module, drawn: GroupTrajectory) -> dict[int, float]:
    """Largest |engine's log-prob - replayed log-prob| over the candidates, by SDE step."""
    replayed = replay(transformer, drawn)
    return {k: float((replayed[k] - drawn.log_probs_NS[:, s]).abs().max()) for s, k in enumerate(replayed)}


def assert_parity(transformer: torch.nn.Module, drawn: GroupTrajectory) -> None:
    """Raises AssertionError where the engine's policy is not `transformer`'s."""
    found = parity(transformer, drawn)
    assert max(found.values()) <= PARITY_ATOL, f"log-prob differs by {found}"


def forward_operations(layers: int, heads: int, image_tokens: int, text_tokens: int) -> int:
    """Multiplications and additions of one candidate's forward: linear layers, and attention over both streams."""
    d, tokens = heads * HEAD, image_tokens + text_tokens
    linear = 2 * 12 * d * d * tokens  # q, k, v, out: 4 d^2; the MLP: 8 d^2
    modulation = 2 * 2 * 6 * d * d
    attention = 4 * d * tokens * tokens
    return layers * (linear + modulation + attention)
