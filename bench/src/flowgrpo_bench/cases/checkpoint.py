"""Saving a checkpoint, committed and on the disk; beside it loading it back, and the disk's own rate both ways.

Everything is on the disk before a write counts, and forgotten by the page cache before a read begins. A plain write or
read is as many bytes, in as many files at a time. Needs room for one checkpoint in BENCH_DISK (default: this folder).
"""

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, hidden: int, lora_rank: int = 0) -> Workload:
    """Qwen-Image's shapes: bf16 weights with bf16 moments, or a float32 adapter with its moments."""
    import shutil

    from flowgrpo_fsdp_actor.checkpoint_files import JSON_FILES, load_checkpoint, save_checkpoint
    from flowgrpo_fsdp_actor.checkpoint_shards import READERS, WRITERS

    from flowgrpo_bench import disk
    from flowgrpo_bench.training_state import TrainingState

    state = TrainingState(device, layers, hidden, lora_rank)
    documents: dict[str, dict] = {name: {} for name in JSON_FILES}
    documents["trainer_state.json"]["lr_scheduler_steps"] = 7

    def emptied() -> None:
        shutil.rmtree(state.folder)
        state.folder.mkdir()

    def save() -> None:
        save_checkpoint(state, state.tree, 0, documents)  # ty: ignore[invalid-argument-type]

    def load() -> None:
        load_checkpoint(state, state.tree, 0)  # ty: ignore[invalid-argument-type]

    def gate() -> None:
        before = state.checksum()
        emptied()
        save()
        state.zero()
        assert state.checksum() != before, "the state was all zeros: nothing could be seen"
        load()
        assert state.checksum() == before, "what was loaded is not what was saved"

    def forgotten() -> None:
        disk.forget(state.folder)

    return Workload(
        ours=save,
        rivals={
            "load": load,
            "plain write": lambda: disk.write_plain(state.folder, state.nbytes, WRITERS),
            "plain read": lambda: disk.read_plain(state.folder, READERS),
        },
        prepare={"ours": emptied, "load": forgotten, "plain write": emptied, "plain read": forgotten},
        gate=gate,
        bytes_stored=state.nbytes,
    )


CASE = BenchCase(
    name="checkpoint",
    about="save of a checkpoint to disk, committed; beside it the load, and the disk's own rate",
    setup=setup,
    sizes={
        "40.9 GB, weights and moments of 20 layers": {"layers": 20, "hidden": 3072},
        "adapter, 2.3 GB with moments": {"layers": 60, "hidden": 3072, "lora_rank": 64},
    },
    cpu_sizes={"0.2 GB, weights and moments": {"layers": 1, "hidden": 1024}},
    smoke={"1 layer of 64": {"layers": 1, "hidden": 64}},
    timers=("wall",),
    samples=1,
    tolerance={"cpu": 1.0, "cuda": 0.5},
)
