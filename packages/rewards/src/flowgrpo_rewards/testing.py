"""For tests of this package and of its users: scorers that record their calls, and CLIP folders without a download.

The folders hold random weights of the true architecture and CLIP's real tokenizer, which open_clip ships.
"""

import gzip
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rewards.protocol import Invalid, RewardSample, SampleResult, Value

TINY_CLIP = {
    "projection_dim": 32,
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    },
}
CLIP_H = {
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
}
"""The architecture of PickScore v1."""
TINY_OPEN_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 56, "layers": 2, "width": 48, "head_width": 12, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
}


def samples_of(pictures: Sequence[Any], prompts: Sequence[str], **metadata: Any) -> list[RewardSample]:
    """One group of samples, slot by slot."""
    return [
        RewardSample(image=picture, prompt=prompt, group_index=0, slot=slot, metadata=metadata)
        for slot, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True))
    ]


def grid_of_samples(G: int, N: int, **metadata: Any) -> list[list[RewardSample]]:
    """G groups of N samples with a small grey picture each: level 10 * group + slot, modulo 256."""
    return [
        [
            RewardSample(
                image=np.full((8, 8, 3), (10 * g + n) % 256, np.uint8),
                prompt=f"prompt {g}",
                group_index=g,
                slot=n,
                metadata=metadata,
            )
            for n in range(N)
        ]
        for g in range(G)
    ]


class FakeScorer:
    """Records every call. `answer` maps a sample to its results; by default 10 * group + slot in each component."""

    required_tracks = ("image",)

    def __init__(
        self,
        *,
        components: tuple[str, ...] = ("fake",),
        answer: Callable[[RewardSample], SampleResult] | None = None,
        device: str = "",
        model_path: str | None = None,
    ):
        self.components, self.device, self.model_path = components, device, model_path
        self.calls: list[list[tuple[int, int]]] = []
        self._answer = answer or self._place

    def _place(self, sample: RewardSample) -> SampleResult:
        return dict.fromkeys(self.components, Value(float(10 * sample.group_index + sample.slot)))

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        self.calls.append([(sample.group_index, sample.slot) for sample in samples])
        return [self._answer(sample) for sample in samples]


class HangingScorer(FakeScorer):
    """Does not answer until `released` is set."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.started, self.released = threading.Event(), threading.Event()

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        self.started.set()
        self.released.wait()
        return super().score(samples)


def invalid_at(slot: int, reason: str) -> Callable[[RewardSample], SampleResult]:
    """An answer for FakeScorer: 1.0, but Invalid at one slot of every group."""
    return lambda sample: {"fake": Invalid(reason) if sample.slot == slot else Value(1.0)}


def write_clip_folder(
    folder: Path, config: dict[str, Any], *, dtype: Any = None, device: str = "cpu", seed: int = 0
) -> Path:
    """A transformers CLIP folder with random weights: config, model.safetensors, tokenizer, preprocessor.

    `device` draws the weights, in seconds on a GPU for a billion of them; the folder is the same kind of folder.
    """
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    with torch.device(device):
        model = CLIPModel(CLIPConfig(**json.loads(json.dumps(config))))
    model.to("cpu", dtype or torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    size = config["vision_config"]["image_size"]
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": size, "width": size},
        "size": {"shortest_edge": size},
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def write_tokenizer(folder: Path) -> None:
    """CLIP's vocab.json and merges.txt, from the merge list that comes with open_clip."""
    import open_clip
    from open_clip.tokenizer import bytes_to_unicode

    source = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
    merges = gzip.decompress(source.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    letters = list(bytes_to_unicode().values())
    words = letters + [letter + "</w>" for letter in letters] + ["".join(merge.split()) for merge in merges]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_open_clip_folder(folder: Path, *, seed: int = 0) -> Path:
    """An open_clip folder with random weights: open_clip_config.json and open_clip_model.safetensors."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    model = open_clip.model.CLIP(**TINY_OPEN_CLIP)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    preprocess = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
    config = {"model_cfg": TINY_OPEN_CLIP, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def natural_pictures(count: int, height: int, width: int, *, seed: int = 0) -> list[np.ndarray]:
    """uint8 [H, W, 3] pictures with smooth areas, edges and some noise, as photographs have."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pictures = []
    for _ in range(count):
        waves = sum(
            rng.normal(0, 1, 3) * np.sin(2 * np.pi * (a * x + b * y) + c)[..., None]
            for a, b, c in rng.uniform(-6, 6, (5, 3))
        )
        edge = ((x - rng.uniform()) ** 2 + (y - rng.uniform()) ** 2 < rng.uniform(0.01, 0.2))[..., None]
        picture = 128 + 40 * waves + 90 * edge * rng.normal(0, 1, 3) + rng.normal(0, 4, (height, width, 3))
        pictures.append(picture.clip(0, 255).astype(np.uint8))
    return pictures
