"""Qwen-Image's blocks in a form that torch.compile makes one fast graph of, for replay on a GPU.

What in diffusers' own form costs memory traffic there is replaced, and nothing else:
* rotary tables are complex, which inductor does not generate code for: here they are real, and kept on the device;
* q, k and v each read their input once more for their adapter: here one product serves the three;
* norm, rotation and joining of the heads are several passes over q, k and v: here one, in `joint_qkv_fused`;
* GELU's tanh and LayerNorm's running variance take longer than their memory traffic: here the same functions are
  spelled with a sigmoid and with two sums, gradients included. Eager, that is many passes: there they are torch's.
The arithmetic is that of diffusers up to the order of the summands.

Shapes: B rows of a forward, P image tokens, L text tokens, T = L + P, H heads, D of a head.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flowgrpo_fsdp_actor.adapters.joint_qkv import Projection, Stream, joint_qkv
from flowgrpo_fsdp_actor.lora import ADAPTER


def prepare_for_compile(transformer: nn.Module, device: str) -> None:
    """Gives a `QwenImageTransformer2DModel` the rotary tables, attention and GELU of this file.

    On "cuda" the heads are made by Triton kernels, and nothing else will do (ImportError without Triton); elsewhere by
    torch.
    """
    make_heads = joint_qkv
    if device == "cuda":
        from flowgrpo_fsdp_actor.adapters import joint_qkv_fused

        make_heads = joint_qkv_fused.joint_qkv
    transformer.pos_embed = RealRope(transformer.pos_embed)
    transformer.set_attn_processor(JointAttention(make_heads))
    for block in transformer.transformer_blocks:
        for mlp in (block.img_mlp, block.txt_mlp):
            mlp.net[0].gelu = gelu_tanh
        for name in ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"):
            setattr(block, name, LayerNorm(getattr(block, name).eps))
    for stem in (transformer.img_in, transformer.txt_in):
        # With a frozen stem the first block's inputs would need no gradient: another graph, compiled for it alone.
        stem.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled()))


class RealRope(nn.Module):
    """diffusers' rotary tables as [2, tokens, D / 2]: cos and sin of each pair's angle.

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
            self._made[key] = tuple(torch.stack([table.real, table.imag]) for table in tables)
        return self._made[key]


class JointAttention:
    """diffusers' attention processor of this model: text and image in one attention, text first."""

    def __init__(self, make_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]):
        self._make_heads = make_heads

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
        image_qkv = projections(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        text_qkv = projections(encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        image = Stream(*image_qkv, attn.norm_q.weight, attn.norm_k.weight, image_table)
        text = Stream(*text_qkv, attn.norm_added_q.weight, attn.norm_added_k.weight, text_table)
        qkv_BTHD = self._make_heads(image, text, eps=attn.norm_q.eps)
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in qkv_BTHD)
        mask = None if attention_mask is None else attention_mask[:, None, None]
        out_BHTD = nn.functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask)
        out = out_BHTD.transpose(1, 2).flatten(2)
        text_out, image_out = out.split([L, out.shape[1] - L], dim=1)
        return _whole(image_out, attn.to_out[0]), _whole(text_out, attn.to_add_out)


def projections(x_BtE: Tensor, *layers: Any) -> list[Projection]:
    """The outputs of linear layers over one input, each adapter's part beside it; their first factors in one product.

    lora_alpha / lora_rank scales the first factors, in their master dtype: no scaled copy of anything larger is made.
    """
    adapted = [layer for layer in layers if hasattr(layer, "lora_A")]
    if not adapted:
        return [Projection(layer(x_BtE)) for layer in layers]
    first = torch.cat([layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER] for layer in adapted]).to(x_BtE.dtype)
    ranks = [layer.lora_A[ADAPTER].weight.shape[0] for layer in adapted]
    lows = list(linear(x_BtE, first).split(ranks, dim=-1))
    found = []
    for layer in layers:
        if hasattr(layer, "lora_A"):
            found.append(Projection(layer.base_layer(x_BtE), lows.pop(0), layer.lora_B[ADAPTER].weight))
        else:
            found.append(Projection(layer(x_BtE)))
    return found


def _whole(x_BtE: Tensor, layer: Any) -> Tensor:
    base, low, up = projections(x_BtE, layer)[0]
    return base if low is None else base + linear(low, up.to(low.dtype))


# The two Functions below are float32 inside and out, and the casts are around them: traced by dynamo (torch 2.11), a
# Function gives a gradient of zero if it ends in a cast that casts nothing.


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh form."""
    if not torch.compiler.is_compiling():
        return nn.functional.gelu(x, approximate="tanh")
    return GeluTanh.apply(x.float()).to(x.dtype)


GELU_LINEAR = 2.0 * (2.0 / math.pi) ** 0.5
GELU_CUBIC = 0.044715 * GELU_LINEAR


class GeluTanh(torch.autograd.Function):
    """x sigmoid(u) with u = 2 sqrt(2 / pi) (x + 0.044715 x^3): x (1 + tanh(u / 2)) / 2, without cancellation."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x * (GELU_LINEAR + GELU_CUBIC * x.square()))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        square = x.square()
        share = torch.sigmoid(x * (GELU_LINEAR + GELU_CUBIC * square))
        out = x * share
        return grad * (share + (out - out * share) * (GELU_LINEAR + 3.0 * GELU_CUBIC * square))


class LayerNorm(nn.Module):
    """Without weights, over the last dimension, in float32."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        return TwoPassNorm.apply(x.float(), self.eps).to(x.dtype)


class TwoPassNorm(torch.autograd.Function):
    """The variance in a second pass, not as a running one.

    The gradient is written out: autograd's own of these steps takes a third pass, over a copy in memory.
    """

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, mean, scale)
        return centred * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, mean, scale = ctx.saved_tensors
        out = (x - mean) * scale
        along = (grad * out).mean(-1, keepdim=True)
        return scale * (grad - grad.mean(-1, keepdim=True) - out * along), None
