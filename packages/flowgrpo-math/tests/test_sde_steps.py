import subprocess
import sys

import numpy as np
import pytest
from flowgrpo_math import reachable_sde_indices, resolve_sde_indices
from hypothesis import given
from hypothesis import strategies as st

RESAMPLED = {
    "num_inference_steps": 12,
    "sde_resample_per_rollout": True,
    "num_sde_steps": 3,
    "sde_pool": (1, 2, 3, 4, 5),
}


def test_the_first_half_of_twelve_steps_gives_0_2_4():
    steps = resolve_sde_indices(num_inference_steps=12, num_sde_steps=3, sde_timestep_fraction=(0.0, 0.5))
    assert steps == (0, 2, 4)


def test_a_window_that_starts_past_one_step_leaves_step_0_out():
    steps = resolve_sde_indices(num_inference_steps=12, num_sde_steps=2, sde_timestep_fraction=(1 / 12, 0.5))
    assert steps == (1, 3)


def test_a_window_bound_that_is_a_whole_step_stays_whole_in_floating_point():
    assert 0.29 * 100 < 29
    steps = resolve_sde_indices(num_inference_steps=100, num_sde_steps=1, sde_timestep_fraction=(0.29, 1.0))
    assert steps == (29,)


def test_resampling_draws_with_numpys_generator_seeded_by_the_rollout():
    for rollout_id in range(20):
        drawn = np.random.default_rng(rollout_id).choice(np.array([1, 2, 3, 4, 5]), size=3, replace=False)
        assert resolve_sde_indices(rollout_id=rollout_id, **RESAMPLED) == tuple(sorted(drawn.tolist()))


def test_resampling_comes_before_explicit_indices_and_those_before_the_stride():
    settings = RESAMPLED | {"sde_indices": (9, 7, 9)}
    assert set(resolve_sde_indices(rollout_id=0, **settings)) <= {1, 2, 3, 4, 5}
    assert resolve_sde_indices(rollout_id=None, **settings) == (7, 9)
    assert resolve_sde_indices(rollout_id=None, **RESAMPLED) == (0, 4, 8)
    assert resolve_sde_indices(rollout_id=5, **(settings | {"sde_resample_per_rollout": False})) == (7, 9)


def test_without_settings_no_step_is_trained():
    assert resolve_sde_indices(num_inference_steps=12, rollout_id=0) == ()
    assert reachable_sde_indices(num_inference_steps=12) == ()


def test_without_a_pool_the_draw_comes_from_the_window():
    settings = RESAMPLED | {"sde_pool": None, "sde_timestep_fraction": (0.5, 1.0)}
    seen = {k for r in range(40) for k in resolve_sde_indices(rollout_id=r, **settings)}
    assert seen == {6, 7, 8, 9, 10, 11}


def test_reachable_steps_are_those_of_all_rollouts_and_the_evaluation():
    seen = {k for r in range(40) for k in resolve_sde_indices(rollout_id=r, **RESAMPLED)}
    assert set(reachable_sde_indices(**RESAMPLED)) == seen | set(resolve_sde_indices(**RESAMPLED))
    # The evaluation falls to the stride rule, which step 0 is part of: preflight must see it.
    assert 0 in reachable_sde_indices(**RESAMPLED)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_inference_steps": 0},
        {"num_sde_steps": -1},
        {"num_sde_steps": 13},
        {"sde_indices": (3, 12)},
        {"sde_indices": (-1,)},
        {"sde_pool": (1, 12)},
        {"sde_timestep_fraction": (0.5, 0.5)},
        {"sde_timestep_fraction": (-0.1, 0.5)},
        {"sde_timestep_fraction": (0.0, 1.1)},
        {"num_sde_steps": 7, "sde_timestep_fraction": (0.0, 0.5)},
        {"sde_resample_per_rollout": True, "num_sde_steps": 0},
        {"sde_resample_per_rollout": True, "num_sde_steps": 4, "sde_pool": (1, 2, 2, 3)},
        {"sde_resample_per_rollout": True, "num_sde_steps": 1, "rollout_id": -1},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValueError):
        resolve_sde_indices(**({"num_inference_steps": 12} | wrong))


@given(
    st.integers(1, 60),
    st.integers(0, 1000),
    st.data(),
)
def test_any_draw_is_sorted_unique_repeatable_and_reachable(num_inference_steps, rollout_id, data):
    pool = data.draw(st.lists(st.integers(0, num_inference_steps - 1), min_size=1, unique=True))
    settings = {
        "num_inference_steps": num_inference_steps,
        "sde_resample_per_rollout": True,
        "sde_pool": pool,
        "num_sde_steps": data.draw(st.integers(1, len(pool))),
    }
    steps = resolve_sde_indices(rollout_id=rollout_id, **settings)
    assert steps == resolve_sde_indices(rollout_id=rollout_id, **settings)
    assert list(steps) == sorted(set(steps))
    assert len(steps) == settings["num_sde_steps"]
    assert set(steps) <= set(pool) <= set(reachable_sde_indices(**settings))


def test_preflight_can_resolve_steps_without_torch_and_numpy():
    program = (
        "import sys, flowgrpo_math; from flowgrpo_math import resolve_sde_indices, reachable_sde_indices\n"
        "assert reachable_sde_indices(num_inference_steps=12, num_sde_steps=3) == (0, 4, 8)\n"
        "assert not {'torch', 'numpy', 'triton'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
