"""Unit image and text features of a transformers CLIP model, in batches, each distinct prompt encoded once.

Shapes: B pictures, P distinct prompts, D feature width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rewards.folder import CLIP_FOLDER, checked_folder
from flowgrpo_rewards.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing


def default_dtype(device: str) -> torch.dtype:
    """float16 on a GPU, whose tensor cores make it several times faster; float32 on a CPU."""
    return torch.float16 if torch.device(device).type == "cuda" else torch.float32


class ClipFeatures:
    """A frozen CLIP from a local folder. Features are float32 and of length 1 whatever the model's dtype."""

    def __init__(self, scorer: str, model_path: str | None, *, device: str, dtype: torch.dtype | None, hint: str):
        folder = checked_folder(scorer, model_path, CLIP_FOLDER, hint)
        from transformers import AutoTokenizer, CLIPModel  # seconds of import, for which a lack need not wait

        self.device = torch.device(device)
        self.dtype = dtype or default_dtype(device)
        model = CLIPModel.from_pretrained(folder, local_files_only=True, dtype=self.dtype)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.context = model.config.text_config.max_position_embeddings
        self.preprocessing = read_preprocessing(folder, model.config.vision_config.image_size)

    @torch.inference_mode()
    def images(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """[B, D] of uint8 [H, W, 3] pictures."""
        pixel_values = self.preprocessing(pictures, self.device, self.dtype)
        return unit(pooled(self.model.get_image_features(pixel_values=pixel_values)))

    @torch.inference_mode()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """[B, D], one row per prompt; a group's candidates share a prompt, which goes through the model once."""
        distinct = list(dict.fromkeys(prompts))
        inputs = self.tokenizer(
            distinct, padding="max_length", truncation=True, max_length=self.context, return_tensors="pt"
        ).to(self.device)
        features_PD = unit(pooled(self.model.get_text_features(**inputs)))
        row = {prompt: index for index, prompt in enumerate(distinct)}
        return features_PD[torch.tensor([row[prompt] for prompt in prompts], device=self.device)]

    @property
    def logit_scale(self) -> float:
        """exp of the learned temperature, about 100."""
        return float(self.model.logit_scale.float().exp())


def pooled(features: Tensor | Any) -> Tensor:
    """`get_*_features` returns the projected features as a tensor (transformers 4) or as `pooler_output` (5)."""
    return features if isinstance(features, Tensor) else features.pooler_output


def unit(features: Tensor) -> Tensor:
    """Rows divided by their length, in float32."""
    features = features.float()
    return features / features.norm(dim=-1, keepdim=True)


def read_preprocessing(folder: Path, image_size: int) -> Preprocessing:
    """What preprocessor_config.json says; OpenAI's numbers at the model's own size where the folder has none."""
    import json

    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    crop = settings.get("crop_size", image_size)
    size = crop if isinstance(crop, int) else crop["height"]
    mean, std = settings.get("image_mean", OPENAI_MEAN), settings.get("image_std", OPENAI_STD)
    return Preprocessing(size=size, mean=tuple(mean), std=tuple(std))
