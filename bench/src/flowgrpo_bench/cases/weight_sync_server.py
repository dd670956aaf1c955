"""A full weight sync into the real SGLang server, gather to commit, verified; beside it stock's own tensor update.

12 of Qwen-Image's 60 layers, 8.2 GB in bf16. Rivals: the stock server's `/update_weights_from_tensor`, which verifies
nothing, and the same bytes copied between two plain processes through one kept buffer.
"""

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, heads: int, bucket_mb: int) -> Workload:
    """The sender's weights are those of a diffusers transformer in this process, which also judges the result."""
    import torch
    from flowgrpo_rollout_sglang.wire import WeightSender

    from flowgrpo_bench import rollout_servers as servers
    from flowgrpo_bench.stock_sync import stock_update
    from flowgrpo_bench.weight_sync import SyncPair

    model = (device, layers, heads)
    engine, transformer = servers.our_engine(*model), servers.pipeline(*model).transformer
    weights = dict(transformer.named_parameters())
    shapes = [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    sender = WeightSender("cuda_ipc" if device == "cuda" else "shm", bucket_size_mb=bucket_mb)

    def ours() -> None:
        manifest = sender.manifest(shapes, version=engine.policy_version + 1)
        sender.send(weights.items(), manifest, engine)
        engine.commit(manifest.version)

    def stock() -> None:
        stock_update(servers.stock_server(*model).client, weights, bucket_mb)

    rivals = {}
    if device == "cuda":
        pair = SyncPair(shapes, device, "full")
        rivals = {
            "stock tensor update, unverified": stock,
            "raw copy between two processes": lambda: pair.raw_copy(bucket_mb),
        }

    def gate() -> None:
        asked = servers.request(2, 64)
        with torch.no_grad():
            for tensor in weights.values():
                tensor.mul_(1.0 + 2.0**-4)  # another policy than the engine's
        ours()
        servers.assert_parity(transformer, engine.generate([asked])[0])

    # No bytes_moved: the floor would be timed on copies of these bytes, which need not fit beside three models.
    return Workload(ours=ours, rivals=rivals, gate=gate)


CASE = BenchCase(
    name="weight_sync_server",
    about="full weight sync into the SGLang server, 12 of Qwen-Image's layers, verified",
    setup=setup,
    sizes={f"8.2 GB, {mb} MB buckets": {"layers": 12, "heads": 24, "bucket_mb": mb} for mb in (512, 2048)},
    smoke={"1 layer, 8 MB buckets": {"layers": 1, "heads": 2, "bucket_mb": 8}},
    devices=("cuda",),
    timers=("wall",),
    samples=3,
    launches=False,
)
