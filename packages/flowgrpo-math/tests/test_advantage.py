import math
import pickle

import pytest
import torch
from flowgrpo_math import NonFiniteRewardError, combine_component_advantages, normalize_grouped
from hypothesis import assume, given
from hypothesis import strategies as st

STEP = torch.tensor([[0.80, 0.82, 0.84, 0.86]], dtype=torch.float64)

rewards = st.tuples(st.integers(1, 5), st.integers(2, 6)).flatmap(
    lambda shape: st.lists(st.floats(-100, 100), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda values: torch.tensor(values, dtype=torch.float64).view(shape)
    )
)


def test_golden_group_is_divided_by_the_unbiased_std():
    advantages = normalize_grouped(STEP, "group", eps=0.0)
    torch.testing.assert_close(advantages, (STEP - 0.83) / 0.0258199, rtol=1e-5, atol=0)


def test_batch_divides_every_group_by_the_std_of_all_rewards():
    rewards_GN = torch.tensor([[0.0, 1.0], [10.0, 14.0]], dtype=torch.float64)
    expected = torch.tensor([[-0.5, 0.5], [-2.0, 2.0]], dtype=torch.float64) / rewards_GN.std()
    torch.testing.assert_close(normalize_grouped(rewards_GN, "batch", eps=0.0), expected)


def test_none_only_centres():
    torch.testing.assert_close(normalize_grouped(STEP, "none"), STEP - 0.83)


@given(rewards, st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_sum_to_zero(rewards_GN, std_mode):
    # Below this spread the division blows the rounding of the rewards themselves up.
    assume(rewards_GN.std(dim=1).min().item() > 1e-3)
    assert normalize_grouped(rewards_GN, std_mode).sum(dim=1).abs().max().item() < 1e-9


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from(["group", "batch", "none"]))
def test_equal_rewards_give_exact_zeros(value, N, std_mode):
    assert not normalize_grouped(torch.full((3, N), value), std_mode).any()
    assert not normalize_grouped(torch.full((3, N), value, dtype=torch.float64), std_mode, eps=0.0).any()


@given(rewards, st.floats(0.1, 10.0), st.floats(-10.0, 10.0))
def test_group_advantages_ignore_the_scale_and_offset_of_a_reward(rewards_GN, scale, offset):
    assume(rewards_GN.std(dim=1).min().item() > 1e-3)
    moved = normalize_grouped(rewards_GN * scale + offset, "group", eps=0.0)
    torch.testing.assert_close(moved, normalize_grouped(rewards_GN, "group", eps=0.0), rtol=1e-6, atol=1e-6)


def test_components_are_normalized_each_and_then_weighted():
    a, b = torch.rand(4, 6), 100.0 * torch.rand(4, 6)
    got = combine_component_advantages({"a": a, "b": b}, {"a": 1.0, "b": -0.5})
    torch.testing.assert_close(got, normalize_grouped(a) - 0.5 * normalize_grouped(b))


@pytest.mark.parametrize("std_mode", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_that_a_component_does_not_judge_add_nothing_and_change_no_others(std_mode, dtype):
    a = 20.0 + torch.rand(4, 6, dtype=dtype)
    filled = a.clone()
    filled[2] = 0.0  # counted as rewards, these would make the std of the batch ten times what it is
    b = torch.rand(4, 6, dtype=dtype)
    judged = [True, True, False, True]
    got = combine_component_advantages(
        {"a": filled, "b": b}, {"a": 1.0, "b": 1.0}, applies={"a": judged, "b": [True] * 4}, std_mode=std_mode
    )
    alone = normalize_grouped(a[judged], std_mode) + normalize_grouped(b, std_mode)[judged]
    torch.testing.assert_close(got[judged], alone)
    torch.testing.assert_close(got[2], normalize_grouped(b, std_mode)[2])


def test_a_component_that_judges_no_group_adds_nothing():
    a = torch.zeros(2, 3)
    got = combine_component_advantages({"a": a}, {"a": 1.0}, applies={"a": [False, False]}, std_mode="batch")
    assert torch.equal(got, torch.zeros(2, 3))


@pytest.mark.parametrize("applies", [{}, {"a": [True] * 2}, {"b": [True]}])
def test_applies_that_does_not_fit_is_refused(applies):
    with pytest.raises(ValueError):
        combine_component_advantages({"a": STEP}, {"a": 1.0}, applies=applies)


def test_one_candidate_per_prompt_forces_none_so_that_all_advantages_are_zero():
    got = combine_component_advantages({"a": torch.rand(4, 1)}, {"a": 1.0}, std_mode="group")
    assert torch.equal(got, torch.zeros(4, 1))


@pytest.mark.parametrize("std_mode", ["group", "batch"])
def test_a_group_of_one_has_no_std(std_mode):
    with pytest.raises(ValueError):
        normalize_grouped(torch.rand(4, 1), std_mode)
    assert not normalize_grouped(torch.rand(4, 1), "none").any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(value):
    good, bad = torch.rand(3, 4), torch.rand(3, 4)
    bad[2, 1] = value
    with pytest.raises(NonFiniteRewardError) as error:
        combine_component_advantages({"ocr": good, "pickscore": bad}, {"ocr": 1.0, "pickscore": 1.0})
    assert (error.value.component, error.value.group, error.value.candidate) == ("pickscore", 2, 1)
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.component, again.group, str(again)) == ("pickscore", 2, str(error.value))


@pytest.mark.parametrize(
    ("components", "weights"),
    [
        ({}, {}),
        ({"a": STEP}, {}),
        ({"a": STEP}, {"a": 1.0, "b": 1.0}),
        ({"a": STEP}, {"a": math.nan}),
        ({"a": STEP, "b": STEP.view(2, 2)}, {"a": 1.0, "b": 1.0}),
        ({"a": STEP[0]}, {"a": 1.0}),
    ],
)
def test_components_and_weights_that_do_not_match_are_refused(components, weights):
    with pytest.raises(ValueError):
        combine_component_advantages(components, weights)


def test_bad_rewards_are_refused():
    with pytest.raises(TypeError):
        normalize_grouped(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError):
        normalize_grouped(torch.rand(4))
    with pytest.raises(ValueError):
        normalize_grouped(torch.rand(2, 2), "std")
    with pytest.raises(ValueError):
        normalize_grouped(torch.rand(2, 2), eps=-1.0)


def test_rewards_in_float32_give_advantages_in_float32():
    assert normalize_grouped(STEP.float()).dtype == torch.float32
    assert normalize_grouped(STEP.half()).dtype == torch.float32
