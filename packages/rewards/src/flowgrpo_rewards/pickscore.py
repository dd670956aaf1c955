"""PickScore v1: how much people would prefer a picture for a prompt, by a CLIP-H fine-tuned on their choices."""

from collections.abc import Sequence

import numpy as np
import torch

from flowgrpo_rewards.clip_features import ClipFeatures
from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.protocol import RewardSample


class PickScoreScorer(ImageScorer):
    """Component `pickscore` = exp(logit_scale) * cos(text, image), about 16 to 26 with the published weights.

    Source: Kirstain et al., 2023, https://arxiv.org/abs/2305.01569, the score before the softmax over candidates.
    Flow-GRPO's own code divides it by 26; the advantage is normalised, so the factor matters only for reading.
    """

    components = ("pickscore",)

    def __init__(self, *, model_path: str | None, device: str = "cpu", dtype: torch.dtype | None = None):
        """`model_path`: the folder PickScore_v1. Raises ScorerLoadError naming what the folder lacks."""
        self._clip = ClipFeatures(
            "PickScoreScorer", model_path, device=device, dtype=dtype, hint="the folder PickScore_v1"
        )

    @torch.inference_mode()
    def score_pixels(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        image_BD = self._clip.images(pictures)
        text_BD = self._clip.texts([sample.prompt for sample in samples])
        return {"pickscore": (self._clip.logit_scale * (image_BD * text_BD).sum(dim=-1)).tolist()}
