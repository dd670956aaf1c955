"""Whole blocks with the kernels in them, as replay compiles them: one graph, with checkpointing and without."""

import copy

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo_fsdp_actor.adapters.qwen_image_blocks import prepare_for_compile
from flowgrpo_fsdp_actor.lora import inject_lora, is_lora
from flowgrpo_fsdp_actor.recompute import make_recomputable, recompute_first
from flowgrpo_math.testing import INTERPRETED
from torch import nn
from torch._dynamo.utils import counters

B, P, L = 2, 6, 5
HEADS = {"num_attention_heads": 1, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
MASK = torch.arange(L) < torch.tensor([5, 3])[:, None]
MASKS = (MASK,) if INTERPRETED else (None, MASK)
"""To the kernels they are the same; on a CPU the torch form's test has both."""
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out"]
RTOL = 2e-5 if INTERPRETED else 2e-4
"""Of the largest value, in float32, against diffusers; on a GPU its products are others."""


@pytest.fixture(scope="module", params=["both"] if INTERPRETED else ["full", "lora"])
def models(request):
    """diffusers' own transformer, and the same weights with our blocks, compiled. Both: adapters and the rest train."""
    device = "cpu" if INTERPRETED else "cuda"
    torch.manual_seed(0)
    theirs = QwenImageTransformer2DModel(
        patch_size=2, in_channels=8, out_channels=2, num_layers=2, joint_attention_dim=24, **HEADS
    )
    if request.param != "full":
        inject_lora(theirs, rank=4, alpha=6.0, targets=TARGETS)
        for name, parameter in list(theirs.named_parameters()):
            if is_lora(name):
                owner, _, leaf = name.rpartition(".")
                setattr(theirs.get_submodule(owner), leaf, nn.Parameter(0.3 * torch.randn(parameter.shape)))
    if request.param == "both":
        theirs.requires_grad_(True)
    theirs.to(device)
    ours = copy.deepcopy(theirs)
    prepare_for_compile(ours, "cuda")
    for block in ours.transformer_blocks:
        block.forward = torch.compile(
            block.forward, dynamic=False, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor"
        )
    names = [f"transformer_blocks.{i}" for i in range(2)]
    return theirs, ours, make_recomputable(ours, names)


def run(model, mask):
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(*size, generator=generator).to(device) for size in ((B, P, 8), (B, L, 24), (B, P, 8))]
    model.zero_grad()
    out = model(
        hidden_states=draw[0],
        encoder_hidden_states=draw[1],
        encoder_hidden_states_mask=None if mask is None else mask.to(device),
        timestep=torch.tensor([0.3, 0.8], device=device),
        img_shapes=[[(1, 2, 3)]] * B,
        return_dict=False,
    )[0]
    (out * draw[2]).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return out.detach(), grads


def test_blocks_with_kernels_compute_what_diffusers_computes_in_one_graph_for_each_kind_of_batch(models):
    theirs, ours, blocks = models
    torch._dynamo.reset()
    counters.clear()
    for mask in MASKS:
        expected_out, expected = run(theirs, mask)
        out, gradients = run(ours, mask)
        assert relative(out, expected_out) < RTOL
        assert gradients.keys() == expected.keys()
        assert max(relative(gradients[name], wanted) for name, wanted in expected.items()) < RTOL
    recompute_first(blocks, 1)
    out_again, again = run(ours, MASK)
    assert torch.equal(out_again, out)  # a block that recomputes is the same forward
    assert max(relative(again[name], wanted) for name, wanted in expected.items()) < RTOL
    assert counters["stats"]["unique_graphs"] == len(MASKS)  # both blocks share one, padded rows take another
    assert not counters["graph_break"]


def relative(got, expected):
    """Largest difference, of the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())
