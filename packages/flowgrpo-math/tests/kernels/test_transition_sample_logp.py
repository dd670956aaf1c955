import pytest
import torch
from flowgrpo_math.kernels import _rows, transition_logp
from flowgrpo_math.kernels import transition_sample_logp as fused
from flowgrpo_math.testing import draw_step
from flowgrpo_math.transition import transition
from flowgrpo_math.transition import transition_logp as reference_logp
from flowgrpo_math.transition import transition_sample as reference_sample

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a latent near 1: one rounding of the stored dtype more or less than the reference's (3e-7 measured in float32).
SAMPLE_ATOL = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
LOGP_ATOL = 2e-6  # as in test_transition_logp
SEVERAL = 5 * _rows.CHUNK // 128  # tokens of 64 channels: two chunks and a half


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("P", "C"), [(1, 1), (17, 64), (_rows.CHUNK // 64 + 1, 64)])
@pytest.mark.usefixtures("poisoned")
def test_draws_the_reference_sample_and_scores_the_stored_value(P, C, dtype, out_dtype, device):
    x, velocity, noise, _, t = draw_step(2, P, C, dtype=dtype, device=device)
    x_next, logp = fused(x, velocity, noise, t, out_dtype=out_dtype)
    assert x_next.dtype == out_dtype
    expected = reference_sample(x.double(), velocity.double(), noise.double(), t)
    torch.testing.assert_close(x_next.double(), expected, atol=SAMPLE_ATOL[out_dtype], rtol=0)
    of_stored = reference_logp(x.double(), velocity.double(), x_next.double(), t)
    torch.testing.assert_close(logp.double(), of_stored, atol=LOGP_ATOL, rtol=0)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("latents", [torch.float32, torch.bfloat16], ids=str)
def test_replay_of_the_stored_value_gives_the_bits_of_the_rollout(latents, out_dtype, device):
    """So the first on-policy ratio is exactly 1."""
    x, velocity, noise, _, t = draw_step(3, SEVERAL, dtype=latents, device=device)
    velocity = velocity.bfloat16()
    x_next, logp = fused(x, velocity, noise, t, out_dtype=out_dtype)
    assert torch.equal(transition_logp(x, velocity, x_next, t), logp)


def test_strided_inputs_give_the_bits_of_contiguous_ones(device):
    x, velocity, noise, _, t = draw_step(3, SEVERAL, device=device)
    padded = torch.full((3, SEVERAL + 5, 64), float("nan"), device=device)
    padded[:, 5:] = velocity
    for got, expected in zip(
        fused(x, padded[:, 5:], noise.mT.contiguous().mT, t), fused(x, velocity, noise, t), strict=True
    ):
        assert torch.equal(got, expected)


def test_the_operator_passes_torchs_own_checks(device):
    x, velocity, noise, _, t = draw_step(2, 9, device=device)
    torch.library.opcheck(
        torch.ops.flowgrpo.transition_sample_logp.default,
        (x, velocity, noise, *t.to(device), torch.bfloat16),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_bad_inputs_are_refused(device):
    x, velocity, noise, _, t = draw_step(3, 5, device=device)
    with pytest.raises(TypeError):
        fused(x, velocity, noise, t, out_dtype=torch.float64)
    with pytest.raises(ValueError):
        fused(x, velocity, noise[:2], t)
    with pytest.raises(ValueError):
        fused(x, velocity, noise, transition("ode", 0.5, 0.4, eta=0.7))
    with pytest.raises(ValueError):
        fused(x, velocity.requires_grad_(), noise, t)
