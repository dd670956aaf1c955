"""curate: D1 files to train and evaluation files, without duplicates, split by hash, the same bytes every time.

    1. read the input, in chunks on all cores; write a hash of each good record to disk, in buckets;
    2. bucket by bucket, keep the first record of each hash, and find the evaluation records;
    3. read the input again; copy the kept lines, byte for byte, in their order.

No table of the records is ever held: what grows with the input is one byte a record, and `--eval-size` entries.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from flowgrpo_dataprep.errors import SKIP_HINT, InputError, LineError
from flowgrpo_dataprep.lines import CHUNK_BYTES, Chunk, chunk_lines, chunks, lines_before
from flowgrpo_dataprep.prepare import OnError, input_files
from flowgrpo_dataprep.progress import Progress
from flowgrpo_dataprep.records import media_of, parse_record, resolve_media
from flowgrpo_dataprep.spill import BUCKETS, SMALL_BYTES, SpilledRows, first_of_each
from flowgrpo_dataprep.text import content_key, count_words, folded, id_key
from flowgrpo_dataprep.tokens import count_tokens, load_tokenizer, most_tokens
from flowgrpo_dataprep.writing import written_together

Dedup = Literal["exact", "folded"]
DROPPED, TRAIN, EVAL = 0, 1, 2
_BATCH_ROWS = 65536


@dataclass(frozen=True, kw_only=True)
class CurateConfig:
    """What is kept, and where it goes."""

    inputs: tuple[Path, ...]
    out_dir: Path
    prefix: str = ""
    """Begins each file name: `pickapic_` gives pickapic_train.jsonl."""
    min_prompt_words: int = 1
    """Shorter prompts are dropped: short captions give a group no variance to learn from."""
    max_prompt_tokens: int | None = None
    """Longer prompts are dropped: an engine refuses what its text window does not hold, which ends a run."""
    tokenizer: Path | None = None
    """What counts those tokens: a tokenizer.json, or the tokenizer's folder."""
    dedup: Dedup = "exact"
    """`exact`: the same characters. `folded`: also prompts that differ by letter case or white space alone."""
    check_media: bool = True
    """Drop records whose media files are not there."""
    eval_size: int | None = None
    """Records held out; overrides `eval_fraction`."""
    eval_fraction: float = 0.01
    """Share held out. A record's side depends on its sample_id alone, also when the input grows."""
    eval_subset_sizes: tuple[int, ...] = ()
    """Also write these first so many of the held-out records; each subset is part of the next larger one."""
    on_error: OnError = "stop"
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes of the first pass. The output does not depend on it."""

    def check(self) -> None:
        """Raises ValueError for settings that contradict themselves."""
        if self.eval_size is not None and self.eval_size < 0:
            raise ValueError(f"--eval-size must be 0 or more, got {self.eval_size}")
        if (self.max_prompt_tokens is None) != (self.tokenizer is None):
            raise ValueError("--max-prompt-tokens and --tokenizer go together: the one is counted with the other")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"--max-prompt-tokens must be above 0, got {self.max_prompt_tokens}")
        if not 0.0 <= self.eval_fraction < 1.0:
            raise ValueError(f"--eval-fraction must be in [0, 1), got {self.eval_fraction}")
        if bad := [size for size in self.eval_subset_sizes if size < 1]:
            raise ValueError(f"--eval-subset-sizes must be above 0, got {bad[0]}")
        if self.eval_size is not None and (big := [s for s in self.eval_subset_sizes if s > self.eval_size]):
            raise ValueError(f"--eval-subset-sizes {big[0]} is more than --eval-size {self.eval_size}")


@dataclass(kw_only=True)
class CurateReport:
    """What one `curate` did. A record counts once: skipped, short, long, missing media, duplicate, train or eval."""

    read: int = 0
    """Lines that are not blank."""
    skipped: int = 0
    """Bad lines left out under `--on-error skip`."""
    first_skipped: list[str] = field(default_factory=list)
    """The first ten of them, in words."""
    short: int = 0
    long: int = 0
    missing_media: int = 0
    duplicates: int = 0
    train: int = 0
    eval: int = 0
    files: dict[Path, int] = field(default_factory=dict)
    """Written files, and the records of each."""


def curate(config: CurateConfig, *, quiet: bool = True, chunk_bytes: int | None = None) -> CurateReport:
    """Writes `<prefix>train.jsonl`, `<prefix>eval.jsonl` and `<prefix>eval<N>.jsonl`.

    Raises InputError, before anything is written, for an unreadable input or tokenizer, a bad line (unless skipped),
    a sample_id used twice, or more held-out records than there are.
    """
    config.check()
    if config.tokenizer is not None:
        load_tokenizer(config.tokenizer)  # what is wrong with it is said before the input is read
    files = [file for path in config.inputs for file in input_files(path)]
    chunk_bytes = chunk_bytes or _chunk_bytes(sum(file.stat().st_size for file in files), config.workers)
    parts = [part for file in files for part in chunks(file, chunk_bytes)]
    inputs = ", ".join(map(str, config.inputs))
    size = sum(part.end - part.start for part in parts)
    report = CurateReport()
    with tempfile.TemporaryDirectory(prefix="curate-") as folder:
        shares = _hash_all(parts, config, Path(folder), report, Progress("curate 1/2", size, quiet=quiet))
        sides = np.zeros(report.read, dtype=np.uint8)
        ids = SpilledRows(Path(folder), "id", words=3, buckets=_buckets(parts))
        report.duplicates = _keep_first(shares, sides, ids)
        held_out = _held_out(ids, config, kept=int(np.count_nonzero(sides)), inputs=inputs, parts=parts)
        sides[held_out.astype(np.int64)] = EVAL
        report.train, report.eval = (int(np.count_nonzero(sides == side)) for side in (TRAIN, EVAL))
        _write(parts, config, sides, held_out, report, Progress("curate 2/2", size, quiet=quiet))
    return report


# --------------------------------------------------------------------------- pass 1


@dataclass(kw_only=True)
class _Share:
    """What one process found in one chunk."""

    rows: SpilledRows
    """Words: content hash (2), sample_id hash (2), number of the record in its chunk."""
    read: int = 0
    short: int = 0
    long: int = 0
    missing_media: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(line number in the chunk, what is wrong) of the first bad lines."""
    bad_count: int = 0


