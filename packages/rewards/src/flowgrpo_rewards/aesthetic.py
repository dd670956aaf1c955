"""The LAION aesthetic predictor: a small head on CLIP ViT-L/14 image features; prompts do not matter."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flowgrpo_rewards.clip_features import ClipFeatures
from flowgrpo_rewards.folder import CLIP_FOLDER, checked_folder, first_file
from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.protocol import RewardSample, ScorerLoadError

HEAD_FILES = ("aesthetic_head.safetensors", "sac+logos+ava1-l14-linearMSE.pth")
_HINT = "a CLIP ViT-L/14 folder with sac+logos+ava1-l14-linearMSE.pth in it"


class AestheticHead(nn.Module):
    """768 -> 1024 -> 128 -> 64 -> 16 -> 1, without activations, as published; dropout stands for its places.

    Source: github.com/christophschuhmann/improved-aesthetic-predictor; its parameters are `layers.<n>.*`.
    """

    def __init__(self, width: int = 768):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, features_BD: Tensor) -> Tensor:
        """[B] of unit features [B, D]."""
        return self.layers(features_BD).squeeze(-1)


class AestheticScorer(ImageScorer):
    """Component `aesthetic`, about 1 to 10."""

    components = ("aesthetic",)

    def __init__(self, *, model_path: str | None, device: str = "cpu", dtype: torch.dtype | None = None):
        """`model_path`: a transformers CLIP ViT-L/14 folder with the head's file in it."""
        folder = checked_folder("AestheticScorer", model_path, CLIP_FOLDER | {"aesthetic head": HEAD_FILES}, _HINT)
        self._clip = ClipFeatures("AestheticScorer", model_path, device=device, dtype=dtype, hint=_HINT)
        self._head = load_head(first_file(folder, HEAD_FILES), self._clip.model.config.projection_dim)
        self._head.to(self._clip.device)

    @torch.inference_mode()
    def score_pixels(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        return {"aesthetic": self._head(self._clip.images(pictures)).tolist()}


def load_head(path: Path, width: int) -> AestheticHead:
    """The head in float32, in evaluation mode. Raises ScorerLoadError if the file does not fit the CLIP model."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    head = AestheticHead(width)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ScorerLoadError("AestheticScorer", f"{path} does not fit: {error}", f"use {_HINT}") from error
    return head.float().eval().requires_grad_(False)
