"""What only a GPU shows: its preprocessing and its float16 against the official processor and float32 on the CPU."""

import pytest
import torch
from flowgrpo_rewards.pickscore import PickScoreScorer
from flowgrpo_rewards.preprocessing import Preprocessing
from flowgrpo_rewards.testing import TINY_CLIP, natural_pictures, samples_of, write_clip_folder
from PIL import Image
from transformers import CLIPImageProcessor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [(384, 384), (300, 451)], ids=str)
def test_preprocessing_on_the_gpu_agrees_with_the_official_processor(size):
    pictures = natural_pictures(4, *size)
    expected = CLIPImageProcessor()(images=[Image.fromarray(p) for p in pictures], return_tensors="pt")["pixel_values"]
    got = Preprocessing(size=224)(pictures, torch.device("cuda"), torch.float32).cpu()
    difference = (got - expected).abs()
    share = (difference > 1e-4).float().mean()
    print(f"\n{size}: max {difference.max():.5f}, mean {difference.mean():.2e}, share {share:.4f}")
    assert difference.max() < 0.0151  # one of 255 grey levels
    assert difference.mean() < 1e-3


def test_float16_scores_differ_from_float32_by_far_less_than_candidates_do(tmp_path):
    write_clip_folder(tmp_path, TINY_CLIP)
    samples = samples_of(natural_pictures(16, 384, 384), ["a red panda in a teacup"] * 16)
    scores = {
        device: torch.tensor(
            [r["pickscore"].value for r in PickScoreScorer(model_path=str(tmp_path), device=device).score(samples)]
        )
        for device in ("cpu", "cuda")
    }
    worst = (scores["cpu"] - scores["cuda"]).abs().max().item()
    print(f"\nfloat16 worst {worst:.5f}, spread of candidates {scores['cpu'].std():.4f}")
    assert worst < 0.05 * scores["cpu"].std()
