"""PickScore of one rollout's pictures, random weights of the true size, beside the model card's own loop.

Every way ends with the scores on the host. Groups of 8 candidates share a prompt, as in the recipe.
"""

from typing import Any

from flowgrpo_bench.case import BenchCase, Workload

SIDE, CANDIDATES = 384, 8


def setup(device: str, *, pictures: int, tiny: bool) -> Workload:
    """Random CLIP-H (tiny: two layers) in a temporary folder; natural pictures of 384 x 384."""
    import tempfile
    from pathlib import Path

    import torch
    from flowgrpo_rewards.clip_features import default_dtype
    from flowgrpo_rewards.pickscore import PickScoreScorer
    from flowgrpo_rewards.testing import CLIP_H, TINY_CLIP, natural_pictures, samples_of, write_clip_folder
    from PIL import Image

    half = default_dtype(device)
    with tempfile.TemporaryDirectory(prefix="pickscore-bench-") as folder:
        write_clip_folder(Path(folder), TINY_CLIP if tiny else CLIP_H, dtype=half, device=device)
        scorer = PickScoreScorer(model_path=folder, device=device)
        model_card = ModelCard(folder, device, torch.float32)
        batched = ModelCard(folder, device, half)
    images = natural_pictures(pictures, SIDE, SIDE)
    prompts = [f"a photo of {k // CANDIDATES} wine glasses on a table" for k in range(pictures)]
    samples, opened = samples_of(images, prompts), [Image.fromarray(image) for image in images]

    def ours() -> list[float]:
        return [result["pickscore"].value for result in scorer.score(samples)]

    def one_by_one() -> list[float]:
        return [model_card.score([prompt], [image])[0] for prompt, image in zip(prompts, opened, strict=True)]

    def in_batches() -> list[float]:
        cuts = [slice(k, k + scorer.max_batch) for k in range(0, pictures, scorer.max_batch)]
        return [score for cut in cuts for score in batched.score(prompts[cut], opened[cut])]

    def gate() -> None:
        reference = torch.tensor(one_by_one())
        for way in (ours, in_batches):
            worst = (torch.tensor(way()) - reference).abs().max().item()
            # float16 and one grey level move a score by a few thousandths; logit_scale is 14.3 here.
            assert worst < 0.02, f"{way.__name__} is {worst} from the model card"

    rivals = {"model card, one by one": one_by_one, f"model card, {half}, batches of 64": in_batches}
    return Workload(ours=ours, rivals=rivals, gate=gate)


class ModelCard:
    """The code that the model card of PickScore_v1 shows, with the official processor on the CPU."""

    def __init__(self, folder: str, device: str, dtype: Any):
        from transformers import AutoModel, AutoTokenizer, CLIPImageProcessor

        self.model = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = CLIPImageProcessor.from_pretrained(folder)
        self.device, self.dtype = device, dtype

    def score(self, prompts: list[str], images: list) -> list[float]:
        """The score of each picture for its prompt."""
        import torch
        from flowgrpo_rewards.clip_features import pooled

        pixel_values = self.processor(images=images, return_tensors="pt")["pixel_values"]
        text_inputs = self.tokenizer(prompts, padding=True, truncation=True, max_length=77, return_tensors="pt")
        with torch.no_grad():
            image_embs = pooled(self.model.get_image_features(pixel_values=pixel_values.to(self.device, self.dtype)))
            text_embs = pooled(self.model.get_text_features(**text_inputs.to(self.device)))
            image_embs = image_embs / torch.norm(image_embs, dim=-1, keepdim=True)
            text_embs = text_embs / torch.norm(text_embs, dim=-1, keepdim=True)
            return (self.model.logit_scale.exp() * (text_embs * image_embs).sum(dim=-1)).cpu().tolist()


CASE = BenchCase(
    name="pickscore",
    about="PickScore of 256 pictures, random CLIP-H",
    setup=setup,
    sizes={"256 pictures": {"pictures": 256, "tiny": False}},
    smoke={"16 pictures, tiny": {"pictures": 16, "tiny": True}},
    timers=("wall",),
)
