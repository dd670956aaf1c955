"""Queries, keys and values of a two-stream block: adapter added, heads normalized and turned, text and image joined.

The reference in torch of `joint_qkv_fused`, and what runs where there are none: on a CPU.

Shapes: B rows of a forward, P image tokens, L text tokens, T = L + P (t: of one stream), E = H D channels, H heads of
D, R rank of an adapter.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Projection(NamedTuple):
    """The output of a linear layer, `base + low @ up.T`; without an adapter low and up are None."""

    base_BtE: Tensor
    low_BtR: Tensor | None = None
    """The adapter's narrow product, scaled."""
    up_ER: Tensor | None = None
    """The adapter's second factor in its master dtype; it is used in that of `low_BtR`."""


class Stream(NamedTuple):
    """Text or image before the attention."""

    q: Projection
    k: Projection
    v: Projection
    norm_q_D: Tensor
    """Weights of the RMSNorm over each head of q."""
    norm_k_D: Tensor
    table_2td: Tensor
    """float32, d = D / 2: cos and sin of each token's angle for each pair of neighbours of D."""


def joint_qkv(image: Stream, text: Stream, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, T, H, D] of the joint attention, text first.

    The norm rounds where diffusers' RMSNorm does, and pairs are turned in float32 (its `apply_rotary_emb_qwen`).
    """
    D = image.norm_q_D.shape[0]
    q = [turned(rms_norm(heads(s.q, D), s.norm_q_D, eps), s.table_2td) for s in (text, image)]
    k = [turned(rms_norm(heads(s.k, D), s.norm_k_D, eps), s.table_2td) for s in (text, image)]
    v = [heads(s.v, D) for s in (text, image)]
    return torch.cat(q, dim=1), torch.cat(k, dim=1), torch.cat(v, dim=1)


def heads(projection: Projection, D: int) -> Tensor:
    """[B, t, H, D] the whole output of a projection."""
    base, low, up = projection
    whole = base if low is None else base + linear(low, up.to(low.dtype))
    return whole.unflatten(-1, (-1, D))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, with float32 statistics; the normalized value is rounded to the weight's dtype."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(weight.dtype) * weight


def turned(x_BtHD: Tensor, table_2td: Tensor) -> Tensor:
    """Each pair of neighbours of D turned by its token's angle, in float32."""
    even, odd = x_BtHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table_2td[:, :, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BtHD.dtype)
