"""The case `rollout` at the full size: all 60 of Qwen-Image's layers, 16 candidates, the whole request.

Writes 43 GB below TMPDIR and holds the model twice on the GPU, in the server and in diffusers' pipeline.
"""

from flowgrpo_bench.case import BenchCase
from flowgrpo_bench.cases import rollout

CASE = BenchCase(
    name="rollout_full",
    about="images through the SGLang server, Qwen-Image at full size, request to answer",
    setup=rollout.setup,
    sizes={"16 candidates": {"candidates": 16, "stock": False, **rollout.MID, "layers": 60}},
    smoke={"2 candidates, 1 layer": {"candidates": 2, "layers": 1, "heads": 2, "side": 64, "stock": False}},
    devices=("cuda",),
    timers=("wall",),
    samples=5,
    launches=False,
)
