"""The reward step: what a run gets, and what it is told when a scorer misbehaves."""

import math
import pickle

import pytest
from flowgrpo_rewards import RewardConfig, post_process
from flowgrpo_rewards.post_process import advantage_metrics
from flowgrpo_rewards.protocol import (
    GroupRewardError,
    Invalid,
    RewardTimeoutError,
    ScorerContractError,
    Value,
)
from flowgrpo_rewards.testing import FakeScorer, HangingScorer, grid_of_samples, invalid_at

CONFIG = RewardConfig(reward_scorer_path="x.Y", reward_batch_size=4, reward_timeout_s=30.0)


def test_values_come_back_by_group_and_slot_and_the_scorer_sees_batches_in_order():
    scorer = FakeScorer()
    report = post_process(grid_of_samples(2, 3), scorer, CONFIG)
    assert report.components == {"fake": [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]}
    assert scorer.calls == [[(0, 0), (0, 1), (0, 2), (1, 0)], [(1, 1), (1, 2)]]
    assert report.weights == {"fake": 1.0}


def test_the_metrics_are_those_of_the_raw_values():
    report = post_process(grid_of_samples(2, 2), FakeScorer(), CONFIG)  # 0, 1 and 10, 11
    metrics = report.metrics
    assert metrics["reward/fake_mean"] == 5.5
    assert metrics["reward/fake_std"] == pytest.approx(math.sqrt(25.25))
    assert (metrics["reward/fake_min"], metrics["reward/fake_max"]) == (0.0, 11.0)
    assert metrics["reward/num_groups"] == 2
    assert metrics["reward/group_std_mean"] == 0.5
    assert metrics["reward/score_samples_per_s"] == pytest.approx(4 / metrics["reward/score_time"])


def test_group_std_mean_is_that_of_the_weighted_sum():
    def answer(sample):
        return {"a": Value(float(sample.slot)), "b": Value(-2.0 * sample.slot)}

    config = RewardConfig(reward_scorer_path="x.Y", reward_component_weights={"a": 2.0, "b": 1.0})
    report = post_process(grid_of_samples(3, 2), FakeScorer(components=("a", "b"), answer=answer), config)
    assert report.metrics["reward/group_std_mean"] == 0.0
    assert report.metrics["reward/a_group_std_mean"] == 0.5
    assert report.metrics["reward/b_mean"] == -1.0


def test_a_required_component_that_is_invalid_fails_its_groups_by_name():
    with pytest.raises(GroupRewardError) as error:
        post_process(grid_of_samples(2, 3), FakeScorer(answer=invalid_at(1, "broken PNG")), CONFIG)
    places = [(f.group_index, f.slot, f.component, f.reason) for f in error.value.failures]
    assert places == [(0, 1, "fake", "broken PNG"), (1, 1, "fake", "broken PNG")]
    assert pickle.loads(pickle.dumps(error.value)).failures == error.value.failures
    assert "group 0 slot 1 component 'fake'" in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails_its_group(value):
    scorer = FakeScorer(answer=lambda sample: {"fake": Value(value if sample.slot == 2 else 1.0)})
    with pytest.raises(GroupRewardError) as error:
        post_process(grid_of_samples(1, 3), scorer, CONFIG)
    assert [(f.group_index, f.slot) for f in error.value.failures] == [(0, 2)]


def test_a_component_that_is_not_returned_fails_its_group():
    with pytest.raises(GroupRewardError) as error:
        post_process(grid_of_samples(1, 2), FakeScorer(answer=lambda sample: {}), CONFIG)
    assert {f.component for f in error.value.failures} == {"fake"}


def test_a_scorer_that_raises_on_one_image_blames_that_image_alone():
    def answer(sample):
        if (sample.group_index, sample.slot) == (1, 0):
            raise ZeroDivisionError("no pixels")
        return {"fake": Value(1.0)}

    with pytest.raises(GroupRewardError) as error:
        post_process(grid_of_samples(2, 3), FakeScorer(answer=answer), CONFIG)
    (failure,) = error.value.failures
    assert (failure.group_index, failure.slot) == (1, 0)
    assert "ZeroDivisionError: no pixels" in failure.reason


def test_an_optional_component_without_a_value_is_left_out_of_its_group_and_counted():
    def answer(sample):
        ocr = Value(float(sample.slot)) if sample.group_index else Value(math.nan)
        return {"pick": Value(1.0 + sample.slot), "ocr": ocr}

    config = RewardConfig(reward_scorer_path="x.Y", reward_required_components=("pick",))
    report = post_process(grid_of_samples(2, 2), FakeScorer(components=("pick", "ocr"), answer=answer), config)
    assert report.components["ocr"] == [[0.0, 0.0], [0.0, 1.0]]
    assert report.applies == {"pick": [True, True], "ocr": [False, True]}
    assert report.metrics["reward/invalid"] == 2
    assert report.metrics["reward/ocr_mean"] == 0.5  # of the group that it judged
    assert [(f.group_index, f.slot) for f in report.left_out] == [(0, 0), (0, 1)]


