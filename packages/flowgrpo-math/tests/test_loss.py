import math

import pytest
import torch
from flowgrpo_math import grpo_clip_loss
from hypothesis import given
from hypothesis import strategies as st


def loss_of(log_ratio, advantage, **clip):
    """The loss of one pair, and its derivative in logp."""
    logp = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    out = grpo_clip_loss(logp, torch.zeros_like(logp), torch.tensor([advantage], dtype=torch.float64), **clip)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return out, gradient.item()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "held"),
    [
        (0.0, 1.0, False),
        (0.05, 1.0, False),
        (0.2, 1.0, True),  # already far better: no more of it
        (0.2, -1.0, False),  # worse, and the policy went there: take it back
        (-0.2, 1.0, False),
        (-0.2, -1.0, True),
        (-0.2, 0.0, False),
    ],
)
def test_gradient_vanishes_exactly_where_the_clip_holds(log_ratio, advantage, held):
    out, gradient = loss_of(log_ratio, advantage, eps_clip=0.1)
    ratio = math.exp(log_ratio)
    assert gradient == pytest.approx(0.0 if held else -advantage * ratio, abs=1e-15)
    clipped = min(max(ratio, 0.9), 1.1)
    assert out.loss.item() == pytest.approx(max(-advantage * ratio, -advantage * clipped), abs=1e-15)
    assert out.clip_fraction.item() == float(held)


@pytest.mark.parametrize(("log_ratio", "held"), [(0.15, False), (0.35, True)])
def test_the_upper_bound_can_be_wider(log_ratio, held):
    out, gradient = loss_of(log_ratio, 1.0, eps_clip=0.1, eps_clip_high=0.3)
    assert (gradient == 0.0) == held
    assert out.clip_fraction.item() == float(held)
    assert loss_of(-0.15, -1.0, eps_clip=0.1, eps_clip_high=0.3)[1] == 0.0


@given(st.floats(-1.0, 1.0), st.floats(-3.0, 3.0), st.floats(0.01, 0.5))
def test_the_clipped_loss_is_never_below_the_plain_one(log_ratio, advantage, eps_clip):
    out, _ = loss_of(log_ratio, advantage, eps_clip=eps_clip)
    assert out.loss.item() >= -advantage * math.exp(log_ratio) - 1e-12


def test_loss_is_the_mean_over_candidates_and_steps_never_a_sum_of_log_probs():
    torch.manual_seed(0)
    logp, anchor = (0.1 * torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(4, dtype=torch.float64)
    out = grpo_clip_loss(logp, anchor, advantages, eps_clip=0.05)
    pairs = [
        grpo_clip_loss(logp[b : b + 1, s : s + 1], anchor[b : b + 1, s : s + 1], advantages[b : b + 1], eps_clip=0.05)
        for b in range(4)
        for s in range(3)
    ]
    assert out.loss.item() == pytest.approx(sum(p.loss.item() for p in pairs) / 12)
    held = torch.tensor([p.clip_fraction for p in pairs]).view(4, 3)
    torch.testing.assert_close(out.clip_fraction_S, held.mean(dim=0).double())
    assert 0 < out.clip_fraction.item() < 1
    torch.testing.assert_close(out.ratio_BS, torch.exp(logp - anchor))
    torch.testing.assert_close(out.ratio_mean_S, torch.exp(logp - anchor).mean(dim=0))


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logp = (0.1 * torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    anchor, advantages = 0.1 * torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: grpo_clip_loss(p, anchor, advantages, eps_clip=0.05).loss, (logp,))


def test_anchor_and_advantages_get_no_gradient_and_metrics_carry_none():
    logp, anchor = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
    advantages = torch.tensor([1.0, -1.0], requires_grad=True)
    out = grpo_clip_loss(logp, anchor, advantages, eps_clip=1e-4)
    out.loss.backward()
    assert anchor.grad is None
    assert advantages.grad is None
    assert not any(metric.requires_grad for metric in out[1:])
    torch.testing.assert_close(logp.grad, torch.tensor([[-1.0] * 3, [1.0] * 3]) / 6)


def test_on_policy_with_centred_advantages_the_loss_and_kl_are_zero():
    logp = torch.randn(4, 3)
    out = grpo_clip_loss(logp, logp.clone(), torch.tensor([-1.5, -0.5, 0.5, 1.5]), eps_clip=1e-4)
    assert out.loss.item() == 0.0
    assert out.approx_kl.item() == 0.0
    assert torch.equal(out.ratio_BS, torch.ones(4, 3))


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_approx_kl_of_small_changes_keeps_its_digits(size):
    """ratio - 1 - log ratio is size^2 / 2 at size: in float32 it would drown in rounding below 1e-4."""
    logp, anchor = torch.full((2, 2), size), torch.zeros(2, 2)
    out = grpo_clip_loss(logp, anchor, torch.ones(2), eps_clip=0.1)
    exact = math.expm1(torch.tensor(size).item()) - torch.tensor(size).item()
    assert out.approx_kl.item() == pytest.approx(exact, rel=1e-4)
    assert out.approx_kl.item() == pytest.approx(size**2 / 2, rel=size + 1e-4)


def test_bf16_log_probs_are_computed_in_float32():
    logp = torch.randn(2, 3).bfloat16()
    out = grpo_clip_loss(logp, logp - 0.25, torch.ones(2), eps_clip=0.1)
    assert out.loss.dtype == torch.float32


@pytest.mark.parametrize(
    "clip", [{"eps_clip": 0.0}, {"eps_clip": 1.0}, {"eps_clip": 0.1, "eps_clip_high": 0.0}, {"eps_clip": math.nan}]
)
def test_clip_widths_outside_their_range_are_refused(clip):
    with pytest.raises(ValueError):
        grpo_clip_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), **clip)


def test_bad_tensors_are_refused():
    logp, advantages = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError):
        grpo_clip_loss(logp, torch.zeros(2, 2), advantages, eps_clip=0.1)
    with pytest.raises(ValueError):
        grpo_clip_loss(logp, logp, torch.zeros(2, 3), eps_clip=0.1)
    with pytest.raises(ValueError):
        grpo_clip_loss(logp[0], logp[0], advantages, eps_clip=0.1)
    with pytest.raises(TypeError):
        grpo_clip_loss(logp.long(), logp, advantages, eps_clip=0.1)
    with pytest.raises(ValueError) as devices:
        grpo_clip_loss(logp, logp.to("meta"), advantages, eps_clip=0.1)
    assert "anchor_logp_BS is on meta" in str(devices.value)


@pytest.mark.parametrize("which", ["logp_BS", "anchor_logp_BS", "advantages_B"])
def test_nan_is_refused_by_name_unless_told_not_to_look(which):
    inputs = {"logp_BS": torch.zeros(2, 3), "anchor_logp_BS": torch.zeros(2, 3), "advantages_B": torch.zeros(2)}
    inputs[which].view(-1)[1] = math.nan
    with pytest.raises(ValueError) as error:
        grpo_clip_loss(**inputs, eps_clip=0.1)
    assert which in str(error.value)
    assert not torch.isfinite(grpo_clip_loss(**inputs, eps_clip=0.1, check_finite=False).loss)
