"""What the server puts in place of single modules of SGLang's transformer; on a GPU `test_graphs` draws with it."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from flowgrpo_rollout_sglang.server import fused
from flowgrpo_rollout_sglang.server.adapter import Adapter
from flowgrpo_rollout_sglang.server.fused import OtherStructureError, fuse_gelu, use_cudnn_attention
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

WIDTH, INNER = 16, 32
GELU_FORMS = 5e-4
"""Between GELU by erf, which torch fuses on a CPU, and by tanh, which the model asks for and CUDA fuses."""


class UnquantizedLinearMethod:
    """SGLang's, by name."""


class Projection(nn.Linear):
    """As SGLang's linear layers: gives (output, bias that the caller adds)."""

    skip_bias_add = gather_output = False

    def __init__(self):
        super().__init__(WIDTH, INNER)
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class QwenImageGELU(nn.Module):
    """SGLang's, by name and working."""

    def __init__(self):
        super().__init__()
        self.proj = Projection()

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x)[0], approximate="tanh")


class USPAttention(nn.Module):
    """SGLang's, by name; says which of torch's kernels may run, and what it was given."""

    head_size = 32

    def __init__(self, backend: str = "TORCH_SDPA"):
        super().__init__()
        self.backend = SimpleNamespace(name=backend)

    def forward(self, q, k, v, attn_mask=None, num_replicated_prefix=0):
        cuda = torch.backends.cuda
        allowed = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return allowed, (q, k, v, attn_mask, num_replicated_prefix)


def transformer(blocks: int = 2, backend: str = "TORCH_SDPA") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.transformer_blocks = nn.ModuleList(
        nn.ModuleDict({"img_mlp": QwenImageGELU(), "txt_mlp": QwenImageGELU(), "attn": USPAttention(backend)})
        for _ in range(blocks)
    )
    return model


@pytest.fixture
def cudnn(monkeypatch):
    """As on a card whose cuDNN has attention."""
    monkeypatch.setattr(fused, "_cudnn_serves", lambda heads: heads.shape == (1, 1, 64, USPAttention.head_size))


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("mask", [None, 4])
def test_with_and_without_a_mask_only_cudnn_may_do_attention_and_afterwards_all_may_again(cudnn, mask):
    model = transformer()
    before = model.transformer_blocks[0]["attn"](1, 2, 3)[0]
    assert use_cudnn_attention(model) == "cudnn"
    for block in model.transformer_blocks:
        allowed, given = block["attn"](1, 2, 3, attn_mask=mask, num_replicated_prefix=7)
        assert allowed == (True, False, False)
        assert given == (1, 2, 3, mask, 7)
    assert USPAttention()(1, 2, 3)[0] == before


def test_attention_that_is_not_torchs_is_left_alone_and_named(cudnn):
    model = transformer(backend="FA")
    assert use_cudnn_attention(model) == "fa"
    assert "forward" not in vars(model.transformer_blocks[0]["attn"])


def test_where_cudnn_has_none_as_on_a_cpu_attention_is_left_alone_and_the_answer_says_so():
    model = transformer()
    assert use_cudnn_attention(model) == "torch_sdpa"
    assert "forward" not in vars(model.transformer_blocks[0]["attn"])


# ---------------------------------------------------------------------- GELU


def test_the_fused_gelu_gives_the_values_of_the_two_steps_also_after_weights_were_written_in_place():
    model = transformer()
    assert fuse_gelu(model) == 4
    layer = model.transformer_blocks[1]["txt_mlp"]
    x = torch.randn(3, 5, WIDTH)[:, 1:]  # a slice, as attention's output is
    with torch.no_grad():
        for factor in (1.0, 0.5):
            layer.proj.weight.mul_(factor)
            expected = gelu(linear(x, layer.proj.weight, layer.proj.bias), approximate="tanh")
            torch.testing.assert_close(layer(x), expected, atol=GELU_FORMS, rtol=0)


def test_an_adapter_on_an_mlp_is_added_before_gelu_and_without_it_gelu_is_fused_again():
    model = transformer()
    own, x = QwenImageGELU(), torch.randn(3, WIDTH)
    layer = model.transformer_blocks[0]["img_mlp"]
    own.load_state_dict(layer.state_dict())
    fuse_gelu(model)
    with torch.no_grad():
        base = layer(x)
        adapter = Adapter(model, rank=2, alpha=4.0, target_modules=["img_mlp.proj"])
        for target in adapter.targets().values():
            target.copy_(torch.randn(target.shape))
        delta = layer.proj.flowgrpo_lora(x)
        assert torch.equal(layer(x), gelu(own.proj(x)[0] + delta, approximate="tanh"))
        adapter.remove()
        assert torch.equal(layer(x), base)


def test_other_modules_than_those_that_are_known_are_an_error_and_nothing_is_changed(cudnn):
    missing = transformer()
    missing.transformer_blocks[0]["img_mlp"] = nn.Identity()
    for change in (fuse_gelu, use_cudnn_attention):
        with pytest.raises(OtherStructureError):
            change(nn.ModuleDict({"transformer_blocks": nn.ModuleList()}))
    for setting in ("skip_bias_add", "gather_output", "quant_method", "bias"):
        model = transformer()
        setattr(model.transformer_blocks[1]["txt_mlp"].proj, setting, None if setting == "bias" else True)
        with pytest.raises(OtherStructureError):
            fuse_gelu(model)
        assert "forward" not in vars(model.transformer_blocks[0]["img_mlp"])
    with pytest.raises(OtherStructureError):
        fuse_gelu(missing)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(OtherStructureError("2 modules", "4 were expected")))
    assert (error.what, error.expected) == ("2 modules", "4 were expected")


ON_SGLANG = """
import sys
from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.server import fused
from flowgrpo_rollout_sglang.testing import load_sampler
sampler = load_sampler(EngineConfig(name="fused", model_path=sys.argv[1], device="cpu", dtype="fp32"))
assert (sampler.attention, sampler.fused_gelu) == (None, None)
fused._cudnn_serves = lambda heads: True
blocks = len(sampler.transformer.transformer_blocks)
print("found", fused.use_cudnn_attention(sampler.transformer), fused.fuse_gelu(sampler.transformer) == 2 * blocks)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the server itself does it")
def test_sglangs_transformer_has_the_modules_that_are_looked_for(model_folder):
    """In a process of its own, which must not have imported SGLang before. 12 s."""
    done = subprocess.run([sys.executable, "-c", ON_SGLANG, model_folder], capture_output=True, text=True, timeout=120)
    assert "found cudnn True" in done.stdout, done.stderr[-2000:]