def test_a_routed_prompt_is_judged_by_its_component_alone():
    groups = [grid_of_samples(1, 2, reward="ocr")[0], grid_of_samples(2, 2)[1]]

    def answer(sample):
        values = {"pick": Value(1.0 + sample.slot), "ocr": Value(5.0 * sample.slot)}
        return {"ocr": values["ocr"]} if sample.metadata else values

    report = post_process(groups, FakeScorer(components=("pick", "ocr"), answer=answer), CONFIG)
    assert report.components == {"pick": [[0.0, 0.0], [1.0, 2.0]], "ocr": [[0.0, 5.0], [0.0, 5.0]]}
    assert report.applies == {"pick": [False, True], "ocr": [True, True]}
    assert report.metrics["reward/pick_mean"] == 1.5


def report_with_a_component_that_fails_in_the_last_group():
    """pick is 20 + slot, ocr 0.5; pick fails in group 2."""

    def answer(sample):
        pick = Invalid("no answer") if sample.group_index == 2 and sample.slot == 0 else Value(20.0 + sample.slot)
        return {"pick": pick, "ocr": Value(0.5)}

    config = RewardConfig(reward_required_components=("ocr",), reward_component_weights={"pick": 1.0, "ocr": 2.0})
    return post_process(grid_of_samples(3, 2), FakeScorer(components=("pick", "ocr"), answer=answer), config)


def test_the_mean_reward_is_that_of_groups_with_all_their_components_and_no_zero_stands_in():
    report = report_with_a_component_that_fails_in_the_last_group()
    assert report.metrics["reward/mean"] == 21.5
    assert report.metrics["reward/pick_mean"] == 20.5
    assert (report.reward(0, 1), report.reward(2, 1)) == (22.0, None)
    assert (report.values(0, 1), report.values(2, 1)) == ({"pick": 21.0, "ocr": 0.5}, {"ocr": 0.5})


def test_without_a_whole_group_there_is_no_mean_reward():
    def answer(sample):
        return {"pick": Invalid("down"), "ocr": Value(0.5)}

    config = RewardConfig(reward_required_components=("ocr",), reward_component_weights={"pick": 1.0, "ocr": 1.0})
    report = post_process(grid_of_samples(2, 2), FakeScorer(components=("pick", "ocr"), answer=answer), config)
    assert "reward/mean" not in report.metrics
    assert report.incomplete == {0, 1}


def test_a_component_without_weight_that_fails_leaves_the_reward_whole():
    def answer(sample):
        return {"pick": Value(2.0), "ocr": Invalid("down")}

    config = RewardConfig(reward_required_components=("pick",), reward_component_weights={"pick": 1.0})
    report = post_process(grid_of_samples(1, 2), FakeScorer(components=("pick", "ocr"), answer=answer), config)
    assert (report.metrics["reward/mean"], report.reward(0, 0)) == (2.0, 2.0)


def test_a_route_to_a_component_that_is_not_there_is_refused():
    with pytest.raises(ScorerContractError) as error:
        post_process(grid_of_samples(1, 2, reward="hps"), FakeScorer(), CONFIG)
    assert "'hps'" in error.value.what


def test_too_few_results_name_the_batch():
    class Short(FakeScorer):
        def score(self, samples):
            return super().score(samples)[:-1]

    with pytest.raises(ScorerContractError) as error:
        post_process(grid_of_samples(1, 3), Short(), CONFIG)
    assert error.value.scorer == "Short"
    assert "2 results for 3 samples" in error.value.what


def test_a_bare_number_is_not_taken_for_a_result():
    scorer = FakeScorer(answer=lambda sample: {"fake": 0.0})
    with pytest.raises(ScorerContractError):
        post_process(grid_of_samples(1, 2), scorer, CONFIG)


def test_a_scorer_that_hangs_fails_the_step_by_name():
    scorer = HangingScorer()
    config = RewardConfig(reward_scorer_path="x.Y", reward_timeout_s=0.05)
    with pytest.raises(RewardTimeoutError) as error:
        post_process(grid_of_samples(2, 2), scorer, config)
    scorer.released.set()
    assert (error.value.first, error.value.last, error.value.components) == ((0, 0), (1, 1), ("fake",))
    assert pickle.loads(pickle.dumps(error.value)).scorer == "HangingScorer"


def test_a_weight_for_an_unknown_component_is_refused_before_scoring():
    scorer = FakeScorer()
    with pytest.raises(ScorerContractError):
        post_process(grid_of_samples(1, 2), scorer, RewardConfig(reward_component_weights={"clip": 1.0}))
    assert scorer.calls == []


@pytest.mark.parametrize("sizes", [[2, 3], [], [0]])
def test_groups_of_different_sizes_are_refused(sizes):
    groups = [grid_of_samples(1, size)[0] for size in sizes]
    with pytest.raises(ValueError):
        post_process(groups, FakeScorer(), CONFIG)


def test_advantages_without_variance_are_called_degenerate():
    assert advantage_metrics([[0.0, 0.0], [1e-4, -1e-4]])["reward/degenerate"] == 1.0
    metrics = advantage_metrics([[1.0, -1.0], [1.0, -1.0]])
    assert metrics == {"reward/advantage_mean": 0.0, "reward/advantage_std": 1.0, "reward/degenerate": 0.0}