def _hash_all(
    parts: list[Chunk], config: CurateConfig, folder: Path, report: CurateReport, progress: Progress
) -> list[_Share]:
    work = partial(_hash_chunk, config=config, folder=folder, buckets=_buckets(parts))
    workers = min(config.workers, len(parts))
    shares: list[_Share] = []
    with ExitStack() as stack:
        if workers > 1:
            # forkserver: the parent may hold threads (a test session, a notebook), which fork would copy badly.
            pool = ProcessPoolExecutor(workers, mp_context=get_context("forkserver"))
            results = stack.enter_context(pool).map(work, range(len(parts)), parts)
        else:
            results = map(work, range(len(parts)), parts)
        for part, share in zip(parts, results, strict=True):
            if share.bad and config.on_error == "stop":
                line, what = share.bad[0]
                raise InputError(str(part.path), lines_before(part) + line, what, SKIP_HINT)
            for line, what in share.bad[: 10 - len(report.first_skipped)]:
                report.first_skipped.append(f"{part.path}, line {lines_before(part) + line}: {what}")
            report.read += share.read
            report.short += share.short
            report.long += share.long
            report.missing_media += share.missing_media
            report.skipped += share.bad_count
            shares.append(share)
            progress.finished(share.read, part.end - part.start)
    progress.done()
    return shares


