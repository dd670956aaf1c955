"""How well the text that a prompt asks for can be read in the picture, by a real OCR model."""

import os
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flowgrpo_rewards.folder import need_package
from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.protocol import ComponentResult, Invalid, RewardSample

_QUOTED = re.compile(r'"([^"]+)"|\u201c([^\u201d]+)\u201d')


class OcrScorer(ImageScorer):
    """Component `ocr`: 1 if the expected text stands in the picture, less by each wrong letter, 0 if nothing fits.

        ocr = 1 - min(distance, length) / length     distance: Levenshtein, to the best-fitting part of what was read

    Letter case, white space and compatibility forms (NFKC) do not count. The expected text is `metadata.text`, or
    what stands in double quotes in the prompt; a prompt with neither is Invalid, never 0 and never an index error.
    """

    components = ("ocr",)

    def __init__(self, *, device: str = "cpu", read: Callable[[np.ndarray], list[str]] | None = None):
        """`read`: texts of uint8 [H, W, 3], called from several threads; None is RapidOCR (on the CPU, always)."""
        self._read = read or rapid_ocr()
        self._threads = ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), thread_name_prefix="ocr")

    def score_pixels(
        self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]
    ) -> dict[str, list[float | ComponentResult]]:
        return {"ocr": list(self._threads.map(self._score, pictures, samples))}

    def _score(self, picture: np.ndarray, sample: RewardSample) -> float | ComponentResult:
        expected = expected_text(sample.prompt, sample.metadata)
        if isinstance(expected, Invalid):
            return expected
        return text_match(expected, " ".join(self._read(picture)))


def rapid_ocr() -> Callable[[np.ndarray], list[str]]:
    """A reader on RapidOCR, whose models come inside the package (Apache-2.0); detection, then recognition.

    Each thread has an engine of its own, of one thread: pictures in parallel are faster than one picture on many
    cores, and an engine that spins on every core would starve the rest of the process.
    """
    module = need_package("OcrScorer", "rapidocr", "flowgrpo-rewards[ocr]")
    need_package("OcrScorer", "onnxruntime", "flowgrpo-rewards[ocr]")
    one_thread = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    settings = {"Global.log_level": "error", "Global.use_cls": False} | one_thread
    engines = threading.local()

    def read(picture: np.ndarray) -> list[str]:
        if not hasattr(engines, "mine"):
            engines.mine = module.RapidOCR(params=settings)
        bgr = np.ascontiguousarray(picture[:, :, ::-1])  # OpenCV's order, which the models were trained in
        return list(engines.mine(bgr).txts or ())

    return read


def expected_text(prompt: str, metadata: Mapping[str, Any]) -> str | Invalid:
    """`metadata["text"]`, or the prompt's parts in double quotes; Invalid where there is neither."""
    if (text := metadata.get("text")) is not None:
        if isinstance(text, str) and normal_text(text):
            return text
        return Invalid(f"metadata.text is {text!r}; it must be a text that is not blank")
    found = " ".join((straight or curly).strip() for straight, curly in _QUOTED.findall(prompt))
    if normal_text(found):
        return found
    return Invalid("no expected text: the prompt quotes nothing and metadata.text is not set")


def normal_text(text: str) -> str:
    """Without letter case, white space and compatibility forms."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_match(expected: str, read: str) -> float:
    """From 0 (nothing fits) to 1 (`expected` stands somewhere in `read`)."""
    expected, read = normal_text(expected), normal_text(read)
    return 1.0 - min(substring_distance(expected, read), len(expected)) / len(expected)


def substring_distance(needle: str, haystack: str) -> int:
    """Fewest insertions, deletions and replacements that turn some part of `haystack` into `needle` (Sellers, 1980)."""
    # One row per letter of the needle; the first row is 0 everywhere, so a match may begin anywhere.
    row = [0] * (len(haystack) + 1)
    for i, letter in enumerate(needle, start=1):
        before, row = row, [i]
        for j, other in enumerate(haystack, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
    return min(row)
