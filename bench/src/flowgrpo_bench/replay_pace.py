"""How long a replay forward of few and of many rows takes, beside what `trainer plan` says.

    python -m flowgrpo_bench.replay_pace [--eager] [--layers 60 --side 384 --text 128 --rank 64]

Needs a GPU that holds the whole model: 41 GB, and 100 GB with 16 rows. Fit the paces of
`flowgrpo_fsdp_actor.estimate.cards` to what it prints.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from flowgrpo_fsdp_actor.estimate import CARDS, ModelSize, RunShape
from flowgrpo_fsdp_actor.estimate.architecture import Transformer
from flowgrpo_fsdp_actor.estimate.memory import MemoryModel
from flowgrpo_fsdp_actor.estimate.speed import anchor_seconds, replay_seconds
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.recompute import recompute_first
from flowgrpo_fsdp_actor.update import accumulate_gradients

from flowgrpo_bench.replay import LORA, ReplayWork

ROWS = (1, 2, 3, 4, 8, 16)
FORWARDS, REPEATS = 3, 3
"""Timed together, as an update runs them one after the other; and how often."""


def main() -> None:
    arguments = _arguments()
    settings = LORA | {"lora_rank": arguments.rank, "replay_compile": not arguments.eager}
    work = ReplayWork("cuda", {"num_layers": arguments.layers}, (arguments.text,), side=arguments.side, **settings)
    memory = _memory_model(work, arguments.text)
    print("rows  activations  pass                      ms    plan  plan is off by")
    for rows in ROWS:
        for recomputed in (0, arguments.layers):
            recompute_first(work.policy.blocks, recomputed)
            kept = "recomputed" if recomputed else "kept"
            _show(rows, kept, "forward and backward", _seconds(work, rows), replay_seconds(memory, rows, recomputed))
            if not recomputed:
                _show(rows, kept, "anchors", _seconds(work, rows, train=False), anchor_seconds(memory, rows))


def _memory_model(work: ReplayWork, text: int) -> MemoryModel:
    """What the plan knows of this work."""
    config = dict(work.policy.module.config) | {"_class_name": "QwenImageTransformer2DModel"}
    model = ModelSize(
        transformer=Transformer.from_config(config, "the bench's model"),
        text_encoder_parameters=0,
        vae_parameters=0,
        vae_scale=8,
        vae_channels=96,
    )
    return MemoryModel(model, work.config, RunShape(text_tokens=text), CARDS["h200"])


def _show(rows: int, kept: str, name: str, seconds: float, planned: float) -> None:
    off = planned / seconds - 1.0
    print(f"{rows:4}  {kept:11}  {name:20}  {1e3 * seconds:6.1f}  {1e3 * planned:6.1f}  {off:+.0%}", flush=True)


def _seconds(work: ReplayWork, rows: int, *, train: bool = True) -> float:
    """Of one forward of `rows` rows, with its backward where it trains: the median of `REPEATS`."""
    forwards = [forward for forward in work.forwards(rows) if len(forward) == rows][:FORWARDS]

    def call() -> None:
        if train:
            accumulate_gradients(work.policy, work.replay, forwards, None, work.config, ReplayStatistics())
            for parameter in work.policy.trainable:
                parameter.grad = None
        else:
            for forward in forwards:
                work.replay.score(work.policy.module, work.replay.batch(forward))
        torch.cuda.synchronize()

    return statistics.median(_timed(call)) / len(forwards)


def _timed(call: Callable[[], None]) -> Iterator[float]:
    """Seconds of each repetition, after a call that compiles."""
    call()
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        yield time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="diffusers' blocks, not compiled: --no-replay-compile")
    for name, default in (("layers", 60), ("side", 384), ("text", 128), ("rank", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
