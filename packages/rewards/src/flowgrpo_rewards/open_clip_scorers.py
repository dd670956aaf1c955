"""Scorers on open_clip models: CLIPScore and HPSv2. Nothing is downloaded: weights come from a local folder.

Shapes: B pictures, D feature width.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rewards.clip_features import default_dtype, unit
from flowgrpo_rewards.folder import checked_folder, first_file, need_package
from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.preprocessing import Preprocessing, ResizeMode
from flowgrpo_rewards.protocol import RewardSample, ScorerLoadError

OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
HPS_WEIGHTS = ("HPS_v2.1_compressed.pt", "HPS_v2_compressed.pt", "HPS_v2.1.safetensors")


class OpenClipFeatures:
    """A frozen open_clip model. Features are float32 and of length 1."""

    def __init__(
        self, scorer: str, config: dict, weights: Path, *, device: str, dtype: torch.dtype | None, mode: ResizeMode
    ):
        """`config`: open_clip's model configuration (embed_dim, vision_cfg, text_cfg)."""
        open_clip = need_package(scorer, "open_clip", "open_clip_torch>=3.0")
        self.device, self.dtype = torch.device(device), dtype or default_dtype(device)
        if config.get("text_cfg", {}).get("hf_tokenizer_name"):
            raise ScorerLoadError(
                scorer, "its text tower uses a tokenizer from the hub", "use a model with CLIP's own tokenizer"
            )
        model = open_clip.model.CLIP(
            **{k: v for k, v in config.items() if k in ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu")}
        )
        state = open_clip.factory.load_state_dict(str(weights), weights_only=True)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ScorerLoadError(
                scorer, f"{weights} does not fit: {error}", "use the weights of this architecture"
            ) from error
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        context = config["text_cfg"].get("context_length", 77)
        self.tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=context)
        given = config.get("preprocess_cfg", {})
        size = config["vision_cfg"]["image_size"]
        normal = {key: tuple(given[key]) for key in ("mean", "std") if key in given}
        self.preprocessing = Preprocessing(size=size, mode=mode, **normal)

    @torch.inference_mode()
    def images(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """[B, D] of uint8 [H, W, 3] pictures."""
        return unit(self.model.encode_image(self.preprocessing(pictures, self.device, self.dtype)))

    @torch.inference_mode()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """[B, D], one row per prompt; each distinct prompt goes through the model once."""
        distinct = list(dict.fromkeys(prompts))
        features_PD = unit(self.model.encode_text(self.tokenizer(distinct).to(self.device)))
        row = {prompt: index for index, prompt in enumerate(distinct)}
        return features_PD[torch.tensor([row[prompt] for prompt in prompts], device=self.device)]


class _CosineScorer(ImageScorer):
    """One component that is a function of cos(text, image)."""

    _features: OpenClipFeatures

    def cosines(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> Tensor:
        """[B] float32."""
        image_BD = self._features.images(pictures)
        return (image_BD * self._features.texts([sample.prompt for sample in samples])).sum(dim=-1)


class ClipScoreScorer(_CosineScorer):
    """Component `clipscore` = 2.5 * max(cos(text, image), 0).

    Source: Hessel et al., 2021, https://arxiv.org/abs/2104.08718, with the picture and the prompt as it is.
    """

    components = ("clipscore",)

    def __init__(self, *, model_path: str | None, device: str = "cpu", dtype: torch.dtype | None = None):
        """`model_path`: an open_clip folder, as open_clip's own `push_to_hf_hub` and the hub lay it out."""
        name, hint = "ClipScoreScorer", "an open_clip model folder"
        needs = {"configuration": ("open_clip_config.json",), "weights": OPEN_CLIP_WEIGHTS}
        folder = checked_folder(name, model_path, needs, hint)
        config = json.loads((folder / "open_clip_config.json").read_text())
        model_config = config["model_cfg"] | {"preprocess_cfg": config.get("preprocess_cfg", {})}
        weights = first_file(folder, OPEN_CLIP_WEIGHTS)
        self._features = OpenClipFeatures(name, model_config, weights, device=device, dtype=dtype, mode="crop")

    def score_pixels(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        return {"clipscore": (2.5 * self.cosines(pictures, samples).clamp(min=0.0)).tolist()}


class HpsV2Scorer(_CosineScorer):
    """Component `hpsv2` = cos(text, image) of a CLIP ViT-H/14 tuned on human choices, about 0.2 to 0.35.

    Source: Wu et al., 2023, https://arxiv.org/abs/2306.09341. The longer edge is resized, as its own code does.
    """

    components = ("hpsv2",)

    def __init__(self, *, model_path: str | None, device: str = "cpu", dtype: torch.dtype | None = None):
        """`model_path`: a folder with HPS_v2.1_compressed.pt or HPS_v2_compressed.pt.

        An `open_clip_config.json` beside it replaces the architecture ViT-H-14.
        """
        name = "HpsV2Scorer"
        folder = checked_folder(name, model_path, {"weights": HPS_WEIGHTS}, "a folder with HPS_v2.1_compressed.pt")
        own = folder / "open_clip_config.json"
        if own.is_file():
            config = json.loads(own.read_text())["model_cfg"]
        else:
            config = need_package(name, "open_clip", "open_clip_torch>=3.0").get_model_config("ViT-H-14")
        weights = first_file(folder, HPS_WEIGHTS)
        self._features = OpenClipFeatures(name, config, weights, device=device, dtype=dtype, mode="pad")

    def score_pixels(self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        return {"hpsv2": self.cosines(pictures, samples).tolist()}
