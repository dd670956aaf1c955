import math

import pytest
import torch
from flowgrpo_math import (
    Transition,
    dance_sde_transition_std_dev_t,
    flow_sde_log_prob,
    flow_sde_transition_moments,
    flow_sde_transition_std,
    flow_sde_transition_std_dev_t,
    qwen_image_sigmas,
    replay_transition_logp,
    transition_logp,
    transition_mean,
    transition_sample,
)
from flowgrpo_math.testing import draw_step
from flowgrpo_math.transition import transition
from hypothesis import given
from hypothesis import strategies as st

# Computed apart from this code, in float64, to five digits: x = .8, v = -.3, noise .5, eta .7.
# sigma and its next (whole numbers: positions in the 384 x 384 schedule of 12 steps), kind, sigma_max, s, mean, std,
# x_next, log-prob.
GOLDEN = [
    (0, 1, "sde", 0.99, 7.00000, -0.32167, 1.68753, 0.52209, -1.56721),
    (0, 1, "sde", "sigmas[1]", 2.90365, 0.62144, 0.70000, 0.97144, -0.68726),
    (1, 2, "sde", None, 2.81801, 0.61315, 0.70340, 0.96485, -0.69211),
    (3, 4, "sde", None, 1.45773, 0.75147, 0.39158, 0.94726, -0.10637),
    (3, 4, "dance", None, 0.70000, 0.80547, 0.18804, 0.89948, 0.62718),
    (0.9, 0.8, "sde", None, 2.10000, 0.64135, 0.66408, 0.97339, -0.63458),
    (0.5, 0.4, "sde", None, 0.70000, 0.79815, 0.22136, 0.90883, 0.46403),
    (0.5, 0.4, "dance", None, 0.70000, 0.79815, 0.22136, 0.90883, 0.46403),
    (0.1, 0.02, "sde", None, 0.23333, 0.81246, 0.06600, 0.84546, 1.67421),
    (0.02, 0.0, "dance", None, 0.70000, 0.68203, 0.09899, 0.73153, 1.26875),
]
KINDS = ["sde", "dance", "cps"]


def scalar(value):
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row[2]} {row[0]}->{row[1]}")
def test_golden_steps(row):
    sigma, sigma_next, kind, sigma_max, s, mean, std, x_next, logp = row
    schedule = qwen_image_sigmas(12, 576)
    if isinstance(sigma, int):
        sigma, sigma_next = schedule[sigma], schedule[sigma_next]
    sigma_max = schedule[1].item() if sigma_max == "sigmas[1]" else sigma_max
    x, velocity, noise = scalar(0.8), scalar(-0.3), scalar(0.5)

    t = transition(kind, sigma, sigma_next, eta=0.7, sigma_max=sigma_max)
    drawn = transition_sample(x, velocity, noise, t)
    coefficient = (
        flow_sde_transition_std_dev_t(sigma, eta=0.7, sigma_max=sigma_max)
        if kind == "sde"
        else dance_sde_transition_std_dev_t(sigma, eta=0.7)
    )
    got = [coefficient, transition_mean(x, velocity, t), t.std_B, drawn, transition_logp(x, velocity, drawn, t)]
    for value, expected in zip(got, [s, mean, std, x_next, logp], strict=True):
        assert value.item() == pytest.approx(expected, abs=6e-6)

    moments = flow_sde_transition_moments(x, velocity, sigma, sigma_next, eta=0.7, sde_type=kind, sigma_max=sigma_max)
    assert [value.item() for value in moments] == pytest.approx([mean, std], abs=6e-6)
    alone = flow_sde_transition_std(sigma, sigma_next, eta=0.7, sde_type=kind, sigma_max=sigma_max)
    assert alone.item() == pytest.approx(std, abs=6e-6)
    assert flow_sde_log_prob(drawn, moments[0], moments[1]).item() == pytest.approx(logp, abs=6e-6)


def test_cps_is_its_published_form():
    """x0 = x - sigma v and x1 = x + (1 - sigma) v, mixed so that the noise keeps its share (arXiv 2509.05952)."""
    sigma, sigma_next, eta = 0.6, 0.45, 0.7
    x, velocity = scalar(0.8), scalar(-0.3)
    data, noise = x - sigma * velocity, x + (1 - sigma) * velocity
    std = sigma_next * math.sin(eta * math.pi / 2)
    mean = (1 - sigma_next) * data + math.sqrt(sigma_next**2 - std**2) * noise
    t = transition("cps", sigma, sigma_next, eta=eta)
    assert t.std_B.item() == pytest.approx(std, rel=1e-14)
    torch.testing.assert_close(transition_mean(x, velocity, t), mean, rtol=1e-14, atol=1e-14)


def test_cps_keeps_the_share_of_noise_that_the_schedule_asks_for():
    """With x on the path, the variance of noise in x_next is sigma_next^2, whatever eta."""
    for eta in (0.0, 0.3, 1.0):
        t = transition("cps", 0.6, 0.45, eta=eta)
        kept = t.x_scale_B * 0.6 + t.v_scale_B * 1.0  # the share of x1 in x = .4 x0 + .6 x1, v = x1 - x0
        assert (kept.square() + t.std_B.square()).item() == pytest.approx(0.45**2, rel=1e-12)


