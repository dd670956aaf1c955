import torch
from diffusers import QwenImagePipeline
from flowgrpo_rollout_sglang.noise import candidate_noise, initial_latent, noise_seed, pack_latents, unpack_latents


def test_a_candidates_noise_depends_on_seed_sample_and_purpose_alone():
    shape = (9, 48)
    first = candidate_noise(1, "prompt:a:sample:0", 3, shape)
    assert torch.equal(first, candidate_noise(1, "prompt:a:sample:0", 3, shape))
    others = [
        candidate_noise(2, "prompt:a:sample:0", 3, shape),
        candidate_noise(1, "prompt:a:sample:1", 3, shape),
        candidate_noise(1, "prompt:a:sample:0", 4, shape),
        candidate_noise(1, "prompt:a:sample:0", "x_T", shape),
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_noise_is_standard_normal_and_uncorrelated_between_candidates():
    """4 standard errors of mean, variance and correlation over 200,000 draws."""
    a = candidate_noise(7, "a", 0, (200_000,))
    b = candidate_noise(7, "b", 0, (200_000,))
    assert abs(a.mean()) < 4 / 200_000**0.5
    assert abs(a.var() - 1) < 4 * (2 / 200_000) ** 0.5
    assert abs((a * b).mean()) < 4 / 200_000**0.5


def test_each_rollout_has_noise_of_its_own_and_evaluations_share_theirs():
    assert noise_seed(5, None) == 5
    assert len({noise_seed(5, rollout) for rollout in range(1000)}) == 1000
    assert noise_seed(5, 3) != noise_seed(6, 3)


def test_packing_is_the_pipelines_own_and_unpacking_undoes_it():
    latents = torch.randn(2, 16, 8, 12)
    packed = pack_latents(latents)
    assert torch.equal(packed, QwenImagePipeline._pack_latents(latents, 2, 16, 8, 12))
    assert torch.equal(unpack_latents(packed, 8, 12), latents)


def test_the_initial_latent_is_packed_noise_of_the_grid():
    drawn = candidate_noise(1, "a", "x_T", (16, 8, 12))
    assert torch.equal(initial_latent(1, "a", (16, 8, 12)), pack_latents(drawn[None])[0])
