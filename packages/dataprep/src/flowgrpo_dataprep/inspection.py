"""inspect: everything about a train and an evaluation file at once, before a GPU is rented.

Problems end the command non-zero: lines that no run could use, a sample_id used twice, placeholders without
media, media that is missing or does not decode, a prompt that is in both files, one that is longer than the text
window. Warnings are what a person should know: duplicates, near leakage (letter case, white space), short prompts,
prompts that may be longer than the window.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_dataprep.errors import InputError, LineError
from flowgrpo_dataprep.lines import numbered_lines
from flowgrpo_dataprep.progress import Progress
from flowgrpo_dataprep.records import MEDIA_KINDS, media_of, parse_record, resolve_media
from flowgrpo_dataprep.spill import BUCKETS, SMALL_BYTES, SpilledRows, first_of_each
from flowgrpo_dataprep.text import content_key, count_words, folded, id_key
from flowgrpo_dataprep.tokens import (
    CURATE_HINT,
    TEMPLATE_END_TOKENS,
    TEXT_WINDOW,
    count_tokens,
    load_tokenizer,
    most_tokens,
)

SHOWN = 5
LENGTH_BINS = (16, 32, 64, 128, 256, 512, 1024)
_KINDS = ("exact", "folded", "id")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    train: Path | None = None
    eval: Path | None = None
    decode_media: bool = False
    """Open every picture that a record names."""
    short_words: int = 6
    """Prompts of fewer words are counted as short."""
    text_window: int = TEXT_WINDOW
    """Tokens that the engines take, of which the prompt template's end needs TEMPLATE_END_TOKENS."""
    tokenizer: Path | None = None
    """A tokenizer.json, or the tokenizer's folder: counts tokens. Without one, bytes give an upper bound."""

    @property
    def most_prompt_tokens(self) -> int:
        return self.text_window - TEMPLATE_END_TOKENS


@dataclass(kw_only=True)
class FileReport:
    """What is in one file. Lists of lines hold the first few; the counts are complete."""

    path: Path
    records: int = 0
    bad: int = 0
    bad_lines: list[str] = field(default_factory=list)
    tasks: dict[str, int] = field(default_factory=dict)
    short: int = 0
    words: dict[int, int] = field(default_factory=dict)
    """Words of a prompt to number of prompts, the last bin open (1,024 and more)."""
    lengths: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_BINS) + 1))
    """Prompts per bin of `length_unit`; bin k holds lengths up to LENGTH_BINS[k]."""
    length_unit: str = "bytes"
    longest: int = 0
    past_window: int = 0
    """Tokens: prompts that an engine refuses. Bytes: prompts that it may refuse (a token has at least one byte)."""
    past_window_lines: list[int] = field(default_factory=list)
    duplicates: int = 0
    duplicate_lines: list[tuple[int, int]] = field(default_factory=list)
    """(first line, line that repeats its prompt and media exactly)."""
    folded_duplicates: int = 0
    """Prompts that repeat another but for letter case and white space, beyond the exact ones."""
    folded_lines: list[tuple[int, int]] = field(default_factory=list)
    repeated_ids: int = 0
    repeated_id_lines: list[tuple[int, int]] = field(default_factory=list)
    bad_media: int = 0
    bad_media_lines: list[str] = field(default_factory=list)
    media_files: int = 0


