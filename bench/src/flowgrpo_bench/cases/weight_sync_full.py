"""A full weight sync between two processes, gather to commit, verified; beside it the same bytes copied unverified.

Stock SGLang's path is not run here: it needs its whole server, and took 40 to 51 s for these bytes in 512 MB buckets.
"""

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, hidden: int, bucket_mb: int) -> Workload:
    """Random bf16 weights of Qwen-Image's shapes in both processes."""
    from flowgrpo_bench.weight_sync import SyncPair, qwen_image_shapes

    pair = SyncPair(qwen_image_shapes(layers, hidden), device, "full")
    rivals = {"raw copy, unverified": lambda: pair.raw_copy(bucket_mb)} if device == "cuda" else {}

    def ours() -> None:
        pair.sync(bucket_mb)

    def gate() -> None:
        for seed, call in enumerate((ours, *rivals.values())):
            pair.refill(seed)
            call()
            pair.assert_equal()

    # No bytes_moved: the floor would be timed on copies of these bytes, which do not fit beside them.
    return Workload(ours=ours, rivals=rivals, gate=gate)


CASE = BenchCase(
    name="weight_sync_full",
    about="full weight sync of Qwen-Image's shapes, two processes, verified",
    setup=setup,
    sizes={f"40.9 GB, {mb} MB buckets": {"layers": 60, "hidden": 3072, "bucket_mb": mb} for mb in (512, 2048)},
    smoke={"2 layers of 64, 1 MB buckets": {"layers": 2, "hidden": 64, "bucket_mb": 1}},
    devices=("cuda", "cpu"),
    timers=("wall",),
)