sigma_pairs = st.tuples(st.floats(0.01, 0.99), st.floats(0.001, 0.999)).map(lambda p: (p[0], p[0] * p[1]))


@given(sigma_pairs, st.sampled_from([*KINDS, "ode"]))
def test_without_noise_every_kind_is_the_euler_step(pair, kind):
    t = transition(kind, *pair, eta=0.0)
    assert t.x_scale_B.item() == pytest.approx(1.0, abs=1e-12)
    assert t.v_scale_B.item() == pytest.approx(pair[1] - pair[0], abs=1e-12)
    assert t.std_B.item() == 0.0


@given(st.floats(0.0, 0.49), st.floats(0.01, 2.0))
def test_dance_equals_sde_at_sigma_one_half(sigma_next, eta):
    sde, dance = (transition(kind, 0.5, sigma_next, eta=eta) for kind in ("sde", "dance"))
    for a, b in zip(sde, dance, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-12)


@given(sigma_pairs, st.sampled_from(KINDS), st.floats(0.05, 1.0), st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3))
def test_log_prob_is_that_of_torchs_normal(pair, kind, eta, x, velocity, noise):
    x, velocity, noise = scalar(x), scalar(velocity), scalar(noise)
    t = transition(kind, *pair, eta=eta)
    drawn = transition_sample(x, velocity, noise, t)
    expected = torch.distributions.Normal(transition_mean(x, velocity, t), t.std_B).log_prob(drawn)
    assert transition_logp(x, velocity, drawn, t).item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


def test_log_prob_is_the_mean_over_all_latent_elements():
    x, velocity, _, x_next, t = draw_step(3, 7, 5, dtype=torch.float64)
    each = torch.distributions.Normal(transition_mean(x, velocity, t), t.std_B[:, None, None]).log_prob(x_next)
    torch.testing.assert_close(transition_logp(x, velocity, x_next, t), each.mean(dim=(1, 2)), rtol=1e-13, atol=1e-13)


def test_float32_log_prob_is_within_1e_6_of_float64():
    x, velocity, _, x_next, t = draw_step(3, 576, 64)
    exact = transition_logp(x.double(), velocity.double(), x_next.double(), t)
    got = transition_logp(x, velocity, x_next, t)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=0)  # 1e-7 measured; eps_clip is 1e-4


def test_bf16_inputs_are_computed_in_float32():
    x, velocity, _, x_next, t = draw_step(2, 33, 8, dtype=torch.bfloat16)
    assert torch.equal(
        transition_logp(x, velocity, x_next, t), transition_logp(x.float(), velocity.float(), x_next.float(), t)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind):
    x, velocity, _, x_next, t = draw_step(3, 5, 3, dtype=torch.float64, sde_type=kind)
    inputs = tuple(tensor.requires_grad_() for tensor in (x, velocity, x_next))
    assert torch.autograd.gradcheck(lambda *tensors: transition_logp(*tensors, t), inputs)


