"""Whole runs of the quickstart, made short: real Ray, real models, real files. Only their length is small."""

import json
import logging
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo_fsdp_actor.estimate.architecture import Transformer
from flowgrpo_rewards.protocol import GroupRewardError
from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.cluster import ClusterError
from flowgrpo_trainer.hooks import HookError
from flowgrpo_trainer.run_folder import RunFolder
from flowgrpo_trainer.session import train_session
from flowgrpo_trainer.settings import Settings

pytestmark = pytest.mark.usefixtures("ray_cluster")

SHORT = [
    *("--recipe", "quickstart", "--quiet", "--num-rollouts", "2", "--rollout-batch-size", "2"),
    *("--n-samples-per-prompt", "4", "--eval-interval", "0", "--n-samples-per-eval-prompt", "1"),
]
NOT_COMPARED = ("perf/", "reward/score_")
"""Times and memory: the only series that may differ between two equal runs."""


def short_run(folder: Path, *words: str) -> RunFolder:
    settings, recipe = parse(
        [*SHORT, "--run-dir", str(folder), "--artifact-root", str(folder / "artifacts"), *words], {}
    )
    assert isinstance(settings, Settings)
    assert train_session(settings, recipe, []) == 0
    return RunFolder(folder)


def settings_of(*words: str) -> Settings:
    settings, _ = parse([*SHORT, *words], {})
    assert isinstance(settings, Settings)
    return settings


def curves(run: RunFolder) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.metrics.items() if not name.startswith(NOT_COMPARED)}
        for record in run.read_metrics()
    ]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, ray_cluster):
    return short_run(tmp_path_factory.mktemp("first"))


def test_a_run_leaves_its_metrics_evaluations_report_and_record(first_run):
    assert [record.step for record in first_run.read_metrics()] == [0, 1]
    assert [evaluation.step for evaluation in first_run.read_evals()] == [0, 2]
    assert first_run.read_ended()["state"] == "finished"
    assert first_run.report_path.read_text().startswith("<!doctype html>")
    assert list(first_run.events_dir.glob("events.out.tfevents.*"))
    (record,) = (first_run.path / "artifacts" / "recipes").glob("quickstart-*.json")
    written = json.loads(record.read_text())
    expected = {"prompt_set", "eval_set", "loader_order", "sampling_config", "advantage_std_mode", "lora_sync_mode"}
    assert expected | {"git_revision", "sglang_patch"} <= written.keys()


def test_every_metric_of_the_specification_is_logged(first_run):
    """Requirements section 12."""
    logged = set(first_run.read_metrics()[-1].metrics)
    expected = {f"train/ratio_{part}" for part in ("mean", "std", "min", "max")}
    expected |= {
        f"train/{name}" for name in ("loss", "clip_fraction", "approx_kl", "grad_norm", "lr", "policy_version")
    }
    expected |= {f"train/{name}" for name in ("optimizer_steps", "optimizer_skips", "num_microbatches")}
    expected |= {f"train/weight_sync_{name}" for name in ("tensors", "gb", "failures")}
    expected |= {
        f"reward/{c}_{part}" for c in ("color", "shape", "background") for part in ("mean", "std", "min", "max")
    }
    expected |= {"reward/advantage_mean", "reward/advantage_std", "reward/num_groups", "reward/group_std_mean"}
    expected |= {"reward/degenerate", "reward/score_time", "reward/score_samples_per_s"}
    expected |= {f"perf/mem_{part}_gb" for part in ("allocated", "reserved", "peak")}
    expected |= {"perf/train_transitions_per_s", "perf/train_samples_per_s", "perf/reward_time"}
    assert expected - logged == set()


def test_the_policy_version_counts_up_and_the_weights_move(first_run):
    versions = [record.metrics["train/policy_version"] for record in first_run.read_metrics()]
    assert versions == [1.0, 2.0]
    before, after = first_run.read_evals()
    pictures = [[(first_run.path / s.image).read_bytes() for s in e.sets["shapes"]] for e in (before, after)]
    assert pictures[0] != pictures[1]


NAN_SCORER = """
import math
from flowgrpo_rewards import Value


class NanScorer:
    required_tracks = ("image",)
    components = ("shape",)
    seen = 0

    def score(self, samples):
        return [{"shape": Value(self.value(sample))} for sample in samples]

    def value(self, sample):
        \"\"\"Not a number for the second candidate of a group, from the second rollout of two groups on.\"\"\"
        self.seen += sample.slot == 1
        return math.nan if sample.slot == 1 and self.seen > 2 else 0.1 * sample.slot
"""


