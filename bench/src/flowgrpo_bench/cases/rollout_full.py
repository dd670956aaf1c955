"""The case `rollout` at the full size: all 60 of Qwen-Image's layers, the whole request.

Writes 43 GB below TMPDIR (/dev/shm is far faster than a disk) and holds the model twice on the GPU, in the server and
in diffusers' pipeline: that one judges the log-probs, and is timed at 16 candidates alone.
"""

from flowgrpo_bench.case import BenchCase
from flowgrpo_bench.cases import rollout

FULL = {**rollout.MID, "layers": 60}
CASE = BenchCase(
    name="rollout_full",
    about="images through the SGLang server, Qwen-Image at full size, request to answer",
    setup=rollout.setup,
    sizes={
        "16 candidates": {"candidates": 16, "rivals": (rollout.DIFFUSERS,), **FULL},
        "32 candidates": {"candidates": 32, "rivals": (), **FULL},
    },
    smoke={"2 candidates, 1 layer": {"candidates": 2, "layers": 1, "heads": 2, "side": 64, "rivals": ()}},
    devices=("cuda",),
    timers=("wall",),
    samples=3,
    launches=False,
)