def test_gradient_of_the_velocity_is_its_closed_form():
    x, velocity, noise, x_next, t = draw_step(3, 5, 3, dtype=torch.float64)
    velocity.requires_grad_()
    transition_logp(x, velocity, x_next, t).sum().backward()
    scale = (t.v_scale_B / t.std_B)[:, None, None]
    torch.testing.assert_close(velocity.grad, scale * noise / 15, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("D", [1, 2, 3, 64, 100, 36864])
def test_a_candidate_has_the_same_bits_alone_and_in_a_batch(D):
    x, velocity, noise, _, t = draw_step(5, D, 1)
    x_next = transition_sample(x, velocity, noise, t)
    together = transition_logp(x, velocity, x_next, t)
    for b in range(5):
        one, own = slice(b, b + 1), Transition(*(c[b : b + 1] for c in t))
        assert torch.equal(transition_sample(x[one], velocity[one], noise[one], own), x_next[one])
        assert torch.equal(transition_logp(x[one], velocity[one], x_next[one], own), together[one])


def test_replay_gives_the_bits_of_rollout():
    """Rollout: sample, then the log-prob of the stored value. Replay: the same from sigmas and the stored states."""
    schedule = qwen_image_sigmas(12, 576).float()
    x, velocity, noise, _, _ = draw_step(4, 36, 16)
    t = transition("sde", schedule[3], schedule[4], eta=0.7)
    stored = transition_sample(x, velocity, noise, t).bfloat16()
    rollout = transition_logp(x, velocity, stored, t)
    replay = replay_transition_logp(
        x, velocity, stored, schedule[3].expand(4), schedule[4].expand(4), sde_type="sde", eta=0.7
    )
    assert torch.equal(rollout, replay)


def test_replay_clamps_sigma_1_where_transition_refuses_it():
    x, velocity, _, x_next, _ = draw_step(2, 3, 4)
    t = transition("sde", 1.0, 0.94, eta=0.7, sigma_max=0.99)
    replay = replay_transition_logp(x, velocity, x_next, 1.0, 0.94, sde_type="sde", eta=0.7)
    assert torch.equal(replay, transition_logp(x, velocity, x_next, t))
    with pytest.raises(ValueError):
        transition("sde", 1.0, 0.94, eta=0.7)
    with pytest.raises(ValueError):
        flow_sde_transition_std_dev_t(1.0, eta=0.7)


def test_a_transition_moved_ahead_gives_the_same_log_prob():
    x, velocity, _, x_next, t = draw_step(3, 7, 5)
    torch.testing.assert_close(
        transition_logp(x, velocity, x_next, t.to("cpu")), transition_logp(x, velocity, x_next, t), atol=3e-7, rtol=0
    )


def test_compiles_into_one_graph():
    x, velocity, _, x_next, t = draw_step(3, 7, 5)
    compiled = torch.compile(transition_logp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, velocity, x_next, t.to("cpu")), transition_logp(x, velocity, x_next, t), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("kind", "sigma", "sigma_next", "options"),
    [
        ("sde", 0.5, 0.5, {}),
        ("sde", 0.4, 0.5, {}),
        ("dance", 1.2, 0.5, {}),
        ("dance", 0.5, -0.1, {}),
        ("dance", math.nan, 0.5, {}),
        ("dance", 0.5, math.nan, {}),
        ("dance", 0.5, 0.4, {"eta": -0.1}),
        ("dance", 0.5, 0.4, {"eta": math.nan}),
        ("sde", 1.0, 0.9, {}),
        ("sde", 1.0, 0.9, {"sigma_max": 1.0}),
        ("cps", 0.02, 0.0, {}),
        ("cps", 0.5, 0.4, {"eta": 1.1}),
        ("flow", 0.5, 0.4, {}),
        ("sde", torch.tensor([0.5, 0.4]), torch.tensor([0.4, 0.3, 0.2]), {}),
        ("sde", torch.tensor([[0.5]]), torch.tensor([[0.4]]), {}),
    ],
)
def test_steps_outside_the_domain_are_refused(kind, sigma, sigma_next, options):
    with pytest.raises(ValueError):
        transition(kind, sigma, sigma_next, **({"eta": 0.7} | options))


@pytest.mark.parametrize(("kind", "eta"), [("ode", 0.7), ("sde", 0.0)])
def test_a_step_without_noise_can_be_sampled_but_has_no_log_prob(kind, eta):
    x, velocity, noise, x_next, _ = draw_step(2, 3, 4)
    t = transition(kind, 0.5, 0.4, eta=eta)
    torch.testing.assert_close(transition_sample(x, velocity, noise, t), x - 0.1 * velocity)
    with pytest.raises(ValueError):
        transition_logp(x, velocity, x_next, t)


def test_bad_tensors_are_refused():
    x, velocity, noise, x_next, t = draw_step(3, 5, 4)
    with pytest.raises(TypeError) as integer:
        transition_logp(x, velocity.long(), x_next, t)
    assert "velocity has dtype torch.int64" in str(integer.value)
    with pytest.raises(TypeError):
        transition_mean(x.numpy(), velocity, t)
    with pytest.raises(ValueError) as shapes:
        transition_sample(x, velocity, noise[:, :4], t)
    assert "noise has shape [3, 4, 4]" in str(shapes.value)
    with pytest.raises(ValueError) as devices:
        transition_logp(x, velocity.to("meta"), x_next, t)
    assert "velocity is on meta" in str(devices.value)
    with pytest.raises(ValueError):
        transition_logp(x, velocity, x_next, Transition(*(c[:2] for c in t)))
    with pytest.raises(ValueError):
        transition_mean(torch.ones(3), torch.ones(3), t)


def test_nan_in_a_stored_latent_is_refused_by_replay_unless_told_not_to_look():
    x, velocity, _, x_next, _ = draw_step(2, 3, 4)
    x_next[1, 2, 3] = math.nan
    settings = {"sde_type": "dance", "eta": 0.7}
    with pytest.raises(ValueError) as error:
        replay_transition_logp(x, velocity, x_next, 0.5, 0.4, **settings)
    assert "logp[1]" in str(error.value)
    logp = replay_transition_logp(x, velocity, x_next, 0.5, 0.4, check_finite=False, **settings)
    assert logp.isnan().tolist() == [False, True]


def test_an_unknown_backend_is_refused():
    x, velocity, _, x_next, _ = draw_step(2, 3, 4)
    with pytest.raises(ValueError):
        replay_transition_logp(x, velocity, x_next, 0.5, 0.4, sde_type="sde", eta=0.7, backend="cuda")


def test_the_triton_backend_refuses_cpu_tensors_instead_of_falling_back_in_silence():
    pytest.importorskip("triton")
    x, velocity, _, x_next, _ = draw_step(2, 3, 4)
    with pytest.raises(ValueError) as error:
        replay_transition_logp(x, velocity, x_next, 0.5, 0.4, sde_type="sde", eta=0.7, backend="triton")
    assert "TRITON_INTERPRET" in str(error.value)