@dataclass(kw_only=True)
class Report:
    """What `inspect` found."""

    files: dict[str, FileReport]
    """"train" and "eval", those that were given."""
    leaked: int = 0
    """Evaluation prompts that are in the train file, to the letter."""
    leaked_lines: list[tuple[int, int]] = field(default_factory=list)
    """(train line, eval line)."""
    near_leaked: int = 0
    """Evaluation prompts that are in the train file but for letter case and white space."""
    near_leaked_lines: list[tuple[int, int]] = field(default_factory=list)
    shared_ids: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect(config: InspectConfig, *, quiet: bool = True) -> Report:
    """Reads both files once. Raises InputError only for a file that cannot be read at all."""
    given = {name: path for name, path in (("train", config.train), ("eval", config.eval)) if path is not None}
    measure, unit = _length(config.tokenizer)
    with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
        report = Report(files={})
        largest = max((path.stat().st_size for path in given.values() if path.is_file()), default=0)
        buckets = 1 if largest < SMALL_BYTES else BUCKETS  # the same for both files: leaks are looked for by bucket
        spills: dict[str, dict[str, SpilledRows]] = {}
        for name, path in given.items():
            size = path.stat().st_size if path.is_file() else 0
            spills[name] = {
                kind: SpilledRows(Path(folder), f"{name}-{kind}", words=3, buckets=buckets) for kind in _KINDS
            }
            progress = Progress(f"inspect {name}", size, quiet=quiet)
            report.files[name] = _read(path, config, spills[name], measure, unit, progress)
        for name, file in report.files.items():
            _find_duplicates(file, spills[name])
        if len(given) == 2:
            _find_leaks(report, spills["train"], spills["eval"])
    _judge(report, config)
    return report


def _read(
    path: Path,
    config: InspectConfig,
    spills: dict[str, SpilledRows],
    measure: Callable[[str], int],
    unit: str,
    progress: Progress,
) -> FileReport:
    file = FileReport(path=path, length_unit=unit)
    rows: dict[str, bytearray] = {kind: bytearray() for kind in _KINDS}
    for line, raw in numbered_lines(path, progress):
        if not raw or raw.isspace():
            continue
        file.records += 1
        try:
            record = parse_record(raw)
            media = media_of(record, raw)
        except LineError as error:
            file.bad += 1
            if len(file.bad_lines) < SHOWN:
                file.bad_lines.append(f"line {line}: {error}")
            continue
        prompt, metadata = record["prompt"], record["metadata"]
        file.tasks[metadata["task"]] = file.tasks.get(metadata["task"], 0) + 1
        words = count_words(prompt)
        file.words[min(words, 1024)] = file.words.get(min(words, 1024), 0) + 1
        file.short += words < config.short_words
        length = measure(prompt)
        file.longest = max(file.longest, length)
        if length > config.most_prompt_tokens:
            file.past_window += 1
            if len(file.past_window_lines) < SHOWN:
                file.past_window_lines.append(line)
        file.lengths[int(np.searchsorted(LENGTH_BINS, length))] += 1
        for problem in _media_problems(prompt, media, path.parent, config.decode_media):
            file.bad_media += 1
            if len(file.bad_media_lines) < SHOWN:
                file.bad_media_lines.append(f"line {line}: {problem}")
        paths = [name for names in media.values() for name in names]
        file.media_files += len(paths)
        number = line.to_bytes(8, "little")
        rows["exact"] += content_key(prompt, paths) + number
        rows["folded"] += content_key(folded(prompt), paths) + number
        rows["id"] += id_key(metadata["sample_id"]) + number
        if len(rows["id"]) >= 24 * 65536:
            _spill(rows, spills)
    _spill(rows, spills)
    progress.done()
    return file


def _spill(rows: dict[str, bytearray], spills: dict[str, SpilledRows]) -> None:
    for kind, buffer in rows.items():
        spills[kind].add(np.frombuffer(bytes(buffer), dtype="<u8").reshape(-1, 3))
        buffer.clear()


def _length(tokenizer: Path | None) -> tuple[Callable[[str], int], str]:
    """How long a prompt is, and in what."""
    if tokenizer is None:
        return most_tokens, "bytes"
    load_tokenizer(tokenizer)  # what is wrong with it is said before the files are read
    return partial(count_tokens, tokenizer=tokenizer), "tokens"


