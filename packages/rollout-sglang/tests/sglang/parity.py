"""Engine log-probs against replay. Run as a script it starts a server, measures, prints JSON, and waits.

    python parity.py MODEL_FOLDER LOG_FOLDER bf16|fp32

Shapes: as in `request`.
"""

import json
import sys
import time
from dataclasses import replace

import torch
from flowgrpo_math.sigmas import qwen_image_sigmas
from flowgrpo_math.transition import transition, transition_logp
from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity

VAE_SCALE_FACTOR = 4


@torch.no_grad()
def replay_differences(transformer: torch.nn.Module, trajectory: GroupTrajectory) -> list[float]:
    """Largest |replayed - engine's log-prob| of each SDE step, replayed from the stored states."""
    request, sampling = trajectory.request, trajectory.request.sampling
    N, states = len(request.sample_ids), request.state_indices
    device = next(transformer.parameters()).device
    embeds = trajectory.prompt_embeds_LE.to(device)[None].expand(N, -1, -1)
    differences = []
    for s, k in enumerate(request.sde_indices):
        x, x_next = (trajectory.latents_NUPC[:, states.index(k + d)].to(device) for d in (0, 1))
        sigma, sigma_next = request.sigmas[k], request.sigmas[k + 1]
        velocity = qwen_image_velocity(
            transformer,
            x,
            torch.full((N,), sigma, device=device),
            embeds,
            None,
            height=trajectory.height,
            width=trajectory.width,
            vae_scale_factor=VAE_SCALE_FACTOR,
        )
        step = transition(sampling.sde_type, sigma, sigma_next, eta=sampling.eta, sigma_max=sampling.sigma_max)
        logp = transition_logp(x, velocity, x_next, step)
        differences.append(float((logp.cpu() - trajectory.log_probs_NS[:, s]).abs().max()))
    return differences


def main(model_folder: str, log_folder: str, dtype: str) -> None:
    from flowgrpo_rollout_sglang.diffusers_engine import DiffusersEngine
    from flowgrpo_rollout_sglang.engine import SGLangNativeGenerationEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(name=dtype, model_path=model_folder, device=device, dtype=dtype, log_folder=log_folder)
    engine, oracle = SGLangNativeGenerationEngine(config), DiffusersEngine(config)
    exact = DiffusersEngine(replace(config, dtype="fp32"))
    for each in (engine, oracle, exact):
        each.start()
    served, rounding = {}, {}
    for sde_type, steps in (("sde", tuple(range(1, 8))), ("dance", tuple(range(8))), ("cps", tuple(range(7)))):
        sampling = SamplingConfig(height=32, width=32, num_inference_steps=8, sde_type=sde_type, sde_indices=steps)
        request = GroupRequest(
            group_index=0,
            prompt="a red circle on a blue background",
            sample_ids=tuple("abcdefgh"),
            sampling=sampling,
            sigmas=tuple(qwen_image_sigmas(8, 16).tolist()),
            sde_indices=steps,
            noise_seed=5,
        )
        served[sde_type] = replay_differences(oracle._loaded().transformer, engine.generate([request])[0])
        rounding[sde_type] = replay_differences(exact._loaded().transformer, oracle.generate([request])[0])
    print(json.dumps({"served": served, "rounding": rounding, "group": engine._loaded().pid}), flush=True)
    time.sleep(600)  # until the test kills this process, as a crash of the driver would


if __name__ == "__main__":
    main(*sys.argv[1:])
