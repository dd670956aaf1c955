"""prepare: public prompt collections to D1 JSONL, one record a line, as a stream.

    prompt files -> one converter -> {"prompt": ..., "metadata": {"task": "t2i", "sample_id": ..., ...}}

A sample_id names the place of the prompt in its source (`pickapic_0000017`: the 17th line or row), so it stays
the same when a bad line before it is skipped.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from flowgrpo_dataprep.errors import SKIP_HINT, InputError, LineError
from flowgrpo_dataprep.lines import is_parquet, numbered_lines
from flowgrpo_dataprep.progress import Progress
from flowgrpo_dataprep.source import GENERATION_TASKS, forbidden_character
from flowgrpo_dataprep.writing import written_whole

OnError = Literal["stop", "skip"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", "")
PARQUET_SUFFIXES = (".parquet", ".pq")


@dataclass(frozen=True, kw_only=True)
class Converter:
    """How one kind of prompt collection is read."""

    name: str
    """Value of `--source`."""
    about: str
    columns: tuple[str, ...]
    """Names of the prompt in parquet and JSONL; the first that is there is taken."""
    extra: Callable[[str], dict[str, Any]] = lambda prompt: {}
    """Metadata read off the prompt itself. Raises LineError for a prompt that this source cannot hold."""


_QUOTED = re.compile(r'"([^"]+)"|\u201c([^\u201d]+)\u201d')


def quoted_text(prompt: str) -> dict[str, Any]:
    """`metadata.text`: what the picture must spell, the parts of the prompt in double quotes."""
    parts = [(straight or curly).strip() for straight, curly in _QUOTED.findall(prompt)]
    if not (text := " ".join(part for part in parts if part)):
        raise LineError('no text in double quotes, such as: a sign that says "OPEN"')
    return {"text": text}


CONVERTERS: dict[str, Converter] = {
    converter.name: converter
    for converter in (
        Converter(
            name="pickapic", about="Pick-a-Pic: parquet `caption`, or a prompt a line", columns=("caption", "prompt")
        ),
        Converter(
            name="prompts", about="any prompts: parquet, JSONL or a prompt a line", columns=("prompt", "caption")
        ),
        Converter(
            name="ocr",
            about="prompts that quote the text to draw, which becomes metadata.text",
            columns=("prompt", "caption"),
            extra=quoted_text,
        ),
        Converter(name="geneval", about="GenEval JSONL: keeps tag, include, exclude as metadata", columns=("prompt",)),
    )
}


@dataclass(kw_only=True)
class PrepareReport:
    """What one `prepare` did."""

    read: int = 0
    """Lines and rows."""
    written: int = 0
    blank: int = 0
    skipped: int = 0
    """Bad lines left out under `--on-error skip`."""
    first_skipped: list[str] = field(default_factory=list)
    """The first ten of them, in words."""


def prepare(
    *,
    source: str,
    inputs: list[Path],
    output: Path,
    task: str = "t2i",
    id_prefix: str | None = None,
    reward: str | None = None,
    on_error: OnError = "stop",
    quiet: bool = True,
) -> PrepareReport:
    """Converts files, or folders of files, in the order given; a folder's files in the order of their names.

    `id_prefix` begins every sample_id (None: the source's name and `_`); files that are prepared apart and used
    together need different ones. `reward` becomes `metadata.reward`, the component that judges these prompts.

    Raises InputError, and leaves no output, for an input that cannot be read and, unless `on_error` is "skip",
    for the first bad line.
    """
    if task not in GENERATION_TASKS:
        raise ValueError(f"task {task!r} is not one of {', '.join(GENERATION_TASKS)}")
    converter = CONVERTERS[source]
    prefix = f"{source}_" if id_prefix is None else id_prefix
    constant = {"task": task} | ({} if reward is None else {"reward": reward})
    files = [file for path in inputs for file in input_files(path)]
    progress = Progress("prepare", sum(file.stat().st_size for file in files), quiet=quiet)
    report = PrepareReport()
    with written_whole(output) as out:
        for file in files:
            for number, raw in _records(file, converter, progress):
                report.read += 1
                try:
                    record = _convert(raw, converter, constant, f"{prefix}{report.read:07d}")
                except LineError as error:
                    failure = InputError(str(file), number, str(error), SKIP_HINT)
                    if on_error == "stop":
                        raise failure from None
                    report.skipped += 1
                    if len(report.first_skipped) < 10:
                        report.first_skipped.append(f"{file}, line {number}: {error}")
                    continue
                if record is None:
                    report.blank += 1
                    continue
                out.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
                report.written += 1
            progress.finished(0, file.stat().st_size)
        progress.done()
        if not report.written:
            raise InputError(
                ", ".join(map(str, inputs)), 0, f"no prompt in {report.read} lines", "check --source and --input"
            )
    return report


def input_files(path: Path) -> list[Path]:
    """`path`, or the prompt files below a folder, sorted. Raises InputError if there is none, or of no known kind."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) and file.suffix)
        if not files:
            raise InputError(str(path), 0, "no .txt, .jsonl or .parquet file in this folder", "check --input")
        return files
    if not path.is_file():
        raise InputError(str(path), 0, "no such file", "check --input")
    if not _kind(path):
        raise InputError(
            str(path),
            0,
            f"a {path.suffix} file is no known kind",
            "use .txt, .jsonl or .parquet; each but parquet may be .gz",
        )
    return [path]


def _kind(path: Path) -> Literal["text", "json", "parquet"] | None:
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    if suffix in JSON_SUFFIXES:
        return "json"
    return "text" if suffix in TEXT_SUFFIXES else None


def _records(path: Path, converter: Converter, progress: Progress) -> Iterator[tuple[int, bytes | str | None]]:
    """(line or row number, what it holds): a line of text or JSON as bytes, a parquet cell as str."""
    kind = _kind(path)
    if kind == "parquet" or is_parquet(path):
        yield from _parquet_rows(path, converter, progress)
        return
    for number, raw in numbered_lines(path, progress):
        yield number, (_JsonLine(raw) if kind == "json" else raw)


class _JsonLine(bytes):
    """A line to be parsed as JSON, not taken as the prompt itself."""


def _parquet_rows(path: Path, converter: Converter, progress: Progress) -> Iterator[tuple[int, str | None]]:
    """`_parquet_cells`, what is broken in the file said in words, also where only a page of it is."""
    from polars.exceptions import PolarsError

    try:
        yield from _parquet_cells(path, converter, progress)
    except (PolarsError, OSError) as error:
        raise InputError(str(path), 0, f"not a readable parquet file: {error}", "copy the file again") from error


def _parquet_cells(path: Path, converter: Converter, progress: Progress) -> Iterator[tuple[int, str | None]]:
    """Reads the prompt column alone, so the pictures of Pick-a-Pic's files are never touched."""
    import polars as pl  # 1 s of import, which text inputs need not pay

    scan = pl.scan_parquet(path)
    names = scan.collect_schema().names()
    column = next((name for name in converter.columns if name in names), None)
    if column is None:
        raise InputError(
            str(path),
            0,
            f"no column {' or '.join(converter.columns)}; it has {', '.join(names)}",
            "rename the prompt column",
        )
    size = path.stat().st_size
    total = max(1, scan.select(pl.len()).collect().item())
    row = 0
    for batch in scan.select(pl.col(column)).collect_batches(chunk_size=16384, maintain_order=True):
        if batch.schema[column] != pl.String:
            raise InputError(str(path), 0, f"column {column} holds {batch.schema[column]}, not text", "cast it to text")
        for value in batch[column]:
            row += 1
            yield row, value
        progress.advance(len(batch), size * row // total)


def _convert(raw: bytes | str | None, converter: Converter, constant: dict, sample_id: str) -> dict[str, Any] | None:
    """The D1 record, or None for a blank line. Raises LineError."""
    given: dict[str, Any] = {}
    if isinstance(raw, _JsonLine):
        if not raw.strip():
            return None
        prompt, given = _from_json(raw, converter, constant["task"])
    elif isinstance(raw, bytes):
        try:
            prompt = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise LineError(f"not UTF-8 at byte {error.start} (0x{raw[error.start]:02x})") from None
        if not prompt:
            return None
    else:
        prompt = (raw or "").strip()
        if not prompt:
            raise LineError("the prompt is null or blank")
    if what := forbidden_character(prompt):
        raise LineError(f"the prompt {what}")
    metadata = {"task": constant["task"], "sample_id": sample_id} | converter.extra(prompt) | given | constant
    return {"prompt": prompt, "metadata": metadata}


def _from_json(raw: bytes, converter: Converter, task: str) -> tuple[str, dict[str, Any]]:
    """The prompt of a JSON line, and every other field as metadata."""
    try:
        record = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise LineError(f"a JSON {type(record).__name__}, not an object")
    column = next((name for name in converter.columns if name in record), None)
    if column is None:
        raise LineError(f"no {' or '.join(converter.columns)} in the record")
    prompt = record.pop(column)
    if not isinstance(prompt, str) or not prompt.strip():
        raise LineError(f"`{column}` is {prompt!r}; it must be a text that is not blank")
    own = record.pop("metadata", {})
    if not isinstance(own, dict):
        raise LineError(f"`metadata` is a {type(own).__name__}, not an object")
    given = record | own
    if given.get("task", task) != task:
        raise LineError(f"metadata.task is {given['task']!r}, but --task is {task!r}")
    if "sample_id" in given and not (isinstance(given["sample_id"], str) and given["sample_id"]):
        raise LineError(f"metadata.sample_id is {given['sample_id']!r}; it must be a text that is not empty")
    return prompt.strip(), given
