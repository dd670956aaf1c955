import torch
from diffusers import AutoencoderKLQwenImage
from flowgrpo_rollout_sglang.one_frame import skip_empty_frames

ATOL = 2e-5
"""Pixels in [-1, 1] in fp32, half a grey level is 4e-3. Seen: 4e-6."""


def test_a_picture_is_the_same_without_the_empty_frames_and_a_video_too():
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, False]
    )
    latents = [torch.randn(2, 4, frames, 4, 6) for frames in (1, 2)]
    with torch.no_grad():
        before = [vae.decode(z, return_dict=False)[0] for z in latents]
        assert skip_empty_frames(vae) > 10
        after = [vae.decode(z, return_dict=False)[0] for z in latents]
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was, atol=ATOL, rtol=0)
