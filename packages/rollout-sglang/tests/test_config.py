import pytest
from flowgrpo_rollout_sglang.config import SamplingConfig


def test_defaults_are_those_of_the_specification():
    """E4."""
    config = SamplingConfig()
    assert (config.height, config.width, config.num_inference_steps) == (384, 384, 12)
    assert (config.guidance_scale, config.eta, config.sigma_max) == (1.0, 0.7, 0.99)
    assert (config.driver_sigmas, config.driver_xt, config.sample_id_mode) == (True, True, "metadata")


def test_every_wrong_key_and_value_is_named_in_one_error():
    with pytest.raises(ValueError) as error:
        SamplingConfig.from_json('{"hight": 3, "width": "wide", "sde_pool": [1, "2"], "driver_xt": 1, "eta": true}')
    assert all(key in str(error.value) for key in ("hight", "width", "sde_pool", "driver_xt", "eta"))


@pytest.mark.parametrize("text", ["not json", "[1]", "3"])
def test_anything_but_a_json_object_is_refused(text):
    with pytest.raises(ValueError):
        SamplingConfig.from_json(text)


def test_whole_numbers_may_be_written_as_floats_and_others_may_not():
    assert SamplingConfig.from_dict({"height": 512.0}).height == 512
    with pytest.raises(ValueError):
        SamplingConfig.from_dict({"height": 512.5})


def test_the_sample_id_mode_of_the_environment_fills_in_only_where_none_is_given(monkeypatch):
    monkeypatch.setenv("FLOWGRPO_SAMPLE_ID_MODE", "group_index")
    assert SamplingConfig.from_dict({}).sample_id_mode == "group_index"
    assert SamplingConfig.from_dict({"sample_id_mode": "positional"}).sample_id_mode == "positional"


def test_the_sde_steps_are_the_same_on_every_rank_and_differ_between_rollouts():
    config = SamplingConfig(
        sde_resample_per_rollout=True, num_sde_steps=3, sde_pool=(1, 2, 3, 4, 5), sde_indices=(3, 4)
    )
    drawn = [config.sde_steps(rollout_id) for rollout_id in range(10)]
    assert drawn == [config.sde_steps(rollout_id) for rollout_id in range(10)]
    assert len(set(drawn)) > 1
    assert config.sde_steps(None) == (3, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"eta": 0.0, "sde_indices": (1,)},
        {"guidance_scale": 4.0, "sde_indices": (1,)},
        {"height": 0, "sde_indices": (1,)},
        {"sigma_max": 1.0, "sde_indices": (1,)},
        {"sde_indices": (1, 12)},
        {"sde_pool": (1, 2), "num_sde_steps": 3, "sde_resample_per_rollout": True},
        {"sde_timestep_fraction": (0.5, 0.5), "num_sde_steps": 1},
        {},
        {"sde_indices": (0,)},
        {"sde_type": "cps", "sde_indices": (11,)},
        {"sde_type": "cps", "eta": 1.01, "sde_indices": (1,)},
    ],
    ids=str,
)
def test_settings_that_cannot_train_are_reported_with_a_remedy(settings):
    problems = list(SamplingConfig(**settings).problems())
    assert problems
    assert all(problem.where and problem.why and problem.fix for problem in problems)


def test_a_fingerprint_changes_with_any_setting():
    base = SamplingConfig(sde_indices=(1,))
    assert base.fingerprint() == SamplingConfig(sde_indices=(1,)).fingerprint()
    assert base.fingerprint() != SamplingConfig(sde_indices=(1,), eta=0.8).fingerprint()
