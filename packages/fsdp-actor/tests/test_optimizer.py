import math

import pytest
import torch
from flowgrpo_fsdp_actor import ActorConfig
from flowgrpo_fsdp_actor.optimizer import fingerprint, gradient_norm, lr_at_step, scale_gradients
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def schedule(**settings):
    config = ActorConfig(model_path="m", lr=0.1, lr_warmup_iters=4, lr_decay_iters=10, min_lr=0.02, **settings)
    return lambda step: lr_at_step(step, config)


def test_warm_up_rises_in_equal_steps_and_its_first_step_already_moves():
    lr = schedule()
    assert [lr(k) for k in range(4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_constant_stays_at_lr_after_the_warm_up():
    assert {schedule()(k) for k in (4, 14, 1000)} == {0.1}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_lr_passes_the_middle_and_stays_at_min_lr(kind):
    lr = schedule(fsdp_lr_scheduler=kind)
    assert lr(4) == pytest.approx(0.1)
    assert lr(9) == pytest.approx(0.06)
    assert [lr(14), lr(500)] == pytest.approx([0.02, 0.02])


def test_linear_and_cosine_differ_a_quarter_of_the_way():
    assert schedule(fsdp_lr_scheduler="linear")(4 + 2) == pytest.approx(0.1 - 0.2 * 0.08)
    assert schedule(fsdp_lr_scheduler="cosine")(4 + 2) == pytest.approx(0.02 + 0.04 * (1 + math.cos(0.2 * math.pi)))


@given(st.integers(0, 40), st.sampled_from(["constant", "linear", "cosine"]))
def test_the_learning_rate_never_rises_after_the_warm_up(step, kind):
    lr = schedule(fsdp_lr_scheduler=kind)
    assert lr(step + 5) <= lr(step + 4) + 1e-15


def test_gradient_norm_and_scaling_see_all_gradients_and_skip_weights_without_one():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert float(gradient_norm([a, b, c])) == 5.0
    scale_gradients([a, b, c], 0.5)
    assert float(gradient_norm([a, b, c])) == 2.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_norm_is_not_finite_where_one_gradient_is_not(bad):
    a = nn.Parameter(torch.zeros(2))
    a.grad = torch.tensor([1.0, bad])
    assert not math.isfinite(float(gradient_norm([a])))


def test_fingerprint_is_the_sum_of_absolute_weights():
    assert fingerprint([nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([-0.5]))]) == 3.5