def _media_problems(prompt: str, media: dict[str, list[str]], base: Path, decode: bool) -> Iterator[str]:
    for kind in MEDIA_KINDS:
        placeholders, files = prompt.count(f"<{kind}>"), media.get(kind, [])
        if placeholders != len(files):
            yield f"{placeholders} <{kind}> placeholder(s) in the prompt, but {len(files)} {kind} file(s)"
        for name in files:
            path = resolve_media(name, base)
            if not path.is_file():
                yield f"{name}: no such file"
            elif decode and kind == "image" and (why := _undecodable(path)):
                yield f"{name}: does not decode: {why}"


def _undecodable(path: Path) -> str:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(str(path), 0, "--decode-media needs pillow", "pip install flowgrpo-dataprep[media]") from None
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error)
    return ""


def _repeats(rows: np.ndarray) -> list[tuple[int, int]]:
    """(first line, repeating line) within the rows of one bucket, in order of the repeating line."""
    first, leader = first_of_each(rows)
    again = np.flatnonzero(~first)
    return sorted(zip(rows[leader[again], 2].tolist(), rows[again, 2].tolist(), strict=True), key=lambda pair: pair[1])


def _find_duplicates(file: FileReport, spills: dict[str, SpilledRows]) -> None:
    found: dict[str, list[tuple[int, int]]] = {}
    counts: dict[str, int] = {}
    for kind in _KINDS:
        found[kind], counts[kind] = [], 0
        for rows in spills[kind].buckets():
            pairs = _repeats(rows)
            counts[kind] += len(pairs)
            # Keep more than are shown of the folded ones: the exact ones among them are taken out below.
            found[kind] = sorted([*found[kind], *pairs], key=lambda pair: pair[1])[: SHOWN + counts["exact"]]
    exact = set(found["exact"])
    file.duplicates, file.duplicate_lines = counts["exact"], found["exact"][:SHOWN]
    file.folded_duplicates = counts["folded"] - counts["exact"]
    file.folded_lines = [pair for pair in found["folded"] if pair not in exact][:SHOWN]
    file.repeated_ids, file.repeated_id_lines = counts["id"], found["id"][:SHOWN]


def _shared(train: SpilledRows, evaluation: SpilledRows) -> Iterator[tuple[int, int]]:
    """(train line, eval line) of each evaluation row whose key is in the train file."""
    for train_rows, eval_rows in zip(train.buckets(), evaluation.buckets(), strict=True):
        both = np.concatenate([train_rows, eval_rows])
        _, leader = first_of_each(both)
        for row in range(len(train_rows), len(both)):
            if leader[row] < len(train_rows):
                yield int(both[leader[row], 2]), int(both[row, 2])


def _find_leaks(report: Report, train: dict[str, SpilledRows], evaluation: dict[str, SpilledRows]) -> None:
    exact = sorted(_shared(train["exact"], evaluation["exact"]), key=lambda pair: pair[1])
    leaked = {eval_line for _, eval_line in exact}
    near = [pair for pair in _shared(train["folded"], evaluation["folded"]) if pair[1] not in leaked]
    report.leaked, report.leaked_lines = len(exact), exact[:SHOWN]
    report.near_leaked = len(near)
    report.near_leaked_lines = sorted(near, key=lambda pair: pair[1])[:SHOWN]
    report.shared_ids = sum(1 for _ in _shared(train["id"], evaluation["id"]))


def _judge(report: Report, config: InspectConfig) -> None:
    """Findings in words."""
    for name, file in report.files.items():
        _judge_file(name, file, config, report)
    if report.leaked:
        report.problems.append(
            f"{report.leaked} eval prompt(s) are also in train{_pairs(report.leaked_lines, 'train', 'eval')}: the "
            "evaluation would measure memory. Curate both from one file"
        )
    if report.near_leaked:
        report.warnings.append(
            f"{report.near_leaked} eval prompt(s) are in train but for letter case or white space"
            f"{_pairs(report.near_leaked_lines, 'train', 'eval')}: `dataprep curate --dedup folded` keeps one"
        )
    if report.shared_ids:
        report.problems.append(f"{report.shared_ids} sample_id(s) are in both files: one sample, one side")


