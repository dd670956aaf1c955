"""A sample's picture as pixels: from memory or from a file, decoded in parallel, never silently wrong.

Shapes: H x W pixels.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rewards.protocol import Invalid, RewardSample

_DECODERS = min(8, len(os.sched_getaffinity(0)))


def load_pixels(samples: Sequence[RewardSample]) -> list[np.ndarray | Invalid]:
    """uint8 [H, W, 3] RGB for each sample, or why there is none. Files are decoded on several threads."""
    if len(samples) < 2:
        return [_pixels_or_why(sample.image) for sample in samples]
    with ThreadPoolExecutor(_DECODERS) as pool:
        return list(pool.map(lambda sample: _pixels_or_why(sample.image), samples))


def _pixels_or_why(image: Any) -> np.ndarray | Invalid:
    try:
        return pixels(image)
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError) as error:
        return Invalid(f"the image cannot be read: {error}")


def pixels(image: Any) -> np.ndarray:
    """uint8 [H, W, 3] of a PIL image, a path, or a uint8 array or tensor of that shape.

    Transparency is laid over white. Raises OSError, SyntaxError (PIL's word for a broken PNG), ValueError, TypeError.
    """
    if isinstance(image, str | os.PathLike):
        with Image.open(image) as opened:
            return _of_pil(opened)
    if isinstance(image, Image.Image):
        return _of_pil(image)
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise TypeError(
            f"got {type(image).__name__} {array.dtype} of shape {list(array.shape)}; a sample's image is a PIL image, "
            "a path, or uint8 [height, width, 3]"
        )
    return array


def _of_pil(image: Image.Image) -> np.ndarray:
    image.load()
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.array(image.convert("RGB"))
