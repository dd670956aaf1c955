"""Qwen-Image's blocks in a form that torch.compile makes one fast graph of, for replay on a GPU.

Two things in diffusers' own form cost memory traffic there, and only these are replaced:
* rotary tables are complex, which inductor does not generate code for: here they are real, and kept on the device;
* q, k and v each read their input once more for their adapter: here one product serves the three.
The arithmetic is that of diffusers up to the order of the summands.

Shapes: B rows of a forward, P image tokens, L text tokens, T = L + P, H heads, D of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_fsdp_actor.lora import ADAPTER


def prepare_for_compile(transformer: nn.Module) -> None:
    """Gives a `QwenImageTransformer2DModel` the rotary tables and the attention of this file."""
    transformer.pos_embed = RealRope(transformer.pos_embed)
    transformer.set_attn_processor(JointAttention())
    for stem in (transformer.img_in, transformer.txt_in):
        # With a frozen stem the first block's inputs would need no gradient: another graph, compiled for it alone.
        stem.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled()))


class RealRope(nn.Module):
    """diffusers' rotary tables as [2, tokens, D]: what multiplies x, and what multiplies x with neighbours swapped.

    Made once for each size and device.
    """

    def __init__(self, complex_rope: nn.Module):
        super().__init__()
        self._complex_rope = complex_rope
        self._made: dict[Any, tuple[Tensor, ...]] = {}

    def forward(self, video_fhw: Sequence[Any], *, max_txt_seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
        size = video_fhw[0]  # replay joins rows of one image size only
        key = (str(size), max_txt_seq_len, device)
        if key not in self._made:
            tables = self._complex_rope([size], max_txt_seq_len=max_txt_seq_len, device=device)
            self._made[key] = tuple(_real(table) for table in tables)
        return self._made[key]


def _real(table: Tensor) -> Tensor:
    cos, sin = table.real, table.imag
    return torch.stack([torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)]).flatten(-2)


class JointAttention:
    """diffusers' attention processor of this model: text and image in one attention, text first."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        L = encoder_hidden_states.shape[1]
        image_table, text_table = image_rotary_emb
        image = _linear(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        text = _linear(encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        image_q, image_k, image_v = (x.unflatten(-1, (attn.heads, -1)) for x in image)
        text_q, text_k, text_v = (x.unflatten(-1, (attn.heads, -1)) for x in text)
        q = [rotated(attn.norm_added_q(text_q), text_table), rotated(attn.norm_q(image_q), image_table)]
        k = [rotated(attn.norm_added_k(text_k), text_table), rotated(attn.norm_k(image_k), image_table)]
        q_BHTD, k_BHTD, v_BHTD = (torch.cat(pair, dim=1).transpose(1, 2) for pair in (q, k, [text_v, image_v]))
        mask = None if attention_mask is None else attention_mask[:, None, None]
        out_BHTD = nn.functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask)
        out = out_BHTD.transpose(1, 2).flatten(2)
        (image_out,), (text_out,) = _linear(out[:, L:], attn.to_out[0]), _linear(out[:, :L], attn.to_add_out)
        return image_out, text_out


def rotated(x_BTHD: Tensor, table: Tensor) -> Tensor:
    """Each pair of neighbours of D turned by its token's angle, in float32."""
    x = x_BTHD.float()
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    own, neighbour = table[:, :, None]
    return (x * own + swapped * neighbour).to(x_BTHD.dtype)


def _linear(x_BTE: Tensor, *layers: Any) -> list[Tensor]:
    """The outputs of linear layers over one input; the first factors of their adapters in one product.

    lora_alpha / lora_rank scales the narrow product between the factors: then the backward needs no scaled copy of
    the gradient of a whole output.
    """
    if not all(hasattr(layer, "lora_A") for layer in layers):
        return [layer(x_BTE) for layer in layers]
    first = torch.cat([layer.lora_A[ADAPTER].weight for layer in layers]).to(x_BTE.dtype)
    low = nn.functional.linear(x_BTE, first).chunk(len(layers), dim=-1)
    return [
        layer.base_layer(x_BTE) + layer.lora_B[ADAPTER](part * layer.scaling[ADAPTER])
        for layer, part in zip(layers, low, strict=True)
    ]
