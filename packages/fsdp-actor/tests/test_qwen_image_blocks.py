"""The blocks' form for torch.compile against diffusers' own: outputs and gradients, with and without padded text."""

import copy

import pytest
import torch
from flowgrpo_fsdp_actor.adapters.qwen_image_blocks import LayerNorm, gelu_tanh, prepare_for_compile
from flowgrpo_fsdp_actor.lora import inject_lora
from torch import nn

B, P, L = 4, 24, 9
LENGTHS = torch.tensor([9, 5, 7, 9])
MASK = torch.arange(L) < LENGTHS[:, None]
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out"]
"""Not all: text keys and values without an adapter take the other way through the code."""


@pytest.fixture(scope="module", params=["plain", "lora"])
def models(request, model_folder):
    """diffusers' transformer, and the same weights in the form for compilation."""
    from diffusers import QwenImageTransformer2DModel

    theirs = QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")
    if request.param == "lora":
        inject_lora(theirs, rank=4, alpha=8.0, targets=TARGETS)
        for name, parameter in list(theirs.named_parameters()):
            if parameter.is_meta:
                owner, _, leaf = name.rpartition(".")
                values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                setattr(theirs.get_submodule(owner), leaf, nn.Parameter(values))
    ours = copy.deepcopy(theirs)
    prepare_for_compile(ours, "cpu")
    return theirs, ours


def run(model, mask, rows=slice(None), tokens=L):
    """Output and gradients of some rows of one fixed batch."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(B, P, 48, generator=generator)
    text = torch.randn(B, L, 64, generator=generator)
    sigma = torch.rand(B, generator=generator)
    weight = torch.randn(B, P, 48, generator=generator)
    model.zero_grad()
    out = model(
        hidden_states=latents[rows],
        encoder_hidden_states=text[rows, :tokens],
        encoder_hidden_states_mask=mask,
        timestep=sigma[rows],
        img_shapes=[[(1, 4, 6)]] * len(latents[rows]),
        return_dict=False,
    )[0]
    (out * weight[rows]).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(ours, theirs):
    """Largest difference, relative to the largest value of each tensor that is not zero."""
    (out, gradients), (expected, expected_gradients) = ours, theirs
    assert gradients.keys() == expected_gradients.keys()
    pairs = [(out, expected), *((gradients[name], g) for name, g in expected_gradients.items() if g.any())]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("mask", [None, MASK], ids=["unpadded", "padded"])
def test_the_form_for_compilation_computes_what_diffusers_computes(models, mask):
    theirs, ours = models
    assert worst(run(ours, mask), run(theirs, mask)) < 2e-5  # measured 4e-6, in float32


def test_padded_rows_give_the_outputs_and_gradients_of_each_row_alone_and_unpadded(models):
    _, ours = models
    joined, gradients = run(ours, MASK)
    alone = [run(ours, None, slice(row, row + 1), tokens) for row, tokens in enumerate(LENGTHS.tolist())]
    outputs = torch.cat([out for out, _ in alone])
    summed = {name: sum(g[name] for _, g in alone) for name in gradients}
    assert worst((joined, gradients), (outputs, summed)) < 2e-5  # measured 3e-6


FORMS = {
    "gelu": (gelu_tanh, lambda x: nn.functional.gelu(x, approximate="tanh")),
    "norm": (LayerNorm(1e-6), lambda x: nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_compiled_forms_of_gelu_and_norm_and_their_gradients_are_torchs_own_in_float64(form, dtype):
    ours, theirs = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64, 96, generator=generator).mul(4).to(dtype) for _ in range(2))
    x.requires_grad_()
    double = x.detach().double().requires_grad_()
    out, expected = torch.compile(ours, backend="aot_eager", fullgraph=True)(x), theirs(double)
    (gradient,) = torch.autograd.grad(out, x, grad)
    (expected_gradient,) = torch.autograd.grad(expected, double, grad.double())
    for got, wanted in ((out, expected), (gradient, expected_gradient)):
        assert got.dtype == dtype
        off = float((got.double() - wanted).norm().detach() / wanted.norm().detach())
        assert off < (2e-6 if dtype == torch.float32 else 3e-3)  # measured 5e-7; one rounding to bf16 is 1.7e-3
