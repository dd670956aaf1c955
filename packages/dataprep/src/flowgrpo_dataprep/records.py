"""One line of a D1 file, parsed fast and refused in words.

    {"prompt": "a red panda", "metadata": {"task": "t2i", "sample_id": "pickapic_0000001"}}

Media, where a record has any, are paths under `images` or `videos` (or `image` / `video`), beside `prompt` or in
`metadata`; a relative path starts at the file's own folder.
"""

from pathlib import Path
from typing import Any

import orjson

from flowgrpo_dataprep.errors import LineError
from flowgrpo_dataprep.source import GENERATION_TASKS, forbidden_character, parse_line

MEDIA_KINDS = ("image", "video")


def parse_record(raw: bytes) -> dict[str, Any]:
    """The record of one line, with prompt, task and sample_id checked. Raises LineError."""
    try:
        record = orjson.loads(raw)
        metadata = record["metadata"]
        good = (
            type(record["prompt"]) is str
            and type(metadata["sample_id"]) is str
            and metadata["sample_id"]
            and metadata["task"] in GENERATION_TASKS
            and not record["prompt"].isspace()
            and record["prompt"]
            and not forbidden_character(record["prompt"])
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LineError(parse_line(raw)[1] or _why_not(error)) from None
    if not good:
        raise LineError(parse_line(raw)[1] or "metadata.sample_id is missing or not a text")
    return record


def _why_not(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r} in the record"
    return f"not JSON: {error}"


def media_of(record: dict[str, Any], raw: bytes) -> dict[str, list[str]]:
    """Kind to paths as written, only kinds that the record has. Raises LineError for what is no path.

    `raw` is the record's line: most lines name no media, and a look at the bytes is ten times faster.
    """
    found: dict[str, list[str]] = {}
    # An escape can spell a key too.
    if b'"image' not in raw and b'"video' not in raw and b"\\u" not in raw:
        return found
    for kind in MEDIA_KINDS:
        for place in (record, record["metadata"]):
            for key in (kind, kind + "s"):
                if (value := place.get(key)) is None:
                    continue
                paths = [value] if isinstance(value, str) else value
                if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
                    raise LineError(f"`{key}` is {value!r}; it must be a path or a list of paths")
                found.setdefault(kind, []).extend(paths)
    return found


def resolve_media(path: str, base: Path) -> Path:
    """Where a media path of a record points to; `base` is the folder of the file that holds the record."""
    return base / path
