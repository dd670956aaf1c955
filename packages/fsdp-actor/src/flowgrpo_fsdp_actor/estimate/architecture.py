"""What the config.json files of a Qwen-Image folder say: parameters, arithmetic, saved activations. All derived.

Shapes: d the transformer's width; I image and L text tokens of a row (a candidate at a denoising step).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowgrpo_fsdp_actor.errors import ModelFolderError, TrainableBoundaryError

PATCH = 2
"""Latent pixels on a side of one packed token."""
DTYPE_BYTES = {"bf16": 2, "fp32": 4}


class Linear(NamedTuple):
    """One linear layer of a block, its sizes in widths d, and which rows go through it."""

    name: str
    inputs: int
    outputs: int
    stream: Literal["image", "text", "row"]


# `QwenImageTransformerBlock` of diffusers 0.37; `img_mod` and `txt_mod` see one vector per row, not one per token.
BLOCK_LINEARS = (
    *(Linear(f"attn.{name}", 1, 1, "image") for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(Linear(f"attn.{name}", 1, 1, "text") for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    Linear("img_mlp.net.0.proj", 1, 4, "image"),
    Linear("img_mlp.net.2", 4, 1, "image"),
    Linear("txt_mlp.net.0.proj", 1, 4, "text"),
    Linear("txt_mlp.net.2", 4, 1, "text"),
    Linear("img_mod.1", 1, 6, "row"),
    Linear("txt_mod.1", 1, 6, "row"),
)
ATTENTION = tuple(x.name for x in BLOCK_LINEARS if x.name.startswith("attn."))
"""The LoRA targets of `QwenImageAdapter`, where the settings name none; a test holds them equal."""
SHARED_INPUT = {
    "attn.to_k": "attn.to_q",
    "attn.to_v": "attn.to_q",
    "attn.add_k_proj": "attn.add_q_proj",
    "attn.add_v_proj": "attn.add_q_proj",
}
"""Layers that read the same tensor: it is saved once."""
INPUTS_DIVIDED = ("attn.to_out.0", "attn.to_add_out", "img_mlp.net.2", "txt_mlp.net.2")
"""Where the cards of an SGLang engine divide a layer's inputs, and hold its bias whole; elsewhere its outputs."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The LoRA adapters of a model; rank 0 is full fine-tuning."""

    rank: int = 0
    targets: tuple[str, ...] = ()

    def on(self, name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    def check(self, names: Sequence[str]) -> None:
        """Raises TrainableBoundaryError for a target that no layer has, as loading the model would."""
        if absent := tuple(t for t in self.targets if not any(n == t or n.endswith(f".{t}") for n in names)):
            raise TrainableBoundaryError("lora", absent, "no layer of the model has the name of these targets")


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """`QwenImageTransformer2DModel` by its config."""

    width: int
    heads: int
    blocks: int
    channels: int
    """C of a packed token."""
    out_channels: int
    """Of a packed token: patch * patch * out_channels."""
    text_width: int
    extra_time_condition: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: str) -> "Transformer":
        if (found := config.get("_class_name")) != "QwenImageTransformer2DModel":
            raise ModelFolderError(folder, f"holds a {found}, not a QwenImageTransformer2DModel")
        patch = config.get("patch_size", 2)
        channels = config.get("in_channels", 64)
        heads = config.get("num_attention_heads", 24)
        return cls(
            width=heads * config.get("attention_head_dim", 128),
            heads=heads,
            blocks=config.get("num_layers", 60),
            channels=channels,
            out_channels=patch * patch * (config.get("out_channels", 16) or channels),
            text_width=config.get("joint_attention_dim", 3584),
            extra_time_condition=config.get("use_additional_t_cond", False),
        )

    @property
    def block_parameters(self) -> int:
        d = self.width
        linears = sum(x.inputs * d * x.outputs * d + x.outputs * d for x in BLOCK_LINEARS)
        return linears + 4 * (d // self.heads)  # RMSNorm of q and k, of both streams

    @property
    def parameters(self) -> int:
        return self.blocks * self.block_parameters + sum(self._outer_linears().values()) + self.text_width

    def _outer_linears(self) -> dict[str, int]:
        """Parameters of the linear layers outside the blocks, by name."""
        d = self.width
        sizes = {
            "time_text_embed.timestep_embedder.linear_1": (256, d),
            "time_text_embed.timestep_embedder.linear_2": (d, d),
            "img_in": (self.channels, d),
            "txt_in": (self.text_width, d),
            "norm_out.linear": (d, 2 * d),
            "proj_out": (d, self.out_channels),
        }
        counts = {name: inputs * outputs + outputs for name, (inputs, outputs) in sizes.items()}
        return counts | ({"time_text_embed.addition_t_embedding": 2 * d} if self.extra_time_condition else {})

    def adapter_parameters(self, adapters: Adapters) -> int:
        """Elements of A [rank, inputs] and B [outputs, rank] of every target in the blocks."""
        adapters.check([x.name for x in BLOCK_LINEARS])
        widths = sum(x.inputs + x.outputs for x in BLOCK_LINEARS if adapters.on(x.name))
        return self.blocks * adapters.rank * widths * self.width

    def engine_rank_parameters(self, cards: int, adapters: Adapters | None = None) -> int:
        """Elements that each card of an SGLang engine over `cards` cards holds, adapters included.

        Its cards divide attention, the image's MLP and the ends; modulations and norms are whole on each, and so is
        the text's MLP on two cards (0.5.15.post1, `models/dits/qwen_image.py`).
        """
        d, held = self.width, self.parameters
        for name, size in self._outer_linears().items():
            if name in ("img_in", "txt_in", "proj_out"):
                held -= size - size // cards
        for x in BLOCK_LINEARS:
            inputs, outputs, rank = x.inputs * d, x.outputs * d, 0
            if adapters is not None and adapters.on(x.name):
                rank = adapters.rank
            held += self.blocks * rank * (inputs + outputs)
            if x.stream == "row" or (x.name.startswith("txt_mlp") and cards <= 2):
                continue
            whole = inputs * outputs + (rank * inputs if x.name in INPUTS_DIVIDED else outputs + rank * outputs)
            held -= self.blocks * (whole - whole // cards)
        return held

    # ------------------------------------------------------------------ arithmetic

    def forward_flops(self, image: int, text: int, adapters: Adapters) -> float:
        """Multiplications and additions of one row's forward, twice the multiplications: 2 m n k a product."""
        return sum(self._flops(image, text, adapters))

    def backward_flops(self, image: int, text: int, adapters: Adapters, *, full: bool) -> float:
        """The gradient of every input (as much as the forward), and of the weights that are trained.

        Attention takes 2.5 forwards: the scores again, and the gradients of q, k, v and of the scores
        (https://arxiv.org/abs/2205.14135).
        """
        base, low_rank, attention = self._flops(image, text, adapters)
        return base * (2.0 if full else 1.0) + 2.0 * low_rank + 2.5 * attention

    def _flops(self, image: int, text: int, adapters: Adapters) -> tuple[float, float, float]:
        d, tokens = self.width, {"image": image, "text": text, "row": 1}
        base = low_rank = 0.0
        for x in BLOCK_LINEARS:
            base += 2.0 * x.inputs * x.outputs * d * d * tokens[x.stream]
            if adapters.on(x.name):
                low_rank += 2.0 * adapters.rank * (x.inputs + x.outputs) * d * tokens[x.stream]
        ends = 2.0 * d * (self.channels * image + self.text_width * text + self.out_channels * image)
        return base * self.blocks + ends, low_rank * self.blocks, 4.0 * (image + text) ** 2 * d * self.blocks

    # ------------------------------------------------------------------ activations

    def saved_bytes(
        self, image: int, text: int, adapters: Adapters, *, full: bool, compiled: bool, dtype: str
    ) -> float:
        """What one block keeps of one row for its backward.

        A token of either stream keeps, in widths d (found with saved-tensor hooks too, by a test): the input of
        norm1 (1), q and k before (2) and q, k, v after their norm and rotation (3), the attention's output (1),
        the input of norm2 (1) and of gelu (4). Eager RMSNorm keeps float32 copies of q and k (2); a compiled
        block makes them again. A trained linear layer keeps its input; full training also the normed vectors
        that scales multiply (2 + 2) and the outputs that gates multiply (2).
        """
        d, size = self.width, DTYPE_BYTES[dtype]
        tokens = {"image": image, "text": text, "row": 0}
        both = image + text
        elements = (12.0 + (6.0 if full else 0.0)) * d * both
        inputs = {SHARED_INPUT.get(x.name, x.name): x for x in BLOCK_LINEARS if full or adapters.on(x.name)}
        elements += sum(x.inputs * d * tokens[x.stream] for x in inputs.values())
        elements += sum(adapters.rank * tokens[x.stream] for x in BLOCK_LINEARS if adapters.on(x.name))
        copies = 0.0 if compiled or dtype == "fp32" else 2.0 * d * both * 4
        statistics = 3.0 * self.heads * both * 4  # float32: the norms of q and k, the softmax's sum
        return elements * size + copies + statistics

    def input_bytes(self, image: int, text: int, *, dtype: str) -> float:
        """What a checkpointed block keeps of one row: its two inputs."""
        return float((image + text) * self.width * DTYPE_BYTES[dtype])

    def backward_bytes(self, image: int, text: int, *, compiled: bool, dtype: str) -> float:
        """What one row needs in the backward of one block beside what was saved, at its worst, in the image's MLP.

        Eager: the gradients of gelu's output and input, 4 d each; a compiled gelu overwrites one with the other.
        Both streams carry a gradient (1), and one more is being added to it.
        """
        mlp = (4.0 if compiled else 8.0) * image
        return (mlp + 2.0 * (image + text)) * self.width * DTYPE_BYTES[dtype]

    def forward_bytes(self, image: int, text: int, *, dtype: str) -> float:
        """What one row needs in a forward without gradients, at its worst, in the attention.

        In widths d of a token: the residual and the modulated input (2), q, k, v (3) and joined (3), the float32 of
        one rotation, before and after (4), a low-rank product and its sum (2). Seen on the H200: 13.7 to 14.1.
        """
        return 14.0 * (image + text) * self.width * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model folder in numbers: the trained transformer, and the frozen parts that the engine holds."""

    transformer: Transformer
    text_encoder_parameters: int
    vae_parameters: int
    vae_scale: int
    """Pixels on a side of one latent pixel."""
    vae_channels: int
    """Of the VAE's largest feature maps, which have the picture's size."""

    @classmethod
    def from_folder(cls, folder: Path | str, trained: str = "transformer") -> "ModelSize":
        """Reads three config.json files. Raises ModelFolderError."""
        folder = Path(folder)
        names = [f"{part}/config.json" for part in (trained, "text_encoder", "vae")]
        if missing := [name for name in names if not (folder / name).is_file()]:
            hint = "check --model-path; the estimate needs the folder's config.json files alone, no weights"
            raise ModelFolderError(str(folder), f"there is no {', '.join(missing)}", hint)
        vae = _read(folder, "vae/config.json")
        return cls(
            transformer=Transformer.from_config(_read(folder, f"{trained}/config.json"), str(folder / trained)),
            text_encoder_parameters=_qwen_vl_parameters(_read(folder, "text_encoder/config.json")),
            vae_parameters=sum(_vae_parameters(vae)),
            vae_scale=2 ** len(vae.get("temperal_downsample", [False, True, True])),
            vae_channels=vae.get("base_dim", 96),
        )

    def image_tokens(self, height: int, width: int) -> int:
        return (height // self.vae_scale // PATCH) * (width // self.vae_scale // PATCH)

    def decode_bytes(self, height: int, width: int, *, dtype: str) -> float:
        """One picture's peak in the VAE's decoder.

        9 of its largest feature maps, counted tensor by tensor on a CPU: 7.0 in the in-process engine, 9.0 in the
        server, whose norms there go through float32. Not measured on a GPU since engines decode one frame as one
        (`one_frame`); before, it was 22 maps, counted and on the H200.
        """
        return 9.0 * self.vae_channels * height * width * DTYPE_BYTES[dtype]


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text())
    except json.JSONDecodeError as error:
        raise ModelFolderError(str(folder), f"{name} is not JSON: {error}") from None


def _qwen_vl_parameters(config: dict[str, Any]) -> int:
    """`Qwen2_5_VLForConditionalGeneration` of transformers 5.12, whose older configs are flat."""
    text = {**config, **config.get("text_config", {})}
    h, inner, vocabulary = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    kv = h // text["num_attention_heads"] * text["num_key_value_heads"]
    layer = h * h + h + 2 * (h * kv + kv) + h * h + 3 * h * inner + 2 * h
    heads = 1 if text.get("tie_word_embeddings", False) else 2
    return heads * vocabulary * h + text["num_hidden_layers"] * layer + h + _vision_parameters(config["vision_config"])


def _vision_parameters(vision: dict[str, Any]) -> int:
    v, inner = vision.get("hidden_size", 1280), vision.get("intermediate_size", 3420)
    layer = (3 * v * v + 3 * v) + (v * v + v) + 3 * v * inner + 2 * inner + v + 2 * v
    patch = vision.get("in_channels", vision.get("in_chans", 3)) * vision.get("temporal_patch_size", 2)
    patch *= vision.get("patch_size", 14) ** 2
    merged = v * vision.get("spatial_merge_size", 2) ** 2
    out = vision.get("out_hidden_size", 3584)
    merger = v + merged * merged + merged + merged * out + out
    return patch * v + vision.get("depth", 32) * layer + merger


def _vae_parameters(config: dict[str, Any]) -> Iterator[int]:
    """`AutoencoderKLQwenImage` of diffusers 0.37, part by part."""
    dim, z = config.get("base_dim", 96), config.get("z_dim", 16)
    multiples, layers = config.get("dim_mult", [1, 2, 4, 4]), config.get("num_res_blocks", 2)
    temporal = config.get("temperal_downsample", [False, True, True])
    pixels = config.get("input_channels", 3)
    down = [dim * m for m in [1, *multiples]]
    yield _conv(pixels, down[0], 27) + _middle(down[-1]) + down[-1] + _conv(down[-1], 2 * z, 27)
    for i, (into, out) in enumerate(pairwise(down)):
        yield _residual(into, out) + (layers - 1) * _residual(out, out)
        if i < len(multiples) - 1:
            yield _conv(out, out, 9) + (_conv(out, out, 3) if temporal[i] else 0)
    yield _conv(2 * z, 2 * z, 1) + _conv(z, z, 1)
    up = [dim * m for m in [multiples[-1], *reversed(multiples)]]
    yield _conv(z, up[0], 27) + _middle(up[0]) + up[-1] + _conv(up[-1], pixels, 27)
    for i, (into, out) in enumerate(pairwise(up)):
        yield _residual(into if i == 0 else into // 2, out) + layers * _residual(out, out)
        if i < len(multiples) - 1:
            yield _conv(out, out // 2, 9) + (_conv(out, 2 * out, 3) if temporal[::-1][i] else 0)


def _conv(into: int, out: int, taps: int) -> int:
    return into * out * taps + out


def _residual(into: int, out: int) -> int:
    shortcut = _conv(into, out, 1) if into != out else 0
    return into + _conv(into, out, 27) + out + _conv(out, out, 27) + shortcut


def _middle(c: int) -> int:
    """Two residual blocks around one attention."""
    return 2 * _residual(c, c) + c + _conv(c, 3 * c, 1) + _conv(c, c, 1)
