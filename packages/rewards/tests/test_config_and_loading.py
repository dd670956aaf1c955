"""Settings say everything that is wrong at once; a scorer is checked, loaded once, and kept."""

import os
import subprocess
import sys

import flowgrpo_rewards
import pytest
from flowgrpo_rewards.config import RewardConfig, parse_component_weights, parse_required_components
from flowgrpo_rewards.loading import SCORERS, forget_scorers, import_scorer, load_scorer
from flowgrpo_rewards.protocol import GenerativeRewardScorer, ScorerLoadError
from flowgrpo_rewards.testing import FakeScorer

FAKE = "flowgrpo_rewards.testing.FakeScorer"


class NeedsMore:
    """A factory that demands what nobody passes."""

    def __init__(self, *, model_path, temperature):
        raise AssertionError("never built")


class SeesCuda:
    """Remembers what it could see of CUDA when it was built."""

    required_tracks, components = ("image",), ("cuda",)

    def __init__(self, *, device):
        self.device, self.visible = device, os.environ.get("CUDA_VISIBLE_DEVICES")

    def score(self, samples):
        raise AssertionError("never scored")


class NoComponents(FakeScorer):
    def __init__(self):
        super().__init__(components=())


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch):
    monkeypatch.setitem(sys.modules, "scorers_of_this_test", sys.modules[__name__])
    forget_scorers()
    yield
    forget_scorers()


def test_importing_the_package_imports_neither_torch_nor_pillow_nor_numpy():
    code = "import sys, flowgrpo_rewards; print([m for m in ('torch', 'PIL', 'numpy', 'httpx') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_post_process_is_a_function_of_the_package_and_a_module_in_it():
    import flowgrpo_rewards.post_process as function
    from flowgrpo_rewards.post_process import post_process

    assert flowgrpo_rewards.post_process is post_process is function


def test_good_settings_have_no_problem():
    config = RewardConfig(
        reward_scorer_path=FAKE,
        reward_runtime="colocate",
        reward_required_components=("pickscore",),
        reward_component_weights={"pickscore": 1.0},
    )
    assert list(config.problems()) == []


def test_every_problem_is_told_at_once():
    config = RewardConfig(
        reward_runtime="gpu",
        reward_required_components=("a",),
        reward_component_weights={"b": float("nan")},
        reward_batch_size=0,
        reward_timeout_s=-1.0,
    )
    wheres = [problem.where.split()[0] for problem in config.problems()]
    assert wheres == [
        "--reward-runtime",
        "--reward-required-components",
        "--reward-component-weights",
        "--reward-batch-size",
        "--reward-timeout-s",
    ]


@pytest.mark.parametrize("endpoint", [None, "localhost:8300"])
def test_remote_needs_an_address(endpoint):
    (problem,) = RewardConfig(reward_runtime="remote", reward_endpoint=endpoint).problems()
    assert "http" in problem.fix


@pytest.mark.parametrize("text", ["pickscore", '{"a": 1}', "[1]"])
def test_required_components_are_a_json_list_of_names(text):
    with pytest.raises(ValueError):
        parse_required_components(text)
    assert parse_required_components('["a", "b"]') == ("a", "b")


@pytest.mark.parametrize("text", ["x", '["a"]', '{"a": "1"}', '{"a": true}'])
def test_component_weights_are_a_json_object_of_numbers(text):
    with pytest.raises(ValueError):
        parse_component_weights(text)
    assert parse_component_weights('{"a": 1}') == {"a": 1.0}


def test_a_scorer_is_loaded_once_and_kept_by_its_settings():
    first = load_scorer(RewardConfig(reward_scorer_path=FAKE, reward_model_path="m"))
    again = load_scorer(RewardConfig(reward_scorer_path=FAKE, reward_model_path="m", reward_batch_size=2))
    other = load_scorer(RewardConfig(reward_scorer_path=FAKE, reward_model_path="n"))
    assert first is again
    assert first is not other
    assert (first.model_path, first.device) == ("m", "cpu")


def test_colocate_gives_the_scorer_its_gpu():
    config = RewardConfig(reward_scorer_path=FAKE, reward_runtime="colocate")
    assert load_scorer(config, device="cuda:3").device == "cuda:3"


def test_cpu_hides_cuda_from_the_scorer_and_from_nobody_else(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    scorer = load_scorer(RewardConfig(reward_scorer_path="scorers_of_this_test.SeesCuda"))
    assert (scorer.visible, scorer.device) == ("", "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "flowgrpo_rewards.no_such_module.Scorer",
        "flowgrpo_rewards.testing.NoSuchScorer",
        "flowgrpo_rewards.testing.TINY_CLIP",
        "scorers_of_this_test.NeedsMore",
        "scorers_of_this_test.NoComponents",
    ],
)
def test_what_is_no_scorer_is_refused_by_its_path(path):
    with pytest.raises(ScorerLoadError) as error:
        load_scorer(RewardConfig(reward_scorer_path=path))
    assert error.value.scorer == path


@pytest.mark.parametrize("name", SCORERS)
def test_every_short_name_leads_to_a_class_that_can_be_called(name):
    assert issubclass(import_scorer(name), object)


def test_the_fake_keeps_the_protocol():
    assert isinstance(FakeScorer(), GenerativeRewardScorer)
