"""Where a rollout's time goes: the server's sampler in this process, without the server around it.

    python -m flowgrpo_bench.rollout_profile [LAYERS HEADS SIDE]     12 24 384 if left out

Prints seconds by part for several numbers of candidates, one forward of SGLang and of diffusers (until it is launched,
until it is done), and on a GPU the kernels of a forward of 16. What `rollout` takes longer than this is the answer's.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowgrpo_bench import rollout_servers as servers

REPEATS, PROFILED, SHOWN = 3, 16, 15
PORTS = ("--host", "127.0.0.1", "--port", "31999", "--scheduler-port", "31998", "--master-port", "31997")


def main(layers: int = 12, heads: int = 24, side: int = 384) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = load_sampler(device, layers, heads)
    diffusers = servers.pipeline(device, layers, heads).transformer
    embeds = sampler._encode(servers.PROMPT)
    for candidates in (1, 8, 16, 32):
        for _ in range(REPEATS):
            whole, parts = timed_draw(sampler, candidates, side)
        shown = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts.items())
        print(f"draw of {candidates:2}: {whole * 1e3:.0f} ms ({shown})")
        for name, call in forwards(sampler, diffusers, embeds, candidates, side).items():
            launched, done = timed_forward(call)
            print(f"  forward of {name}: launched after {launched * 1e3:.1f} ms, done after {done * 1e3:.1f} ms")
    if device == "cuda":
        for name, call in forwards(sampler, diffusers, embeds, PROFILED, side).items():
            print_kernels(name, call)


def load_sampler(device: str, layers: int, heads: int) -> Any:
    """SGLang's worker in this process, as its scheduler makes it, under our sampler."""
    from flowgrpo_rollout_sglang.sglang_engine import server_arguments, server_environment

    config = servers.engine_config("profile", device, layers, heads)
    os.environ.update(server_environment(config))  # before SGLang looks
    from flowgrpo_rollout_sglang.server.sampler import Sampler
    from sglang.multimodal_gen.runtime import server_args as sglang_arguments

    if device == "cuda":
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker as Worker
    else:
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker as Worker
    words = [*server_arguments(config, config.model_path)[2:], *PORTS]  # its parser has no --model-type
    sys.argv = ["sglang", *words]  # which it reads a second time
    arguments = sglang_arguments.prepare_server_args(words)
    sglang_arguments.set_global_server_args(arguments)
    worker = Worker(local_rank=0, rank=0, master_port=arguments.master_port, server_args=arguments)
    return Sampler(worker.pipeline, arguments)


def timed_draw(sampler: Any, candidates: int, side: int) -> tuple[float, dict[str, float]]:
    """Seconds of one draw, and by part."""
    from flowgrpo_rollout_sglang.server.contract import parse
    from flowgrpo_rollout_sglang.sglang_engine import wave_body

    wave = parse(wave_body([servers.request(candidates, side)], candidates_per_forward=candidates))
    started = time.perf_counter()
    _, _, parts = sampler.draw(wave)
    return time.perf_counter() - started, parts


def forwards(sampler: Any, diffusers: Any, embeds: Tensor, rows: int, side: int) -> dict[str, Callable[[], Any]]:
    """The same forward of `rows` candidates through both transformers."""
    from flowgrpo_rollout_sglang.server.contract import parse
    from flowgrpo_rollout_sglang.sglang_engine import wave_body
    from flowgrpo_rollout_sglang.velocity import qwen_image_velocity

    wave = parse(wave_body([servers.request(1, side)]))
    conditions = sampler._conditions(wave, [embeds] * rows)
    x = torch.randn(rows, (side // 16) ** 2, 64, device=embeds.device)
    texts, sigma = embeds[None].expand(rows, -1, -1), torch.full((rows,), 0.8, device=embeds.device)
    return {
        "SGLang": lambda: sampler._velocity(3, x, 0.8, conditions),
        "diffusers": lambda: qwen_image_velocity(
            diffusers, x, sigma, texts, None, side, side, servers.VAE_SCALE_FACTOR
        ),
    }


@torch.no_grad()
def timed_forward(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds per forward until the last kernel is launched, and until it has run."""
    call()
    _synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        call()
    launched = time.perf_counter()
    _synchronize()
    return (launched - started) / REPEATS, (time.perf_counter() - started) / REPEATS


@torch.no_grad()
def print_kernels(name: str, call: Callable[[], Any]) -> None:
    """The kernels that take longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"{name}, {PROFILED} candidates: {sum(r.self_device_time_total for r in rows) / 1e3:.1f} ms of device time")
    for row in rows[:SHOWN]:
        print(f"  {row.self_device_time_total / 1e3:7.2f} ms {row.count:5d} x  {row.key[:100]}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
