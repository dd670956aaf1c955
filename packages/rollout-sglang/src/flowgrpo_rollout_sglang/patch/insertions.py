"""Insert-only patches: read a zero-context diff of added lines, apply it, take it out again.

A hunk that removes or replaces a line is refused: what the stock code does stays readable in place, and a
file is stock again once our lines are gone. Nothing here knows SGLang; `copy` does.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

_HUNK = re.compile(r"^@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


class PatchError(RuntimeError):
    """The patch and an SGLang tree do not belong together: where, why, and the command that mends it."""

    def __init__(self, where: str, why: str, remedy: str = ""):
        super().__init__(where, why, remedy)  # pickle, and so Ray, rebuilds from these
        self.where, self.why, self.remedy = where, why, remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" + (f"\nremedy: {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Insertion:
    """Lines that go in behind line `after` (counted from 1 in the stock file; 0 is its top)."""

    after: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Which SGLang the patch belongs to, and the SHA-256 of every file it touches, before and after."""

    sglang_version: str
    stock: Mapping[str, str]
    patched: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Names this patch and this SGLang: another of either is another copy."""
        text = json.dumps([self.sglang_version, dict(self.stock), dict(self.patched)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load() -> tuple[Manifest, str]:
    """The manifest and the diff that ship with this package."""
    here = resources.files(__package__)
    manifest = Manifest(**json.loads((here / "manifest.json").read_text()))
    return manifest, (here / "sglang.diff").read_text()


def parse(diff: str) -> dict[str, list[Insertion]]:
    """File (relative, posix) -> its insertions. Raises PatchError for a line that is not an insertion."""
    files: dict[str, list[Insertion]] = {}
    lines = iter(diff.splitlines(keepends=True))
    name, current = "", []
    for line in lines:
        if line.startswith("--- "):
            continue
        if line.startswith("+++ "):
            name = line[4:].strip()
            current = files.setdefault(name, [])
        elif match := _HUNK.match(line):
            count = int(match[3] or 1)
            added = [next(lines, "") for _ in range(count)]
            if not all(text.startswith("+") for text in added):
                raise PatchError(name, f"the hunk {line.strip()!r} does more than insert")
            current.append(Insertion(int(match[1]), tuple(text[1:] for text in added)))
        else:
            raise PatchError(name or "the diff", f"not an insertion: {line.rstrip()!r}")
    return files


def insert(text: str, insertions: list[Insertion]) -> str:
    """`text` with the lines of each insertion behind the stock line that it names."""
    out: list[str] = []
    stock = text.splitlines(keepends=True)
    done = 0
    for piece in sorted(insertions, key=lambda i: i.after):
        out += stock[done : piece.after]
        out += piece.lines
        done = piece.after
    return "".join(out + stock[done:])


def remove(text: str, insertions: list[Insertion]) -> str:
    """The inverse of `insert`. Raises PatchError if an inserted line is not where it should be."""
    lines = text.splitlines(keepends=True)
    for piece in sorted(insertions, key=lambda i: i.after, reverse=True):
        earlier = sum(len(p.lines) for p in insertions if p.after < piece.after)
        start = piece.after + earlier
        if tuple(lines[start : start + len(piece.lines)]) != piece.lines:
            raise PatchError(f"line {start + 1}", "our inserted lines are not there as they were written")
        del lines[start : start + len(piece.lines)]
    return "".join(lines)


def diff_of(stock: Mapping[str, str], edited: Mapping[str, str]) -> str:
    """The zero-context diff from one set of files to another. For recording a new patch."""
    pieces = []
    for name in sorted(edited):
        before, after = (files[name].splitlines(keepends=True) for files in (stock, edited))
        pieces += difflib.unified_diff(before, after, name, name, n=0)
    return "".join(pieces)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digests(root: Path, names: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of each named file below `root`; "absent" where there is none."""
    found = {}
    for name in names:
        path = root / PurePosixPath(name)
        found[name] = sha256(path.read_bytes()) if path.is_file() else "absent"
    return found