def _chunk_bytes(total: int, workers: int) -> int:
    """About eight chunks a process, so that all end together; never so small, or so many, that files are the work."""
    return min(max(total // (8 * workers), CHUNK_BYTES // 8), 8 * CHUNK_BYTES)


def _buckets(parts: list[Chunk]) -> int:
    return 1 if sum(part.end - part.start for part in parts) < SMALL_BYTES else BUCKETS


def _hash_chunk(index: int, chunk: Chunk, *, config: CurateConfig, folder: Path, buckets: int) -> _Share:
    share = _Share(rows=SpilledRows(folder, f"content-{index}", words=5, buckets=buckets))
    normal: Callable[[str], str] = folded if config.dedup == "folded" else str
    base = chunk.path.parent
    buffer = bytearray()
    for line, raw in enumerate(chunk_lines(chunk), start=1):
        if not raw or raw.isspace():
            continue
        number = share.read
        share.read += 1
        try:
            record = parse_record(raw)
            prompt = record["prompt"]
            media = [path for paths in media_of(record, raw).values() for path in paths]
        except LineError as error:
            share.bad_count += 1
            if len(share.bad) < 10:
                share.bad.append((line, str(error)))
            if config.on_error == "stop":
                break
            continue
        if config.min_prompt_words > 1 and count_words(prompt) < config.min_prompt_words:
            share.short += 1
        elif _is_long(prompt, config):
            share.long += 1
        elif config.check_media and media and not all(resolve_media(path, base).is_file() for path in media):
            share.missing_media += 1
        else:
            buffer += content_key(normal(prompt), media)
            buffer += id_key(record["metadata"]["sample_id"])
            buffer += number.to_bytes(8, "little")
            if len(buffer) == 40 * _BATCH_ROWS:
                share.rows.add(_words(buffer))
                buffer.clear()
    share.rows.add(_words(buffer))
    if buckets > 1:
        share.rows.flush()
    return share


def _is_long(prompt: str, config: CurateConfig) -> bool:
    """Tokens are counted only where there are enough bytes for too many of them."""
    most, tokenizer = config.max_prompt_tokens, config.tokenizer
    if most is None or tokenizer is None or most_tokens(prompt) <= most:
        return False
    return count_tokens(prompt, tokenizer) > most


def _words(buffer: bytearray) -> np.ndarray:
    """The buffer as uint64 rows [R, 5]; a copy, for the buffer is used again."""
    return np.frombuffer(bytes(buffer), dtype="<u8").reshape(-1, 5)


# --------------------------------------------------------------------------- pass 2


def _keep_first(shares: list[_Share], sides: np.ndarray, ids: SpilledRows) -> int:
    """Marks the first record of each content as TRAIN and files its id: (id hash, record). Returns the duplicates."""
    bases = np.cumsum([0, *(share.read for share in shares)]).astype(np.uint64)
    duplicates = 0
    for bucket in range(shares[0].rows.count if shares else 0):
        rows = []
        for share, base in zip(shares, bases, strict=False):
            part = share.rows.bucket(bucket).copy()
            part[:, 4] += base
            rows.append(part)
        rows = np.concatenate(rows)
        first, _ = first_of_each(rows)
        duplicates += len(rows) - int(np.count_nonzero(first))
        sides[rows[first, 4].astype(np.int64)] = TRAIN
        ids.add(rows[first, 2:5])
    return duplicates


def _held_out(ids: SpilledRows, config: CurateConfig, *, kept: int, inputs: str, parts: list[Chunk]) -> np.ndarray:
    """Held-out record numbers, by rank: the k records of a subset are the first k.

    A record's rank is the second word of its id's hash: `eval_size` takes the lowest ranks, `eval_fraction` those
    under the same share of 2**64. Raises InputError for repeated ids, and for too few records.
    """
    bound = np.uint64(min(int(config.eval_fraction * 2.0**64), 2**64 - 1))
    chosen = np.empty((0, 2), dtype=np.uint64)
    for rows in ids.buckets():
        first, leader = first_of_each(rows)
        if not first.all():
            again = int(np.argmin(first))
            _refuse_repeated_id(parts, int(rows[leader[again], 2]), int(rows[again, 2]))
        candidates = rows[:, 1:3]
        if config.eval_size is None:
            candidates = candidates[candidates[:, 0] < bound]
        chosen = np.concatenate([chosen, candidates])
        if config.eval_size is not None:
            chosen = chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))][: config.eval_size]
    chosen = chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))]
    if not kept or len(chosen) == kept:
        what = f"{kept} records are kept and {len(chosen)} held out: none is left to train on"
        raise InputError(inputs, 0, what, "lower --eval-size or --min-prompt-words, or add prompts")
    if too_big := [size for size in config.eval_subset_sizes if size > len(chosen)]:
        what = f"{len(chosen)} records are held out, too few for --eval-subset-sizes {too_big[0]}"
        raise InputError(inputs, 0, what, "raise --eval-size or --eval-fraction")
    return chosen[:, 1]


def _refuse_repeated_id(parts: list[Chunk], first: int, again: int) -> None:
    """Two prompts under one sample_id would draw their noise from the same seed."""
    places = {}
    for number, (part, line, raw) in enumerate(_content(parts)):
        if number in (first, again):
            places[number] = (part, lines_before(part) + line, raw)
    (part, line, raw), (part_again, line_again, _) = places[min(first, again)], places[max(first, again)]
    raise InputError(
        str(part_again.path),
        line_again,
        f"sample_id {parse_record(raw)['metadata']['sample_id']!r} was already used for another prompt in "
        f"{part.path}, line {line}",
        "give each prompt its own sample_id; `dataprep prepare` does",
    )


# --------------------------------------------------------------------------- pass 3


def _content(parts: list[Chunk], progress: Progress | None = None) -> Iterator[tuple[Chunk, int, bytes]]:
    """(chunk, line number in it, line) of every line that is not blank: the records, in their order."""
    for part in parts:
        line = 0
        for line, raw in enumerate(chunk_lines(part), start=1):
            if raw and not raw.isspace():
                yield part, line, raw
        if progress:
            progress.finished(line, part.end - part.start)


def _write(
    parts: list[Chunk],
    config: CurateConfig,
    sides: np.ndarray,
    held_out: np.ndarray,
    report: CurateReport,
    progress: Progress,
) -> None:
    """Copies lines, so that a kept record has the bytes it had."""
    sizes = {"eval": len(held_out)} | {f"eval{size}": size for size in config.eval_subset_sizes}
    paths = {name: config.out_dir / f"{config.prefix}{name}.jsonl" for name in ("train", *sizes)}
    members = {name: frozenset(held_out[:size].tolist()) for name, size in sizes.items()}
    with written_together(list(paths.values())) as opened:
        files = dict(zip(paths, opened, strict=True))
        write_train = files["train"].write
        for number, (side, (_, _, raw)) in enumerate(zip(sides.tobytes(), _content(parts, progress), strict=True)):
            if side == TRAIN:
                write_train(raw + b"\n")
            elif side == EVAL:
                for name, records in members.items():
                    if number in records:
                        files[name].write(raw + b"\n")
    progress.done()
    report.files = {paths["train"]: report.train} | {paths[name]: size for name, size in sizes.items()}
