"""Curating prompts: duplicates and short ones dropped, split by hash, written as JSONL. All ways give the same bytes.

Memory is not seen here: the README of flowgrpo-dataprep has the peak of each way, each in a process of its own.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path

from flowgrpo_bench.case import BenchCase, Workload

MIN_WORDS, EVAL_SIZE = 6, 64


def setup(device: str, *, prompts: int) -> Workload:
    """Synthetic prompts of 1 to 30 words, a tenth of them repeated, in a temporary folder."""
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="curate-bench-")
    source = Path(folder.name, "raw.jsonl")
    write_prompts(source, prompts)

    def ours() -> Path:
        from flowgrpo_dataprep.curate import CurateConfig, curate

        out = Path(folder.name, "ours")
        curate(CurateConfig(inputs=(source,), out_dir=out, min_prompt_words=MIN_WORDS, eval_size=EVAL_SIZE))
        return out

    def plain() -> Path:
        return plain_loop(source, Path(folder.name, "plain"))

    rivals = {"plain Python loop": plain}
    if find_spec("datasets"):
        rivals["datasets"] = lambda: with_datasets(source, Path(folder.name, "datasets"))

    def gate() -> None:
        assert folder  # the folder lives as long as the workload
        expected = plain()
        for way in (ours, *rivals.values()):
            out = way()
            for name in ("train.jsonl", "eval.jsonl"):
                assert (out / name).read_bytes() == (expected / name).read_bytes(), name

    return Workload(ours=ours, rivals=rivals, gate=gate)


def write_prompts(path: Path, count: int, *, seed: int = 0) -> None:
    """D1 lines as `dataprep prepare` writes them."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 10))) for _ in range(20_000)]
    pool: list[str] = []
    with open(path, "w") as file:
        for number in range(count):
            again = pool and rng.random() < 0.1
            prompt = rng.choice(pool) if again else " ".join(rng.choices(words, k=rng.randint(1, 30)))
            if len(pool) < 100_000:
                pool.append(prompt)
            record = {"prompt": prompt, "metadata": {"task": "t2i", "sample_id": f"synthetic_{number:08d}"}}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def plain_loop(source: Path, out: Path) -> Path:
    """What one would write in ten minutes: everything in memory."""
    from flowgrpo_dataprep.text import content_key, id_key

    seen, kept = set(), []
    with open(source) as file:
        for line in file:
            record = json.loads(line)
            if len(record["prompt"].split()) < MIN_WORDS:
                continue
            key = content_key(record["prompt"])
            if key not in seen:
                seen.add(key)
                rank = int.from_bytes(id_key(record["metadata"]["sample_id"])[8:], "little")
                kept.append((rank, len(kept), line))
    return _write(out, kept)


def with_datasets(source: Path, out: Path) -> Path:
    """The same through Hugging Face `datasets`, without its cache of earlier runs."""
    import tempfile

    import datasets
    from flowgrpo_dataprep.text import content_key, id_key

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("text", data_files=str(source), split="train", cache_dir=cache)

        def keys(batch):
            records = [json.loads(line) for line in batch["text"]]
            ranks = [int.from_bytes(id_key(r["metadata"]["sample_id"])[8:], "little") for r in records]
            return {
                "key": [content_key(r["prompt"]) for r in records],
                "words": [len(r["prompt"].split()) for r in records],
                "rank": [str(rank) for rank in ranks],
            }

        rows = rows.map(keys, batched=True, num_proc=2).filter(
            lambda batch: [n >= MIN_WORDS for n in batch["words"]], batched=True, num_proc=2
        )
        seen: set[bytes] = set()

        def first(key: bytes) -> bool:
            return key not in seen and not seen.add(key)

        rows = rows.filter(lambda batch: [first(key) for key in batch["key"]], batched=True)
        kept = [(int(row["rank"]), number, row["text"] + "\n") for number, row in enumerate(rows)]
    return _write(out, kept)


def _write(out: Path, kept: list[tuple[int, int, str]]) -> Path:
    held_out = {number for _, number, _ in sorted(kept)[:EVAL_SIZE]}
    out.mkdir(exist_ok=True)
    with open(out / "train.jsonl", "w") as train, open(out / "eval.jsonl", "w") as evaluation:
        for _, number, line in kept:
            (evaluation if number in held_out else train).write(line)
    return out


CASE = BenchCase(
    name="curate_prompts",
    about="a million prompts: deduplicate, filter, split, write",
    setup=setup,
    sizes={"1,000,000 prompts": {"prompts": 1_000_000}},
    smoke={"2,000 prompts": {"prompts": 2_000}},
    devices=("cpu",),
    timers=("wall",),
)