def _judge_file(name: str, file: FileReport, config: InspectConfig, report: Report) -> None:
    if not file.records:
        report.problems.append(f"{name}: the file is empty, it has no prompt")
        return
    for count, what, lines in (
        (file.bad, "line(s) that no run can use", file.bad_lines),
        (file.bad_media, "problem(s) with media", file.bad_media_lines),
    ):
        if count:
            report.problems.append(f"{name}: {count} {what}\n    " + "\n    ".join(lines))
    if file.repeated_ids:
        report.problems.append(
            f"{name}: {file.repeated_ids} sample_id(s) used again{_pairs(file.repeated_id_lines)}: two prompts would "
            "draw the same noise"
        )
    share = file.records - file.bad or 1
    if file.duplicates:
        report.warnings.append(
            f"{name}: {file.duplicates} exact duplicate(s){_pairs(file.duplicate_lines)}: `dataprep curate` keeps one"
        )
    if file.folded_duplicates:
        report.warnings.append(
            f"{name}: {file.folded_duplicates} duplicate(s) by letter case or white space{_pairs(file.folded_lines)}"
        )
    if file.short:
        report.warnings.append(
            f"{name}: {file.short} prompt(s), {file.short / share:.1%}, have fewer than {config.short_words} words: "
            "their groups have little variance to learn from; --min-prompt-words drops them"
        )
    if file.past_window:
        most, lines = config.most_prompt_tokens, ", ".join(map(str, file.past_window_lines))
        what = f"{name}: {file.past_window} prompt(s) have more than {most} {file.length_unit} (line {lines}): "
        if file.length_unit == "tokens":
            report.problems.append(f"{what}an engine refuses them, which ends a run. {CURATE_HINT.format(most=most)}")
        else:
            report.warnings.append(f"{what}an engine refuses those of more than {most} tokens; --tokenizer counts them")


def _pairs(lines: list[tuple[int, int]], left: str = "line", right: str = "line") -> str:
    return " (" + ", ".join(f"{left} {a} = {right} {b}" for a, b in lines) + ")" if lines else ""


def as_text(report: Report) -> str:
    """The report as a person reads it."""
    parts: list[str] = []
    for name, file in report.files.items():
        parts.append(f"{name}: {file.path}: {file.records:,} records")
        if file.tasks:
            parts.append("  tasks: " + ", ".join(f"{task} {count:,}" for task, count in sorted(file.tasks.items())))
            parts.append(f"  words: {_words(file.words)}")
            parts.append(f"  length in {file.length_unit} (longest {file.longest:,}):")
            parts += _histogram(file.lengths)
    for title, findings in (("problem", report.problems), ("warning", report.warnings)):
        parts += [f"{title}: {finding}" for finding in findings]
    parts.append(f"{len(report.problems)} problem(s), {len(report.warnings)} warning(s)")
    return "\n".join(parts)


def _words(words: dict[int, int]) -> str:
    ordered = sorted(words)
    total, below = sum(words.values()), 0
    for median in ordered:
        below += words[median]
        if 2 * below >= total:
            break
    return f"{ordered[0]} to {ordered[-1]}, median {median}"


def _histogram(counts: list[int]) -> list[str]:
    labels = [f"<= {edge}" for edge in LENGTH_BINS] + [f"> {LENGTH_BINS[-1]}"]
    most = max(counts) or 1
    return [
        f"    {label:>7} {count:>10,} {'#' * round(40 * count / most)}"
        for label, count in zip(labels, counts, strict=True)
    ]


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values, for a machine."""
    from dataclasses import asdict

    data = asdict(report)
    for file in data["files"].values():
        file["path"] = str(file["path"])
        file["words"] = {str(words): count for words, count in sorted(file["words"].items())}
    return data
