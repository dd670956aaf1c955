"""What SGLang's transformer leaves on the table on a GPU in bf16: cuDNN's attention, GELU inside the product before it.

Both replace the `forward` of single modules, which keep their class, their weights and their hooks: syncs, sleep,
adapters and tensor parallelism go on as before. Values differ from SGLang's own by rounding alone.
"""

import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

logger = logging.getLogger(__name__)

ATTENTION, GELU, PLAIN_LINEAR = "USPAttention", "QwenImageGELU", "UnquantizedLinearMethod"
"""SGLang's classes, 0.5.15.post1."""


class OtherStructureError(RuntimeError):
    """The transformer's modules are not those that this file knows, so it cannot change them."""

    def __init__(self, what: str, expected: str):
        super().__init__(what, expected)
        self.what, self.expected = what, expected

    def __str__(self) -> str:
        return f"SGLang's transformer has {self.what}, where {self.expected}; server/fused.py must be fitted to it"


def use_cudnn_attention(transformer: nn.Module) -> str:
    """Makes attention cuDNN's, with a mask (texts of several lengths in one forward) and without one.

    SGLang would let torch choose, which takes FlashAttention 2 without a mask and the memory-efficient kernel with one.
    Returns what attention is now: "cudnn", or the name of SGLang's own backend where that is not torch's, or where
    cuDNN cannot serve a head of this width on this card, which is logged. Raises OtherStructureError.
    """
    attentions = _modules(transformer, ATTENTION, per_block=1)
    own = attentions[0].backend.name.lower()
    heads = torch.zeros(1, 1, 64, attentions[0].head_size, dtype=torch.bfloat16, device=_device(transformer))
    if own != "torch_sdpa" or not _cudnn_serves(heads):
        return own
    for attention in attentions:
        attention.forward = MethodType(_attend, attention)
    return "cudnn"


def fuse_gelu(transformer: nn.Module) -> int:
    """Makes the bias and the GELU of each MLP part of the product before them: one pass less over its widest tensor.

    GELU then sees the product before it is rounded to bf16. Returns how many layers it changed. Raises
    OtherStructureError.
    """
    layers = _modules(transformer, GELU, per_block=2)
    for layer in layers:
        proj = layer.proj
        method = type(proj.quant_method).__name__
        if method != PLAIN_LINEAR or proj.bias is None or proj.skip_bias_add or getattr(proj, "gather_output", False):
            raise OtherStructureError(
                f"an MLP of {type(proj).__name__} with {method}, bias {proj.bias is not None}, skip_bias_add "
                f"{proj.skip_bias_add}, gather_output {getattr(proj, 'gather_output', False)}",
                f"{PLAIN_LINEAR} with a bias that it adds and no gathering was expected",
            )
    for layer in layers:
        layer.forward = MethodType(_gelu, layer)
    return len(layers)


def _modules(transformer: nn.Module, kind: str, per_block: int) -> list[nn.Module]:
    found = [m for m in transformer.modules() if type(m).__name__ == kind]
    wanted = per_block * len(transformer.transformer_blocks)
    if not found or len(found) != wanted:
        raise OtherStructureError(f"{len(found)} modules {kind}", f"{wanted} were expected, {per_block} a block")
    return found


def _device(transformer: nn.Module) -> torch.device:
    return next(transformer.parameters()).device


def _cudnn_serves(heads: Tensor) -> bool:
    """Whether cuDNN does attention among `heads`, [1, 1, tokens, width], on their device: tried once, at load."""
    bias = heads[:, :, :1, :1].expand(1, 1, 1, heads.shape[2]).contiguous()
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(heads, heads, heads)
            scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
    except RuntimeError as error:
        logger.warning("cuDNN has no attention here, so SGLang's own stays: %s", error)
        return False
    return True


def _attend(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    """In place of the class's."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return type(attention).forward(attention, q, k, v, **named)


def _gelu(layer: nn.Module, x: Tensor) -> Tensor:
    """In place of the class's. What hooks add to the product, as an adapter does, must come before GELU."""
    proj = layer.proj
    if proj._forward_hooks or proj._forward_pre_hooks:
        return type(layer).forward(layer, x)
    rows = x.reshape(-1, x.shape[-1])
    out = torch._addmm_activation(proj.bias, rows, proj.weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], -1)
