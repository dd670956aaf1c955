"""What a session refuses before a worker starts, and what it makes of settings."""

import json
from dataclasses import replace

import pytest
from flowgrpo_dataprep.source import PromptSource
from flowgrpo_rewards.protocol import ScorerContractError
from flowgrpo_rollout_sglang.text_window import PromptsTooLongError
from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.run_folder import EvalSample, Evaluation
from flowgrpo_trainer.session import _check_text_window, _summary
from flowgrpo_trainer.wiring import reward_config
from flowgrpo_trainer.workers import RewardWorker


@pytest.fixture
def settings():
    return parse(["--recipe", "quickstart"], {})[0]


def test_a_prompt_that_no_engine_takes_is_refused_at_the_start_with_its_number(settings, tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ("a red circle", "word " * 600)
    lines = [{"prompt": text, "metadata": {"task": "t2i", "sample_id": text[:5]}} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = PromptSource(path, seed=0, batch_size=1)
    with pytest.raises(PromptsTooLongError) as error:
        _check_text_window(settings, "qwen_image", prompts)
    assert list(error.value.tokens) == [2]
    assert str(path) in str(error.value)
    _check_text_window(settings, "another model", prompts)


def test_the_parity_bound_is_tighter_where_both_sides_compute_in_fp32_unless_it_is_given(settings):
    fp32 = replace(settings, fsdp=replace(settings.fsdp, fsdp_param_dtype="fp32"))
    fp32 = replace(fp32, rollout=replace(fp32.rollout, engine_dtype="fp32", parity_bound=None))
    assert fp32.parity_bound == 1e-3
    bf16 = replace(fp32, rollout=replace(fp32.rollout, engine_dtype="bf16"))
    assert bf16.parity_bound == 0.05
    assert replace(fp32, rollout=replace(fp32.rollout, parity_bound=0.2)).parity_bound == 0.2


@pytest.mark.parametrize(
    ("rewards", "said"), [((0.5, 1.0), "reward 0.750"), ((0.5, None), "reward 0.500"), ((None, None), "no reward")]
)
def test_the_last_line_of_a_run_leaves_out_pictures_without_a_reward(rewards, said):
    samples = [EvalSample(prompt="a", reward=reward, components={}) for reward in rewards]
    assert _summary(Evaluation(step=0, sets={"held": samples}), "held") == said


def test_a_component_that_the_scorer_does_not_offer_is_refused_when_the_scorer_is_loaded(settings):
    worker = RewardWorker.__ray_metadata__.modified_class  # the class itself, in this process
    path, config = settings.reward.custom_reward_post_process_path, reward_config(settings)
    assert "match" in worker(config, path).start()
    mistyped = replace(config, reward_component_weights={"mach": 1.0})
    with pytest.raises(ScorerContractError, match="'mach'"):
        worker(mistyped, path).start()
