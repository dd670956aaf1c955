"""Other ways to run SGLang's Qwen-Image transformer, to be timed beside the one that the server uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from flowgrpo_rollout_sglang.server.fused import ATTENTION, GELU
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def sglangs_own(transformer: nn.Module) -> Iterator[None]:
    """Within it, attention and the MLP's GELU are SGLang's own, without what the server puts in their place."""
    changed = [m for m in transformer.modules() if type(m).__name__ in (ATTENTION, GELU) and "forward" in vars(m)]
    replaced = {module: vars(module).pop("forward") for module in changed}
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward


@contextmanager
def cudnn_attention(_: nn.Module) -> Iterator[None]:
    """Within it, attention is cuDNN's with a mask as well. A RuntimeError where it has none."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


@contextmanager
def two_streams(transformer: nn.Module) -> Iterator[None]:
    """Within it, text runs beside the picture: its products are too small to fill a GPU. The bits are the same."""
    for block in transformer.transformer_blocks:
        block.forward = MethodType(partial(_block_on_two_streams, side=_side_stream()), block)
    try:
        yield
    finally:
        for block in transformer.transformer_blocks:
            del block.forward  # the class's again


@lru_cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _block_on_two_streams(
    block: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: None,
    temb_img_silu: Tensor,
    temb_txt_silu: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any],
    modulate_index: None,
    *,
    side: torch.cuda.Stream,
) -> tuple[Tensor, Tensor]:
    """SGLang's block, in its order. What one stream made and the other reads lives until both have met again."""
    attn, main = block.attn, torch.cuda.current_stream()
    image, text = hidden_states, encoder_hidden_states
    image_freqs, text_freqs = image_rotary_emb

    side.wait_stream(main)
    with torch.cuda.stream(side):
        shift, scale, text_gate, text_shift2, text_scale2, text_gate2 = _modulation(block.txt_mod, temb_txt_silu)
        x = block.txt_norm1(text, shift=shift, scale=scale)
        of_text = _heads(attn, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), x, text_freqs, added=True)
    shift, scale, image_gate, image_shift2, image_scale2, image_gate2 = _modulation(block.img_mod, temb_img_silu)
    y = block.img_norm1(x=image, shift=shift[:, None], scale=scale[:, None])
    of_image = _heads(attn, (attn.to_q, attn.to_k, attn.to_v), y, image_freqs, added=False)
    main.wait_stream(side)
    joined = [torch.cat(pair, dim=1) for pair in zip(of_text, of_image, strict=True)]
    out = attn.attn(*joined, attn_mask=joint_attention_kwargs.get("attn_mask"), num_replicated_prefix=text.shape[1])
    out = out.flatten(2, 3)

    side.wait_stream(main)
    with torch.cuda.stream(side):
        x, _ = attn.to_add_out(out[:, : text.shape[1]])
        x, text = block.txt_norm2(residual=text, x=x, gate=text_gate[:, None], shift=text_shift2, scale=text_scale2)
        text = block.fuse_mul_add(block.txt_mlp(x), text_gate2[:, None], text)
    y, _ = attn.to_out[0](out[:, encoder_hidden_states.shape[1] :])
    gate, shift, scale = image_gate[:, None], image_shift2[:, None], image_scale2[:, None]
    y, image = block.img_norm2(residual=image, x=y, gate=gate, shift=shift, scale=scale)
    image = block.fuse_mul_add(block.img_mlp(y), image_gate2[:, None], image)
    main.wait_stream(side)
    return text, image


def _modulation(mod: nn.Module, temb_silu: Tensor) -> tuple[Tensor, ...]:
    return mod[1](temb_silu)[0].chunk(6, dim=-1)


def _heads(attn: nn.Module, layers: tuple[nn.Module, ...], x: Tensor, freqs: Tensor, *, added: bool) -> list[Tensor]:
    """q, k, v of one stream, [B, tokens, heads, width]; q and k normed and turned."""
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    q, k, v = (layer(x)[0].unflatten(-1, (attn.local_num_heads, attn.head_dim)) for layer in layers)
    norms = (attn.norm_added_q, attn.norm_added_k) if added else (attn.norm_q, attn.norm_k)
    q, k = apply_qk_norm_with_optional_rope(
        q=q, k=k, q_norm=norms[0], k_norm=norms[1], head_dim=attn.head_dim, cos_sin_cache=freqs, allow_inplace=True
    )
    return [q, k, v]
