"""The noise of one candidate, from its `sample_id` alone.

Neither the batch, nor the engine, nor a neighbour changes a candidate's noise: each draw has its own
generator, seeded by a hash of what the draw is for. Both engines call this file.

Shapes: Z latent channels of the VAE, h x w latent grid, P packed image tokens, C = 4 Z channels of a token.
"""

import hashlib

import torch
from torch import Tensor


def noise_seed(generation_seed: int, rollout_id: int | None) -> int:
    """The base seed of one rollout: fresh in each, so that a prompt met again is explored anew.

    Evaluation (`rollout_id` None) always draws the same noise, so that its pictures compare over a run.
    """
    if rollout_id is None:
        return generation_seed
    return _hash(generation_seed, "rollout", rollout_id)


def candidate_noise(noise_seed: int, sample_id: str, what: str | int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 of `shape` on the CPU; `what` is "x_T" or the index of a denoising step."""
    generator = torch.Generator().manual_seed(_hash(noise_seed, sample_id, what))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def initial_latent(noise_seed: int, sample_id: str, latent_shape: tuple[int, int, int]) -> Tensor:
    """x_T of one candidate, packed: [P, C]. Drawn on the (Z, h, w) grid, then packed in 2 x 2 patches."""
    return pack_latents(candidate_noise(noise_seed, sample_id, "x_T", latent_shape)[None])[0]


def pack_latents(latents_BZhw: Tensor) -> Tensor:
    """[B, Z, h, w] -> [B, P, C]: 2 x 2 patches become tokens, as Qwen-Image's pipeline does it."""
    B, Z, h, w = latents_BZhw.shape
    patches = latents_BZhw.view(B, Z, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(B, (h // 2) * (w // 2), Z * 4)


def unpack_latents(latents_BPC: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `pack_latents`: [B, P, C] -> [B, Z, h, w]."""
    B, _, C = latents_BPC.shape
    patches = latents_BPC.view(B, h // 2, w // 2, C // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(B, C // 4, h, w)


def _hash(*parts: object) -> int:
    """63 bits that depend on every part and on where one part ends and the next begins."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
