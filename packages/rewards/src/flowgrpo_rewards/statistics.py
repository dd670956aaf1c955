"""Scores that measure the picture alone: how well it compresses, how bright it is. Pillow and numpy only."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.protocol import RewardSample

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, as in JPEG


class ImageStatisticsScorer(ImageScorer):
    """Components `compressibility` (minus the kB of a JPEG) and `brightness` (0 to 1).

    Source of the first: Black et al., DDPO, 2023, https://arxiv.org/abs/2305.13301: JPEG of quality 95, 1 kB =
    1,000 bytes. A weight of -1 makes it their incompressibility.
    """

    components = ("compressibility", "brightness")

    def score_pixels(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        return {
            "compressibility": [-jpeg_kilobytes(picture) for picture in pictures],
            "brightness": [brightness(picture) for picture in pictures],
        }


def jpeg_kilobytes(picture: np.ndarray, *, quality: int = 95) -> float:
    """Size of the picture, uint8 [H, W, 3], as a JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000.0


def brightness(picture: np.ndarray) -> float:
    """Mean luma of the picture, uint8 [H, W, 3], from 0 (black) to 1 (white)."""
    return float((picture.reshape(-1, 3).mean(axis=0) @ LUMA) / 255.0)
