"""Saving a checkpoint, committed and on the disk; beside it loading it back, and the disk's own rate both ways.

Everything is on the disk before a write counts, and forgotten by the page cache before a read begins. A plain write or
read is as many bytes, in as many files at a time; the write goes past the page cache. Needs room for one checkpoint in
BENCH_DISK (default: this folder).
"""

from typing import Any

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, layers: int, hidden: int, lora_rank: int = 0) -> Workload:
    """Qwen-Image's shapes: bf16 weights with bf16 moments, or a float32 adapter with its moments."""
    import shutil

    from flowgrpo_fsdp_actor.checkpoint_files import COUNTERS, JSON_FILES, load_checkpoint, save_checkpoint
    from flowgrpo_fsdp_actor.checkpoint_shards import READERS, WRITERS

    from flowgrpo_bench import disk
    from flowgrpo_bench.training_state import TrainingState

    documents: dict[str, dict] = {name: {} for name in JSON_FILES}
    documents["trainer_state.json"] |= dict.fromkeys(COUNTERS, 7)

    def save(state: Any) -> None:
        save_checkpoint(state, state.tree, 0, documents)

    def load(state: Any) -> None:
        load_checkpoint(state, state.tree, 0)

    def gate() -> None:
        """On one layer; `loaded` checks the timed calls."""
        small = TrainingState(device, 1, hidden, lora_rank)
        before = small.checksum()
        save(small)
        small.zero()
        assert small.checksum() != before, "the state was all zeros: nothing could be seen"
        load(small)
        assert small.checksum() == before, "what was loaded is not what was saved"

    state = TrainingState(device, layers, hidden, lora_rank)
    saved = state.checksum()

    def emptied() -> None:
        shutil.rmtree(state.folder)
        state.folder.mkdir()

    def forgotten() -> None:
        disk.forget(state.folder)
        state.zero()

    def loaded() -> None:
        assert state.checksum() == saved, "what was loaded is not what was saved"
        emptied()

    return Workload(
        ours=lambda: save(state),
        rivals={
            "load": lambda: load(state),
            "plain write": lambda: disk.write_plain(state.folder, state.nbytes, WRITERS),
            "plain read": lambda: disk.read_plain(state.folder, READERS),
        },
        prepare={
            "ours": emptied,
            "load": forgotten,
            "plain write": loaded,
            "plain read": lambda: disk.forget(state.folder),
        },
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
