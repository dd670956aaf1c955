"""A full weight sync from a policy that FSDP2 shards over two ranks to an engine on each card.

Beside it FSDP's own gather (unshard, unit by unit, copied) through the same wire, and an all-gather of as many bytes.
An adapter is whole on every rank: its sync is that of weight_sync_adapter.
"""

from flowgrpo_bench.case import BenchCase, Workload

WORLD = 2


def setup(device: str, *, layers: int, hidden: int, bucket_mb: int) -> Workload:
    """Random weights of Qwen-Image's shapes on two ranks, and two receiving processes."""
    from flowgrpo_bench.fsdp_sync import FsdpSync

    ranks = FsdpSync(device, WORLD, layers=layers, hidden=hidden)

    def ours() -> None:
        ranks.sync(bucket_mb)

    def unshard() -> None:
        ranks.sync(bucket_mb, gathered_by="unshard")

    def gate() -> None:
        for seed, call in enumerate((ours, unshard)):
            ranks.all("refill", seed)
            call()
            ranks.assert_equal()

    rivals = {"FSDP's unshard, copied": unshard, "all-gather alone": lambda: ranks.all("gather_alone")}
    return Workload(ours=ours, rivals=rivals, gate=gate)


CASE = BenchCase(
    name="weight_sync_fsdp",
    about="weight sync from two FSDP2 ranks to the engine on each card, gather to commit, verified",
    setup=setup,
    sizes={
        "40.9 GB, 512 MB buckets": {"layers": 60, "hidden": 3072, "bucket_mb": 512},
        "40.9 GB, 2048 MB buckets": {"layers": 60, "hidden": 3072, "bucket_mb": 2048},
    },
    smoke={"1 layer of 64, 1 MB buckets": {"layers": 1, "hidden": 64, "bucket_mb": 1}},
    timers=("wall",),
    gpus=WORLD,
    launches=False,
    tolerance={"cpu": 0.5, "cuda": 0.15},
)
