"""An adapter sync (LoRA factors only) between two processes, gather to commit, verified."""

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, hidden: int, rank: int, bucket_mb: int) -> Workload:
    """Random bf16 factors on the eight attention projections of each layer."""
    from flowgrpo_bench.weight_sync import SyncPair, qwen_image_lora_shapes

    pair = SyncPair(qwen_image_lora_shapes(layers, hidden, rank), device, "adapter")
    rivals = {"raw copy, unverified": lambda: pair.raw_copy(bucket_mb)} if device == "cuda" else {}

    def ours() -> None:
        pair.sync(bucket_mb)

    def gate() -> None:
        for seed, call in enumerate((ours, *rivals.values())):
            pair.refill(seed)
            call()
            pair.assert_equal()

    return Workload(ours=ours, rivals=rivals, gate=gate)


CASE = BenchCase(
    name="weight_sync_adapter",
    about="adapter sync, rank 64, 960 tensors, two processes, verified",
    setup=setup,
    sizes={"377 MB": {"layers": 60, "hidden": 3072, "rank": 64, "bucket_mb": 512}},
    smoke={"2 layers of 64, rank 4": {"layers": 2, "hidden": 64, "rank": 4, "bucket_mb": 1}},
    timers=("wall",),
)
