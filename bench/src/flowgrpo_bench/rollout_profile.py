"""Where a rollout's time goes: forwards by themselves, the server's sampler in this process, whole requests.

    python -m flowgrpo_bench.rollout_profile [--layers 12 --heads 24 --side 384]

On a GPU a forward is shown plain, as a CUDA graph, in other ways (`rollout_variants`), and as diffusers does it: until
it is launched, until it is done, and how far from the plain one; at 16 candidates also with texts of two lengths.
Then the parts of a wave, the kernels of a forward of 16 candidates, and the parts of a request to the server.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity
from torch import Tensor

from flowgrpo_bench import rollout_servers as servers
from flowgrpo_bench import rollout_variants as variants
from flowgrpo_bench.results import FLOPS

SIZES, PROFILED, SHOWN, REPEATS = (1, 8, 16, 32), 16, 16, 3
SIGMA = 0.8
KERNELS = ("graph", "graph, SGLang's own")
"""Forwards whose kernels are listed."""
Calls = dict[str, Callable[[], Tensor]]


def main() -> None:
    arguments = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (device, arguments.layers, arguments.heads)
    servers.start_together(*model)
    sampler, diffusers = load_sampler(*model), servers.pipeline(*model).transformer
    for candidates in SIZES:
        show_waves(sampler, candidates, arguments.side)
        if device == "cuda":
            show_forwards(forwards(sampler, diffusers, candidates, arguments.side), candidates, arguments)
    for candidates in SIZES:
        show_request(servers.our_engine(*model), candidates, arguments.side)
    if device == "cuda":
        show_forwards(padded_forwards(sampler, PROFILED, arguments.side), PROFILED, arguments)
        for name, call in forwards(sampler, diffusers, PROFILED, arguments.side).items():
            if name in KERNELS:
                show_kernels(name, call)


def load_sampler(device: str, layers: int, heads: int) -> Any:
    """The server's sampler, with graphs where there is a GPU."""
    from flowgrpo_rollout_sglang.testing import load_sampler

    config = servers.engine_config("profile", device, layers, heads)
    return load_sampler(replace(config, cuda_graphs=device == "cuda"))


# ---------------------------------------------------------------------- forwards


def forwards(sampler: Any, diffusers: Any, rows: int, side: int) -> Calls:
    """The same forward of `rows` candidates in every way."""
    layout, given = _given(sampler, [servers.PROMPT] * rows, side)
    sigma = torch.full((rows,), SIGMA, device=sampler.device)
    return {
        "plain": lambda: sampler._forward(layout, **given),
        "graph": _graph(sampler, layout, given),
        "graph, SGLang's own": _graph(sampler, layout, given, variants.sglangs_own),
        "diffusers": lambda: qwen_image_velocity(
            diffusers, given["latents"], sigma, given["text"], None, side, side, servers.VAE_SCALE_FACTOR
        ),
    }


