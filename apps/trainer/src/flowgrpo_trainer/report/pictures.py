"""The same held-out prompts before, midway and after training, side by side, as data URIs."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgrpo_trainer.report.results import RunData
from flowgrpo_trainer.run_folder import EvalSample

MOST_PROMPTS = 24  # a set; the page says how many there are
TINY = 96  # pixels: smaller pictures are shown with hard pixel edges
WIDEST = 320  # pixels: larger pictures are made smaller, so that the page stays a few MB
_KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


@dataclass(frozen=True, slots=True)
class Picture:
    """One cell of the comparison."""

    label: str
    """`before`, or `after 50`, of rollouts."""
    uri: str | None
    """data: URI, or none where the file is missing or no picture."""
    tiny: bool
    sample: EvalSample | None


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt at each of the compared moments."""

    prompt: str
    pictures: Sequence[Picture]
    verdict: str
    """`became correct`, `no longer correct`, or nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One held-out set."""

    set_name: str
    rows: Sequence[Row]
    pictures_in_set: int
    missing: int
    """Pictures whose file could not be shown."""


def comparisons(data: RunData) -> list[Comparison]:
    """Each held-out set at its first, middle and last evaluation; nothing where no picture was recorded."""
    found = [_compare(data, name) for name in data.eval_sets()]
    return [one for one in found if any(p.sample and p.sample.image for row in one.rows for p in row.pictures)]


def _compare(data: RunData, set_name: str) -> Comparison:
    evals = data.set_evals(set_name)
    moments = _moments([step for step, _ in evals])
    samples = {step: _numbered(samples) for step, samples in evals if step in moments}
    first = samples[moments[0]]
    rows = []
    for key in list(first)[:MOST_PROMPTS]:
        pictures = [_picture(data.folder.path, step, samples[step].get(key)) for step in moments]
        rows.append(Row(key[0], pictures, _verdict(pictures)))
    missing = sum(
        p.sample is not None and p.sample.image is not None and p.uri is None for r in rows for p in r.pictures
    )
    return Comparison(set_name, rows, len(first), missing)


def _moments(steps: Sequence[int]) -> list[int]:
    """The first step, the one nearest the middle, the last; fewer where there are fewer."""
    middle = (steps[0] + steps[-1]) / 2
    return sorted({steps[0], min(steps, key=lambda step: abs(step - middle)), steps[-1]})


def _numbered(samples: Sequence[EvalSample]) -> dict[tuple[str, int], EvalSample]:
    """Samples by prompt and by their number among those of that prompt."""
    seen: dict[str, int] = {}
    numbered = {}
    for sample in samples:
        number = seen.get(sample.prompt, 0)
        seen[sample.prompt] = number + 1
        numbered[sample.prompt, number] = sample
    return numbered


def _picture(folder: Path, step: int, sample: EvalSample | None) -> Picture:
    label = "before" if step == 0 else f"after {step}"
    uri, tiny = (None, False) if sample is None or sample.image is None else _data_uri(folder, sample.image)
    return Picture(label, uri, tiny, sample)


def _verdict(pictures: Sequence[Picture]) -> str:
    first, last = pictures[0].sample, pictures[-1].sample
    if len(pictures) < 2 or first is None or last is None or first.correct is None or last.correct is None:
        return ""
    if first.correct == last.correct:
        return ""
    return "became correct" if last.correct else "no longer correct"


def _data_uri(folder: Path, relative: str) -> tuple[str | None, bool]:
    """The picture inside the run folder as a URI, and whether it is tiny. None: missing, outside, or no picture.

    Paths are data: one that leads out of the folder is not followed, since a report is made to be sent around.
    """
    from PIL import Image, UnidentifiedImageError

    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None, False
    data = path.read_bytes()
    kind = next((kind for magic, kind in _KINDS.items() if data.startswith(magic)), None)
    if kind is None:
        return None, False
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if max(width, height) > WIDEST:
                data, kind = _smaller(image), "image/jpeg"
    except (UnidentifiedImageError, OSError, ValueError):  # cut short, or bytes that only begin like a picture
        return None, False
    return f"data:{kind};base64,{base64.b64encode(data).decode()}", max(width, height) <= TINY


def _smaller(image: "object") -> bytes:
    from PIL import Image

    assert isinstance(image, Image.Image)
    small = image.convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()
