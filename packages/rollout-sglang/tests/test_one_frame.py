import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from flowgrpo_rollout_sglang.one_frame import fuse_layers, skip_empty_frames
from torch import nn

ATOL = 2e-5
"""Pixels in [-1, 1] in fp32, half a grey level is 4e-3. Seen: 4e-6."""


@pytest.fixture
def vae() -> nn.Module:
    torch.manual_seed(0)
    made = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, False]
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("gamma"):
                parameter.uniform_(0.5, 1.5)
    return made


def decoded(vae: nn.Module, frames: int, like: torch.Tensor | None = None) -> torch.Tensor:
    latents = torch.randn(2, 4, frames, 4, 6, generator=torch.Generator().manual_seed(frames))
    with torch.no_grad():
        return vae.decode(latents if like is None else latents.to(like), return_dict=False)[0]


def test_a_picture_is_the_same_without_the_empty_frames_and_a_video_too(vae):
    before = [decoded(vae, frames) for frames in (1, 2, 1)]
    assert skip_empty_frames(vae) > 10
    for frames, was in zip((1, 2, 1), before, strict=True):
        torch.testing.assert_close(decoded(vae, frames), was, atol=ATOL, rtol=0)


def test_a_picture_leaves_no_maps_for_a_next_frame(vae):
    skip_empty_frames(vae)
    kept = []
    vae.decoder.conv_out.register_forward_pre_hook(lambda *_: kept.append([m for m in vae._feat_map if m is not None]))
    decoded(vae, 1)
    decoded(vae, 2)
    assert [len(maps) > 0 for maps in kept] == [False, True, True]


def test_fused_layers_give_the_same_picture(vae):
    before = [decoded(vae, frames) for frames in (1, 2)]
    skip_empty_frames(vae)
    assert fuse_layers(vae) > 10
    for frames, was in zip((1, 2), before, strict=True):
        torch.testing.assert_close(decoded(vae, frames), was, atol=ATOL, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_layers_on_a_gpu_are_as_near_to_float64_as_the_layers_were(vae, dtype):
    exact = decoded(copy.deepcopy(vae).double(), 1, torch.empty(0, dtype=torch.float64))
    vae = vae.to("cuda", dtype)
    like = torch.empty(0, device="cuda", dtype=dtype)
    before = (decoded(vae, 1, like).cpu().double() - exact).abs().mean()
    skip_empty_frames(vae)
    fuse_layers(vae)
    after = (decoded(vae, 1, like).cpu().double() - exact).abs().mean()
    assert after <= 1.25 * before + 1e-7
