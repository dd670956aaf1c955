"""The text half of the tiny model: a byte-level BPE tokenizer and a small, frozen, random Qwen2.5-VL encoder.

The encoder is never trained. Random attention over distinct token embeddings already keeps all captions apart, and the
transformer learns to read what it gives.
"""

import json
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

# Qwen-Image's own prompt template. QwenImagePipeline drops the first 34 tokens, which is everything before "{}".
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PREFIX_TOKENS = 34
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen2's pattern: words take their leading space, digits stand alone.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(captions: list[str], folder: Path) -> Qwen2Tokenizer:
    """Trains the vocabulary on the template and `captions`, so that each of their words is one token, and saves it.

    Raises RuntimeError if the template's prefix is not 34 tokens: the pipeline would cut into the caption.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Special tokens must not leave their letters in the vocabulary.
    plain = re.sub(r"<\|\w+\|>", "", TEMPLATE)
    bpe.train_from_iterator([plain.format("")] * 20 + captions, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS[1:])})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.model_max_length = 131072
    tokenizer.save_pretrained(folder)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    found = len(tokenizer(TEMPLATE.split("{}")[0]).input_ids)
    if found != PREFIX_TOKENS:
        raise RuntimeError(f"the template's prefix is {found} tokens, not {PREFIX_TOKENS}: widen the training corpus")
    return tokenizer


def make_text_encoder(
    tokenizer: Qwen2Tokenizer, *, width: int = 64, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """Two random layers of `width`, in float32, with a vision tower as small as the class allows (never run)."""
    torch.manual_seed(seed)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": (len(tokenizer) + 63) // 64 * 64,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)
