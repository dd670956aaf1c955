"""The prompts of a run: checked once, shuffled by seed, found again by rollout id.

`PromptSource.batch(rollout_id)` is a pure function of the file, the seed and the id. It keeps no position, so a
resumed run, a second rank or a second process draws the same prompts without being told where the first one was.
"""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATION_TASKS = ("t2i",)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    prompt: str
    sample_id: str | None
    """`metadata.sample_id`; None where the file gives none."""
    metadata: dict[str, Any]


class PromptFileError(ValueError):
    """A prompt file that no run can use: the file, and each problem with its line."""

    SHOWN = 10

    def __init__(self, path: str, problems: tuple[str, ...]):
        super().__init__(path, problems)  # pickle rebuilds from these
        self.path, self.problems = path, problems

    def __str__(self) -> str:
        shown = "\n".join(f"  {problem}" for problem in self.problems[: self.SHOWN])
        more = len(self.problems) - self.SHOWN
        return (
            f"{self.path} is not a usable prompt file: {len(self.problems)} problem(s)\n{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nhint: `dataprep prepare` and `dataprep curate` write usable files; "
            f"`dataprep inspect --train {self.path}` shows everything"
        )


class PromptSource:
    """Batches of prompts from one D1 file, the same on every rank and after every resume.

    An epoch is one shuffle of the file. It gives `batches_per_epoch` whole batches; the few prompts left over
    wait for the next shuffle, so that no batch holds a prompt twice (two groups of one prompt would draw the
    same pictures). Only the lines' positions are held in memory: 8 bytes a prompt.

    The file that was checked stays open: what `dataprep` later puts under its name does not reach this run. Changed
    in its place, it is refused where it is read.
    """

    def __init__(self, path: str | Path, *, seed: int, batch_size: int):
        """Reads and checks the whole file. Raises PromptFileError with every problem, or ValueError."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.path, self.seed, self.batch_size = Path(path), seed, batch_size
        self._offsets = array("Q")
        self._open()
        problems: list[str] = []
        digest = hashlib.sha256()
        for offset, raw, problem in _checked_lines(self.path, self._descriptor):
            digest.update(raw)
            if problem:
                problems.append(problem)
            else:
                self._offsets.append(offset)
        if not problems and len(self) < batch_size:
            problems = [
                f"it has {len(self)} prompts, fewer than a batch of {batch_size}: a batch would hold a prompt twice. "
                "Lower --rollout-batch-size or add prompts"
            ]
        if problems:
            raise PromptFileError(str(path), tuple(problems))
        self.fingerprint = digest.hexdigest()
        """SHA-256 of the non-blank lines: a resumed run can check that its prompts are the same."""
        self._epoch = -1
        self._order = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def batches_per_epoch(self) -> int:
        return len(self) // self.batch_size

    def batch(self, rollout_id: int) -> list[Prompt]:
        """The `batch_size` prompts of this rollout, counted from 0."""
        if rollout_id < 0:
            raise ValueError(f"rollout_id counts from 0, got {rollout_id}")
        epoch, position = divmod(rollout_id, self.batches_per_epoch)
        order = self._shuffled(epoch)
        return self._read(order[position * self.batch_size : (position + 1) * self.batch_size])

    def all(self) -> Iterator[Prompt]:
        """Every prompt in file order, for evaluation."""
        for start in range(0, len(self), 1024):
            yield from self._read(range(start, min(start + 1024, len(self))))

    def _shuffled(self, epoch: int) -> array:
        """The order of one epoch: line numbers sorted by a keyed hash, so no random generator's version matters."""
        if epoch != self._epoch:
            key = f"{self.seed}:{epoch}".encode()

            def rank(index: int) -> bytes:
                return hashlib.blake2b(index.to_bytes(8, "little"), key=key, digest_size=16).digest()

            self._order = array("Q", sorted(range(len(self)), key=rank))
            self._epoch = epoch
        return self._order

    def _read(self, indices: Any) -> list[Prompt]:
        self._check_unchanged()
        prompts = []
        for index in indices:
            start = self._offsets[index]
            end = self._offsets[index + 1] if index + 1 < len(self) else self._state[0]
            # At a place, not from the file's position: other threads may read too. Blank lines may follow.
            raw = os.pread(self._descriptor, end - start, start)
            prompts.append(_prompt(raw.partition(b"\n")[0]))
        return prompts

    def _open(self) -> None:
        """Keeps the file open for as long as this object lives; nothing where there is no file."""
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if self.path.is_file() else None
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)
            self._state = _state(self._descriptor)

    def _check_unchanged(self) -> None:
        """Raises PromptFileError if the file's bytes are not those that were checked; a new time alone is no change."""
        if (state := _state(self._descriptor)) == self._state:
            return
        digest = hashlib.sha256()
        for _, raw, _ in _checked_lines(self.path, self._descriptor):
            digest.update(raw)
        if state[0] != self._state[0] or digest.hexdigest() != self.fingerprint:
            what = "it was changed while the run reads it; put it back, or start the run anew with the changed file"
            raise PromptFileError(str(self.path), (what,))
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens the file again. Raises PromptFileError if it has gone, or is not the one that was checked."""
        self.__dict__.update(state)
        checked = self._state
        self._open()
        if self._descriptor is None:
            raise PromptFileError(str(self.path), (f"{self.path}: no such file",))
        self._state = checked
        self._check_unchanged()


def _state(descriptor: int) -> tuple[int, int]:
    """Size in bytes and time of the last change in ns."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def validate_prompt_file(path: str | Path, *, max_lines: int | None = 50_000) -> list[str]:
    """What is wrong with a prompt file, in words; empty if nothing is. Never raises for a bad file.

    Reads at most `max_lines` lines (None: all), so that preflight stays quick; `PromptSource` reads all.
    """
    problems = []
    for number, (_, _, problem) in enumerate(_checked_lines(Path(path)), start=1):
        if problem:
            problems.append(problem)
        if max_lines is not None and number >= max_lines:
            break
    return problems


