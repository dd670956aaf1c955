"""What a step makes of rewards that are not all there: no filler ever counts as a reward."""

import contextlib
from types import SimpleNamespace

import pytest
from flowgrpo_dataprep.source import Prompt
from flowgrpo_rewards import Invalid, RewardConfig, Value, post_process
from flowgrpo_rewards.testing import FakeScorer, grid_of_samples
from flowgrpo_trainer.evaluate import Evaluator
from flowgrpo_trainer.loop import advantages
from flowgrpo_trainer.run_folder import RunFolder


def answer(sample):
    """pick is 20 + slot, correct is 0 or 1; pick fails in group 2."""
    failed = sample.group_index == 2 and sample.slot == 0
    return {
        "pick": Invalid("no answer") if failed else Value(20.0 + sample.slot),
        "correct": Value(float(sample.slot % 2)),
    }


CONFIG = RewardConfig(reward_required_components=("correct",), reward_component_weights={"pick": 1.0, "correct": 2.0})


def report(answer=answer, groups=None):
    return post_process(
        groups or grid_of_samples(3, 2), FakeScorer(components=("pick", "correct"), answer=answer), CONFIG
    )


def evaluated(tmp_path, report):
    """Metrics, and the samples that the evaluation's file holds."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"png")
    groups = [
        SimpleNamespace(
            group_index=g, prompt=Prompt(f"prompt {g}", None, {}), files=SimpleNamespace(images=[picture] * 2)
        )
        for g in range(3)
    ]
    folder = RunFolder(tmp_path / "run")
    fleet = SimpleNamespace(
        colocation=SimpleNamespace(engines_hold_gpus=contextlib.nullcontext), score=lambda groups: report
    )
    evaluator = Evaluator("held", tuple(g.prompt for g in groups), 2, 1, lambda *_, **__: groups, folder)
    metrics = evaluator.run(fleet, None, 0, lambda: None)
    return metrics, folder.read_evals()[0].sets["held"]


def test_an_evaluation_means_over_what_was_scored_and_files_nothing_else(tmp_path):
    metrics, samples = evaluated(tmp_path, report())
    assert metrics == {"eval/held/reward_mean": 21.5, "eval/held/pick_mean": 20.5, "eval/held/correct_mean": 0.5}
    assert [s.components for s in samples[-3:]] == [{"pick": 21.0, "correct": 1.0}, {"correct": 0.0}, {"correct": 1.0}]
    assert [s.reward for s in samples] == [20.0, 23.0, 20.0, 23.0, None, None]
    assert [s.correct for s in samples[-2:]] == [False, True]


def test_a_routed_prompt_is_judged_by_its_component_and_has_a_reward(tmp_path):
    groups = [grid_of_samples(1, 2, reward="pick")[0], *grid_of_samples(3, 2)[1:]]
    metrics, samples = evaluated(tmp_path, report(lambda s: {"pick": Value(20.0), "correct": Value(1.0)}, groups))
    assert metrics == {
        "eval/held/reward_mean": pytest.approx(64 / 3),
        "eval/held/pick_mean": 20.0,
        "eval/held/correct_mean": 1.0,
    }
    assert (samples[0].components, samples[0].reward, samples[0].correct) == ({"pick": 20.0}, 20.0, None)


@pytest.mark.parametrize("std_mode", ["group", "batch", "none"])
def test_a_group_left_out_of_a_component_leaves_the_others_advantages_as_they_are(std_mode):
    some, whole = report(), report(groups=grid_of_samples(2, 2))
    for each in (some, whole):
        each.weights["correct"] = 0.0
    assert advantages(some, std_mode).tolist() == [*advantages(whole, std_mode).tolist(), [0.0, 0.0]]