@pytest.fixture(scope="module")
def nan_run(tmp_path_factory, ray_cluster):
    """A run with one update a rollout whose second rollout has a reward that is not a number: its folder, its error."""
    folder = tmp_path_factory.mktemp("nan")
    (folder / "nan_scorer.py").write_text(NAN_SCORER)
    words = ["--reward-scorer-path", "nan_scorer.NanScorer", "--reward-required-components", '["shape"]']
    words += ["--reward-component-weights", '{"shape": 1.0}', "--num-updates-per-batch", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with pytest.raises(GroupRewardError) as error:
            short_run(folder / "run", *words)
    return RunFolder(folder / "run"), error.value


def test_a_nan_reward_ends_the_run_by_name_and_loses_nothing(nan_run):
    run, error = nan_run
    assert {failure.component for failure in error.failures} == {"shape"}
    assert run.read_ended()["state"] == "failed"
    assert [record.step for record in run.read_metrics()] == [0]
    assert run.report_path.exists()


def test_the_first_updates_ratio_is_one_and_a_later_ones_is_not(first_run, nan_run):
    """T6. With one update the ratio is exactly 1 everywhere; with two the second update leaves 1."""
    one = curves(nan_run[0])
    assert (one[0]["train/ratio_min"], one[0]["train/ratio_max"], one[0]["train/ratio_std"]) == (1.0, 1.0, 0.0)
    assert one[0]["train/optimizer_steps"] == 1.0
    two = curves(first_run)
    assert two[0]["train/ratio_min"] < 1.0 < two[0]["train/ratio_max"]


def test_a_second_run_and_its_resume_repeat_the_first_bit_for_bit(first_run, tmp_path):
    """The same seed twice, and a run stopped after one rollout that goes on from its checkpoint in a new folder."""
    keep = ["--save", str(tmp_path / "save"), "--save-interval", "1"]
    stopped = short_run(tmp_path / "stopped", "--num-rollouts", "1", *keep)
    resumed = short_run(tmp_path / "resumed", "--load", str(tmp_path / "save"), *keep)
    expected = curves(first_run)
    assert without_evaluation(curves(stopped)) == without_evaluation(expected[:1])
    assert without_evaluation(curves(resumed)) == without_evaluation(expected)
    assert curves(resumed)[-1] == expected[-1]
    ends = [run.read_evals()[-1].sets["shapes"] for run in (first_run, resumed)]
    for left, right in zip(*ends, strict=True):
        assert (first_run.path / left.image).read_bytes() == (resumed.path / right.image).read_bytes()


def without_evaluation(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """A run also evaluates after its last rollout, wherever that is."""
    return [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]


TWO_RANKS = [
    *("--resource", '{"actor": [1, 2], "rollout": [1, 2]}', "--fsdp-trainable-mode", "full", "--lora-rank", "0"),
    *("--no-lora-adapter-mode", "--lr", "1e-5"),
]


def test_two_ranks_with_an_engine_each_train_and_publish_full_weights(tmp_path, caplog):
    """What ranks log reaches the driver's log: the fingerprints, and one line of the sync to both engines (W6)."""
    caplog.set_level(logging.INFO, "flowgrpo_trainer")
    run = short_run(tmp_path / "full", *TWO_RANKS, "--num-rollouts", "1", "--fsdp-debug-fingerprint")
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if line.startswith(("[fingerprint] optimizer", "[wsync time]"))]
    assert [line.split()[0] for line in told[:3]] == ["[fingerprint]", "[fingerprint]", "[wsync"]
    assert "engine=engine0" in told[2]
    assert not any(line.startswith("[fingerprint]") for line in told[3:])
    (metrics,) = curves(run)
    assert metrics["train/optimizer_steps"] == 2
    assert metrics["train/policy_version"] == 1.0
    assert metrics["train/weight_sync_tensors"] > 50
    assert math.isfinite(metrics["train/grad_norm"])


def test_a_cluster_that_is_too_small_is_refused_before_anything_waits(tmp_path):
    with pytest.raises(ClusterError) as error:
        short_run(tmp_path / "small", "--resource", '{"actor": [1, 998], "rollout": [1, 998]}')
    assert "1000 CPUs" in error.value.what


@pytest.mark.skipif("FLOWGRPO_TEST_LONG" not in os.environ, reason="two more runs; set FLOWGRPO_TEST_LONG")
def test_two_ranks_that_resume_repeat_the_run_that_went_on_bit_for_bit(tmp_path):
    """As the actor's test_lives, through the whole trainer: two rollouts, and a run from the first checkpoint."""
    whole = short_run(tmp_path / "whole", *TWO_RANKS, "--save", str(tmp_path / "save"), "--save-interval", "1")
    first = "t2i/iter_0000000"
    shutil.copytree(tmp_path / "save" / first, tmp_path / "killed" / first)
    resumed = short_run(tmp_path / "resumed", *TWO_RANKS, "--load", str(tmp_path / "killed"))
    assert len(curves(whole)) == 2
    assert curves(resumed) == curves(whole)


SGLANG = ["--rollout-engine-class-path", "flowgrpo_rollout_sglang.engine.SGLangNativeGenerationEngine"]
KILLS_SERVER = """
import os
import psutil
from flowgrpo_trainer.rollout import convert_samples_to_train_data


def convert(groups, advantages_GN, rollout_id):
    \"\"\"As the default; between the first rollout and its update this run's server is killed.\"\"\"
    if rollout_id == 0:
        log = os.path.join(os.path.dirname(__file__), "sglang", "logs", "engine0.sglang.log")
        writers = [p for p in psutil.process_iter() if any(file.path == log for file in open_files(p))]
        assert writers
        for process in writers:
            process.kill()
    return convert_samples_to_train_data(groups, advantages_GN, rollout_id)


def open_files(process):
    try:
        return process.open_files()
    except psutil.Error:
        return []
"""


def test_the_sglang_engine_trains_as_the_in_process_one_and_a_killed_server_is_replaced(
    first_run, tmp_path, monkeypatch
):
    """The real server asleep while the actor trains, dead when it is to take the weights: a fresh one takes them."""
    (tmp_path / "kills_server.py").write_text(KILLS_SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*SGLANG, "--offload-rollout", "--offload-train", "--use-fault-tolerance"]
    words += ["--custom-convert-samples-to-train-data-path", "kills_server.convert"]
    served, in_process = curves(short_run(tmp_path / "sglang", *words)), curves(first_run)
    assert [row["train/weight_sync_failures"] for row in served] == [1.0, 1.0]
    assert [row["train/policy_version"] for row in served] == [1.0, 2.0]
    for ours, theirs in zip(served, in_process, strict=True):
        for name in ("reward/match_mean", "train/loss", "train/grad_norm", "train/ratio_max"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_two_ranks_train_through_one_server_that_divides_the_model_between_them(tmp_path, device):
    """Full weights, each rank sends its slices; parity of replay is the gate. Four heads: three do not divide."""
    folder, ours = tmp_path / "model", settings_of().model.model_path
    shutil.copytree(ours, folder)
    config = dict(QwenImageTransformer2DModel.load_config(folder / "transformer"))
    config |= {"num_attention_heads": 4, "num_layers": 2}
    torch.manual_seed(0)
    QwenImageTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    words = [*TWO_RANKS, *SGLANG, "--rollout-num-gpus-per-engine", "2", "--model-path", str(folder)]
    words += ["--device", device, "--offload-rollout", "--offload-train"]
    rows = curves(short_run(tmp_path / "run", *words))
    assert [row["train/policy_version"] for row in rows] == [1.0, 2.0]
    size = Transformer.from_config(config, str(folder))
    assert rows[0]["train/weight_sync_gb"] * 1e9 == pytest.approx(2 * 4 * size.engine_rank_parameters(2))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [[], SGLANG], ids=["in-process", "sglang"])
def test_on_a_gpu_the_loop_trains_with_actor_and_engine_asleep_in_turn(tmp_path, engine):
    """Compiled replay against an eager engine: the gate passes within rounding, and the first ratio is still exact."""
    words = ["--device", "cuda", "--offload-rollout", "--offload-train", "--num-updates-per-batch", "1", *engine]
    rows = curves(short_run(tmp_path / "gpu", *words))
    assert [row["train/policy_version"] for row in rows] == [1.0, 2.0]
    assert [row["train/optimizer_steps"] for row in rows] == [1.0, 1.0]
    assert all((row["train/ratio_min"], row["train/ratio_max"]) == (1.0, 1.0) for row in rows)
    assert all(row["train/weight_sync_tensors"] > 0 for row in rows)


def test_a_hook_with_a_wrong_signature_is_refused_before_the_run_starts(tmp_path):
    with pytest.raises(HookError) as error:
        short_run(
            tmp_path / "hook", "--rollout-function-path", "flowgrpo_trainer.rollout.convert_samples_to_train_data"
        )
    assert error.value.flag == "--rollout-function-path"
    assert not (tmp_path / "hook").exists()
