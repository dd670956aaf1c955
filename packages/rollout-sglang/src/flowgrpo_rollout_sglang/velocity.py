"""The one call of the Qwen-Image transformer, shared by the in-process engine and the actor's replay.

Rollout and replay agree bit for bit only if they call the model in the same way, so the call stands here
and nowhere else.

Shapes: B rows of a forward, P packed image tokens, C channels of a token, L text tokens, E text width.
"""

import torch
from torch import Tensor, nn

PATCH = 2
"""Latent pixels on a side of one packed token."""


def latent_grid(height: int, width: int, vae_scale_factor: int) -> tuple[int, int]:
    """Latent pixels (rows, columns) of an image of `height` x `width` pixels.

    Raises ValueError where the side is not a multiple of `vae_scale_factor * 2`: the pipelines would round
    it down without a word, and the trajectory would be one of another size.
    """
    unit = vae_scale_factor * PATCH
    if height < unit or width < unit or height % unit or width % unit:
        raise ValueError(f"height = {height}, width = {width}: both must be multiples of {unit} for this VAE")
    return height // vae_scale_factor, width // vae_scale_factor


def qwen_image_velocity(
    transformer: nn.Module,
    latents_BPC: Tensor,
    sigma_B: Tensor,
    prompt_embeds_BLE: Tensor,
    mask_BL: Tensor | None,
    height: int,
    width: int,
    vae_scale_factor: int,
) -> Tensor:
    """The velocity v = dx/dsigma that `QwenImageTransformer2DModel` predicts: [B, P, C], in the model's dtype.

    The model takes sigma itself as its timestep, not 1000 sigma (`QwenImagePipeline` divides its timesteps by
    1000 before the call), and scales it inside.

    Args:
        latents_BPC: packed latents; cast to the model's dtype.
        sigma_B: float32 in [0, 1].
        mask_BL: bool, True on real text tokens; None where no row is padded.
        height, width: pixels of the image, which alone decide the rotary grid.
    """
    rows, columns = latent_grid(height, width, vae_scale_factor)
    # Not `transformer.dtype`: diffusers looks through all 7,000 modules for it, 20 ms of the host at each call.
    dtype = next(transformer.parameters()).dtype
    masked = {}
    if mask_BL is not None:
        # What diffusers makes of `encoder_hidden_states_mask`, without its copy of a number that the GPU is waited for.
        real_BP = mask_BL.new_ones(latents_BPC.shape[:2])
        masked["attention_kwargs"] = {"attention_mask": torch.cat([mask_BL, real_BP], dim=1)}
    return transformer(
        hidden_states=latents_BPC.to(dtype),
        encoder_hidden_states=prompt_embeds_BLE.to(dtype),
        encoder_hidden_states_mask=None,
        timestep=sigma_B.to(dtype),
        img_shapes=[[(1, rows // PATCH, columns // PATCH)]] * latents_BPC.shape[0],
        guidance=None,
        return_dict=False,
        **masked,
    )[0]