def _checked_lines(path: Path, descriptor: int | None = None) -> Iterator[tuple[int, bytes, str]]:
    """(offset, line, problem or "") for each non-blank line; one entry for a file that cannot be read or is empty.

    `descriptor`: of the file if it is open; its position is moved.
    """
    if descriptor is None and not path.is_file():
        yield 0, b"", f"{path}: no such file" if not path.exists() else f"{path}: not a file"
        return
    seen: dict[str, int] = {}
    lines = offset = 0
    with open(path if descriptor is None else os.dup(descriptor), "rb") as file:
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                lines += 1
                yield offset, raw, _numbered_problem(raw, number, seen)
            offset += len(raw)
    if not lines:
        yield 0, b"", f"{path}: the file is empty, it has no prompt"


def parse_line(raw: bytes) -> tuple[dict[str, Any] | None, str]:
    """The record of one line of a prompt file and "", or None and what is wrong with the line.

    A missing sample_id is not wrong: a run can do without.
    """
    try:
        record = json.loads(raw)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 10,000 nested lists
        return None, f"not JSON that can be read: {error}"
    problem = _record_problem(record)
    return (None, problem) if problem else (record, "")


def _record_problem(record: Any) -> str:
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object"
    prompt, metadata = record.get("prompt"), record.get("metadata")
    if not isinstance(prompt, str) or not prompt.strip():
        found = "no `prompt`" if "prompt" not in record else f"`prompt` is {prompt!r}"
        return f"{found}; it must be a text that is not blank"
    if what := forbidden_character(prompt):
        return f"`prompt` {what}"
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return "`prompt` holds half of a surrogate pair, which is no character"
    if not isinstance(metadata, dict):
        return "no `metadata` object"
    if (task := metadata.get("task")) not in GENERATION_TASKS:
        return f"metadata.task is {task!r}; it must be one of {', '.join(GENERATION_TASKS)}"
    sample_id = metadata.get("sample_id")
    if sample_id is not None and (not isinstance(sample_id, str) or not sample_id):
        return f"metadata.sample_id is {sample_id!r}; it must be a text that is not empty"
    return ""


def forbidden_character(prompt: str) -> str:
    """What a prompt holds that no text to draw has, or ""."""
    if "\0" in prompt:
        return "holds a NUL character: the file is broken, or not a text file"
    if "\r" in prompt:
        return "holds a carriage return: put a space there (if it ends every line of the file: tr '\\r' '\\n')"
    return ""


def _numbered_problem(raw: bytes, number: int, seen: dict[str, int]) -> str:
    """What is wrong with line `number`, or "". `seen` maps each sample_id to its first line."""
    record, problem = parse_line(raw)
    if record is None:
        return f"line {number}: {problem}"
    sample_id = record["metadata"].get("sample_id")
    if sample_id is not None and (first := seen.setdefault(sample_id, number)) != number:
        return f"line {number}: metadata.sample_id {sample_id!r} was already used in line {first}"
    return ""


def _prompt(raw: bytes) -> Prompt:
    record = json.loads(raw)
    metadata = record["metadata"]
    return Prompt(record["prompt"], metadata.get("sample_id"), metadata)
