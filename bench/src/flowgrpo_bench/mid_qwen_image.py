"""A Qwen-Image of full width with fewer layers and random weights, as a folder that every engine loads.

Every module has the shape of the published model but for the transformer's number of layers and the text encoder's
depth, so a forward's kernels are the real ones. Tokenizer and scheduler are those of the shipped tiny model.
"""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files
from pathlib import Path

import torch
from flowgrpo_fsdp_actor.safetensors_header import header_bytes
from torch import Tensor

TEXT_LAYERS = 2
SHARD_BYTES = 2 << 30
"""Of a transformer's file. One thread writes each, or 41 GB would take a minute of one thread's time."""


def write_mid_qwen_image(folder: Path, *, layers: int, heads: int = 24, device: str = "cuda") -> Path:
    """Writes the folder in bf16 (8.2 GB at 12 layers and 24 heads, 41 GB at 60); leaves one that is whole already."""
    if (folder / "model_index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with as_file(files("flowgrpo_trainer") / "assets" / "tiny-qwen-image") as tiny:
        for part in ("tokenizer", "scheduler"):
            shutil.copytree(tiny / part, folder / part, dirs_exist_ok=True)
        with torch.device(device):
            _write_transformer(folder / "transformer", layers, heads)
            _write_vae(folder / "vae")
            _write_text_encoder(folder / "text_encoder", tiny / "text_encoder")
        if device == "cuda":
            torch.cuda.empty_cache()
        shutil.copy(tiny / "model_index.json", folder)  # last: it marks a whole folder
    return folder


def _write_transformer(folder: Path, layers: int, heads: int) -> None:
    from diffusers import QwenImageTransformer2DModel

    torch.set_default_dtype(torch.bfloat16)  # in fp32, 60 layers would take 82 GB while they are made
    try:
        model = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=layers,
            attention_head_dim=128,
            num_attention_heads=heads,
            joint_attention_dim=3584,
            guidance_embeds=False,
            axes_dims_rope=(16, 56, 56),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_config(folder)
    _save_sharded(model.state_dict(), folder)


def _save_sharded(state: Mapping[str, Tensor], folder: Path) -> None:
    """The weights as diffusers names them: safetensors files of `SHARD_BYTES` and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if filled + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    stem = "diffusion_pytorch_model"
    files = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(_save_file, [folder / file for file in files], shards))
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def _save_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, of bf16 tensors. Its own writer would hold Python's lock while it copies."""
    layout = {name: ("BF16", tensor.shape) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        file.write(header_bytes(layout, {"format": "pt"}))
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _write_vae(folder: Path) -> None:
    from diffusers import AutoencoderKLQwenImage

    model = AutoencoderKLQwenImage(
        base_dim=96,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_text_encoder(folder: Path, tiny: Path) -> None:
    """Qwen2.5-VL-7B's width, `TEXT_LAYERS` of its layers, the tiny model's vocabulary."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig.from_pretrained(tiny)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 3584, 4096, TEXT_LAYERS
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 28, 4, 128
    text.layer_types = ["full_attention"] * TEXT_LAYERS
    text.rope_parameters = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}
    vision.out_hidden_size = 3584
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
