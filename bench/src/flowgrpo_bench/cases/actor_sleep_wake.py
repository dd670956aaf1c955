"""An actor's weights leave the GPU, or come back: 40.9 GB in the 1933 tensors of Qwen-Image, beside one raw copy.

A first sleep also makes the pinned memory; `gate` has done that, and its time is printed.
"""

import time

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, hidden: int, what: str) -> Workload:
    """Random bits in tensors of their own storages, as a model's are."""
    import torch
    from flowgrpo_fsdp_actor.sleep import DeviceMemory

    from flowgrpo_bench.weight_sync import checksum, qwen_image_shapes

    shapes = qwen_image_shapes(layers, hidden)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes}
    generator = torch.Generator(device).manual_seed(0)
    for tensor in tensors.values():
        tensor.view(torch.int16).random_(generator=generator)
    total = sum(tensor.nbytes for tensor in tensors.values())
    memory = DeviceMemory()
    slab = min(total, 1 << 30)
    host = torch.empty(slab, dtype=torch.uint8, pin_memory=device == "cuda")
    on_device = torch.empty(slab, dtype=torch.uint8, device=device)

    def sleep() -> None:
        memory.sleep(tensors.values(), [])
        if device == "cuda":
            torch.cuda.empty_cache()  # as the actor does: the engine is another process

    def raw(to, source) -> None:
        for start in range(0, total, slab):
            size = min(slab, total - start)
            to[:size].copy_(source[:size], non_blocking=True)

    def gate() -> None:
        before, free = checksum(tensors.items()), _free_bytes(device)
        started = time.perf_counter()
        sleep()
        print(f"  first sleep {time.perf_counter() - started:.2f} s")
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
        freed = _free_bytes(device) - free
        # The GPU's page tables of the pinned memory are 0.2 % of it.
        assert device == "cpu" or freed > 0.995 * total, f"asleep, it has given back {freed} of {total} bytes"
        memory.wake()
        assert checksum(tensors.items()) == before, "other bits came back"

    if what == "sleep":
        rivals = {"raw copy": lambda: raw(host, on_device)}
        prepare = {"ours": memory.wake}
        return Workload(ours=sleep, rivals=rivals, gate=gate, bytes_stored=total, prepare=prepare)
    rivals = {"raw copy": lambda: raw(on_device, host)}
    return Workload(ours=memory.wake, rivals=rivals, gate=gate, bytes_stored=total, prepare={"ours": sleep})


def _free_bytes(device: str) -> int:
    import torch

    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


CASE = BenchCase(
    name="actor_sleep_wake",
    about="40.9 GB of weights from GPU to host, and back, in 1933 storages; beside a raw pinned copy",
    setup=setup,
    sizes={f"{what}, 40.9 GB": {"layers": 60, "hidden": 3072, "what": what} for what in ("sleep", "wake")},
    cpu_sizes={f"{what}, 0.3 GB": {"layers": 2, "hidden": 1024, "what": what} for what in ("sleep", "wake")},
    smoke={f"{what}, tiny": {"layers": 1, "hidden": 64, "what": what} for what in ("sleep", "wake")},
    timers=("wall",),
    samples=5,
    launches=False,
)
