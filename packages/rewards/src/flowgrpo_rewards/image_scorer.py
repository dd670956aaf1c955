"""The common part of scorers that look at a picture and its prompt: read pixels, score the readable ones, in order."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from flowgrpo_rewards.images import load_pixels
from flowgrpo_rewards.protocol import ComponentResult, Invalid, RewardSample, SampleResult, Value


class ImageScorer(ABC):
    """A scorer with one value per component for each readable picture. A subclass implements `score_pixels`."""

    required_tracks: tuple[str, ...] = ("image",)
    components: tuple[str, ...]
    max_batch: ClassVar[int] = 64
    """Pictures that go through the model at once."""

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        """A sample whose picture cannot be read is Invalid in every component."""
        pictures = load_pixels(samples)
        good = [index for index, picture in enumerate(pictures) if not isinstance(picture, Invalid)]
        results: list[SampleResult] = [
            dict.fromkeys(self.components, picture) if isinstance(picture, Invalid) else {} for picture in pictures
        ]
        for start in range(0, len(good), self.max_batch):
            batch = good[start : start + self.max_batch]
            scored = self.score_pixels([pictures[index] for index in batch], [samples[index] for index in batch])
            for name in self.components:
                for index, result in zip(batch, scored[name], strict=True):
                    results[index] = {**results[index], name: _typed(result)}
        return results

    @abstractmethod
    def score_pixels(
        self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]
    ) -> Mapping[str, Sequence[float | ComponentResult]]:
        """For each component, one value (or Invalid) per picture. Pictures are uint8 [H, W, 3]."""


def _typed(result: float | ComponentResult) -> ComponentResult:
    return result if isinstance(result, Value | Invalid) else Value(float(result))