def padded_forwards(sampler: Any, rows: int, side: int) -> Calls:
    """With texts of two lengths, so that attention has a mask."""
    layout, given = _given(sampler, [servers.PROMPT, servers.PROMPT + " beside a green square"] * (rows // 2), side)
    return {
        "padded, plain": lambda: sampler._forward(layout, **given),
        "padded, graph": _graph(sampler, layout, given),
        "padded, graph, SGLang's own": _graph(sampler, layout, given, variants.sglangs_own),
    }


@torch.inference_mode()
def _given(sampler: Any, prompts: list[str], side: int) -> tuple[Any, dict[str, Tensor | None]]:
    """Layout and inputs of a forward with a candidate for each prompt."""
    from flowgrpo_rollout_sglang.server.contract import parse
    from flowgrpo_rollout_sglang.sglang_engine import wave_body

    wave = parse(wave_body([servers.request(1, side)]))
    texts = {prompt: sampler._encode(prompt) for prompt in dict.fromkeys(prompts)}
    layout, conditions = sampler._conditions(wave, [texts[prompt] for prompt in prompts])
    latents = torch.randn(len(prompts), (side // 16) ** 2, 64, device=sampler.device)
    timestep = torch.full((len(prompts),), SIGMA * 1000.0, dtype=torch.float64, device=sampler.device)
    return layout, {"latents": latents, "timestep": timestep, **conditions}


def _graph(
    sampler: Any,
    layout: Any,
    given: dict[str, Tensor | None],
    within: Callable[[Any], AbstractContextManager] = lambda _: nullcontext(),
) -> Callable[[], Tensor]:
    """The sampler's forward as a graph of its own, made and replayed `within` a variant."""
    from flowgrpo_rollout_sglang.server.graphs import ForwardGraphs

    graphs = ForwardGraphs(sampler._forward, sampler._weights)

    def call() -> Tensor:
        with within(sampler.transformer):
            return graphs(layout, given)

    return call


@torch.inference_mode()
def show_forwards(calls: Calls, rows: int, arguments: argparse.Namespace) -> None:
    """A line for each call, beside the arithmetic floor."""
    operations = rows * servers.forward_operations(arguments.layers, arguments.heads, (arguments.side // 16) ** 2, 11)
    print(f"forward of {rows}: floor {operations / FLOPS['h200'] * 1e3:.1f} ms", flush=True)
    first: Tensor | None = None
    for name, call in calls.items():
        begun = time.perf_counter()
        result = warmed(name, call)
        if result is None:
            continue
        warm_s = time.perf_counter() - begun
        first = result if first is None else first
        differs = float((result - first).abs().max() / first.abs().max())
        launched, done = timed_forward(call, repeats=8 if rows <= 8 else 4)
        print(
            f"  {name:27} launched after {launched * 1e3:6.2f} ms, done after {done * 1e3:6.2f} ms; "
            f"first three calls {warm_s:.2f} s; largest difference {differs:.1e}",
            flush=True,
        )


def warmed(name: str, call: Callable[[], Tensor]) -> Tensor | None:
    """What three calls give, the first plain, the second recorded, the third replayed; None if that way is not possible
    here, which is said."""
    try:
        for _ in range(3):
            result = call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {name:27} failed: {type(error).__name__}: {error}", flush=True)
        return None
    return result.float()


def timed_forward(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds per forward until the last kernel is launched, and until it has run: medians of three."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        found.append(((launched - started) / repeats, (time.perf_counter() - started) / repeats))
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


@torch.inference_mode()
def show_kernels(name: str, call: Callable[[], Any]) -> None:
    """The kernels that take longest."""
    if warmed(name, call) is None:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    total, count = sum(r.self_device_time_total for r in rows), sum(r.count for r in rows)
    print(f"{name}, {PROFILED} candidates: {total / 1e3:.1f} ms of device time in {count} launches")
    for row in rows[:SHOWN]:
        print(f"  {row.self_device_time_total / 1e3:7.2f} ms {row.count:5d} x  {row.key[:110]}", flush=True)


# ---------------------------------------------------------------------- waves and requests


def show_waves(sampler: Any, candidates: int, side: int) -> None:
    """The sampler's own time by part, with graphs and without."""
    from flowgrpo_rollout_sglang.server.contract import parse
    from flowgrpo_rollout_sglang.sglang_engine import wave_body

    wave = parse(wave_body([servers.request(candidates, side)], candidates_per_forward=candidates))
    kept = sampler.graphs
    for graphs in dict.fromkeys((None, kept)):
        sampler.graphs = graphs
        walls, parts = [], []
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            _, _, seconds = sampler.draw(wave)
            walls.append(time.perf_counter() - started)
            parts.append(seconds)
        kind = "plain" if graphs is None else "graphs"
        print(
            f"wave of {candidates:2}, {kind}: first {walls[0] * 1e3:.0f} ms, {_parts(walls[1:], parts[1:])}", flush=True
        )
    sampler.graphs = kept


def show_request(engine: Any, candidates: int, side: int) -> None:
    """A whole request through the server, by part: `request` holds the engine's parts, the answer's file and HTTP."""
    from flowgrpo_rollout_sglang.server.contract import ANSWER_FILE
    from flowgrpo_rollout_sglang.sglang_engine import wave_body

    asked = servers.request(candidates, side)
    engine.generate([asked])
    walls, parts = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        body = wave_body([asked])
        answer = engine._call("POST", "/rollout/generate", json=body, headers={"accept": ANSWER_FILE}).json()
        answered = time.perf_counter()
        echo, tensors = engine._take(answer["file"])
        taken = time.perf_counter()
        engine._trajectory(asked, 0, tensors, echo)
        checked = time.perf_counter()
        engine.info()
        asked_info = time.perf_counter() - checked
        walls.append(checked - started)
        request = answered - started
        parts.append(
            {
                **echo["seconds"],
                "request_s": request,
                "answer_and_http_s": request - echo["seconds"]["engine_s"],
                "take_s": taken - answered,
                "check_s": checked - taken,
                "empty_request_s": asked_info,
            }
        )
    print(f"request of {candidates:2}: {_parts(walls, parts)}; {engine.info()['cuda_graphs']} graphs", flush=True)


def _parts(walls: list[float], parts: list[dict[str, float]]) -> str:
    shown = ", ".join(f"{n.removesuffix('_s')} {statistics.median(p[n] for p in parts) * 1e3:.1f}" for n in parts[0])
    return f"{statistics.median(walls) * 1e3:.1f} ms ({shown})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Where a rollout's time goes.")
    for name, default in (("--layers", 12), ("--heads", 24), ("--side", 384)):
        parser.add_argument(name, type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
