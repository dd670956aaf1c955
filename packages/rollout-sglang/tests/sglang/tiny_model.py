"""Writes a tiny Qwen-Image folder with random weights: the true classes, a few hundred kilobytes.

    python tiny_model.py FOLDER

Random weights leave every layer live (a trained model's zero-initialised parts would hide faults there).
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PREFIX_TOKENS = 34  # as with Qwen's own vocabulary; the pipelines cut exactly that many
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def write(folder: Path) -> None:
    """Everything that `DiffusionPipeline.from_pretrained` and SGLang's server load."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = folder / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    _text_encoder(tokenizer).save_pretrained(folder / "text_encoder")
    QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
    ).save_pretrained(folder / "transformer")
    AutoencoderKLQwenImage(
        base_dim=8, num_res_blocks=1, latents_mean=[0.0] * 16, latents_std=[1.0] * 16
    ).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    parts = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    index = {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.37.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index))


def _tokenizer() -> PreTrainedTokenizerFast:
    plain = TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    bpe.train_from_iterator([plain.format(p) for p in ("a red cat on a mat", "a small house")], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL[1:],
        model_max_length=131072,
        padding_side="right",
    )
    prefix = len(tokenizer(TEMPLATE.split("{}")[0])["input_ids"])
    if prefix != PREFIX_TOKENS:
        raise RuntimeError(f"the template's prefix has {prefix} tokens, the pipelines cut {PREFIX_TOKENS}")
    return tokenizer


def _text_encoder(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
