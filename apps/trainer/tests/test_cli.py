import json

import pytest
from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_trainer.cli import RecipeError, parse, recipe_names, recipe_words
from flowgrpo_trainer.settings import Settings
from flowgrpo_trainer.wiring import engine_config

ENV = {"EXP_DIR": "/exp"}


def test_without_arguments_the_quickstart_recipe_is_taken():
    settings, recipe = parse([], {})
    assert recipe == "quickstart"
    assert settings.model.model_path.endswith("assets/tiny-qwen-image")


def test_flags_without_a_recipe_start_from_the_defaults():
    settings, recipe = parse(["--lr", "3e-5"], {})
    assert recipe == "none"
    assert settings.optimizer.lr == 3e-5
    assert settings.model.model_path is None


def test_the_command_line_wins_over_the_environment_and_that_over_the_recipe():
    recipe_alone, _ = parse(["--recipe", "quickstart"], {})
    environment, _ = parse(["--recipe", "quickstart"], {"FLOWGRPO_LR": "1e-6"})
    both, _ = parse(["--recipe", "quickstart", "--lr", "2e-6"], {"FLOWGRPO_LR": "1e-6"})
    assert recipe_alone.optimizer.lr not in (1e-6, 2e-6)
    assert environment.optimizer.lr == 1e-6
    assert both.optimizer.lr == 2e-6


def test_a_switch_of_the_recipe_can_be_taken_back():
    settings, _ = parse(["--recipe", "quickstart", "--no-lora-adapter-mode"], {})
    assert not settings.lora.lora_adapter_mode


def test_environment_values_of_every_kind_are_read():
    settings, _ = parse(
        ["--recipe", "quickstart"],
        {
            "FLOWGRPO_QUIET": "true",
            "FLOWGRPO_EVAL_PROMPT_DATA": "held '/a folder/b.jsonl'",
            "FLOWGRPO_RESOURCE": '{"actor": [1, 2], "rollout": [1, 2]}',
        },
    )
    assert settings.run.quiet
    assert settings.rollout.eval_prompt_data[0] == "held"
    assert str(settings.rollout.eval_prompt_data[1]) == "/a folder/b.jsonl"
    assert settings.world_size("actor") == 2


@pytest.mark.parametrize("variable", ["FLOWGRPO_LRR", "FLOWGRPO_NO_SUCH_THING"])
def test_an_environment_variable_that_names_no_flag_is_refused(variable):
    with pytest.raises(RecipeError) as error:
        parse(["--recipe", "quickstart"], {variable: "1"})
    assert variable in str(error.value)


def test_variables_that_the_rollout_package_reads_are_no_flags():
    parse(["--recipe", "quickstart"], {"FLOWGRPO_CACHE": "/cache", "FLOWGRPO_WIRE_NATIVE": "0"})


def test_the_sample_id_mode_comes_from_its_own_variable(monkeypatch):
    monkeypatch.setenv("FLOWGRPO_SAMPLE_ID_MODE", "positional")
    settings, _ = parse(["--recipe", "quickstart"])
    assert settings.rollout.sampling_config.sample_id_mode == "positional"


@pytest.mark.parametrize("words", [["--lrr", "1"], ["--lr", "much"], ["--sampling-config", '{"etta": 1}']])
def test_a_wrong_flag_ends_the_command_and_is_named(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--recipe", "quickstart", *words], {})
    assert ended.value.code == 2
    assert words[-1].strip('{}"').split('"')[0] in capsys.readouterr().err


def test_every_problem_of_the_sampling_config_is_named_at_once(capsys):
    text = json.dumps({"etta": 1, "height": "tall", "sde_type": "ddpm"})
    with pytest.raises(SystemExit):
        parse(["--recipe", "quickstart", "--sampling-config", text], {})
    said = capsys.readouterr().err
    assert all(word in said for word in ("etta", "tall", "ddpm"))


def test_an_unknown_recipe_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(RecipeError) as error:
        parse(["--recipe", "quick"], {})
    assert all(name in str(error.value) for name in recipe_names())


def test_a_recipe_file_with_an_unknown_flag_is_refused_with_the_likely_one(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("learn-rate = 1\nlr-warmup-iter = 3\n")
    with pytest.raises(RecipeError) as error:
        parse(["--recipe", str(path)], {})
    assert "learn-rate" in str(error.value)
    assert "lr-warmup-iters" in str(error.value)


def test_a_recipe_that_needs_a_variable_says_which():
    with pytest.raises(RecipeError) as error:
        parse(["--recipe", "qwen-image-t2i-lora-8xgpu"], {})
    assert "EXP_DIR" in str(error.value)


@pytest.mark.parametrize("variable", ["MODEL_DIR", "DATA_DIR", "ARTIFACT_ROOT", "SAVE_DIR"])
def test_each_folder_of_a_recipe_can_be_moved(variable):
    words = recipe_words("qwen-image-t2i-lora-8xgpu", ENV | {variable: "/elsewhere"})
    assert any(word.startswith("/elsewhere") for word in words)
    assert any(word.startswith("/exp") for word in words)


LORA = {
    "colocate": True,
    "train_backend": "fsdp",
    "generation_task": "t2i",
    "model_path": "/exp/models/Qwen-Image",
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "global_batch_size": 256,
    "micro_batch_size": 1,
    "rollout_seed": 42,
    "eval_interval": 10,
    "n_samples_per_eval_prompt": 2,
    "generation_seed": 42,
    "lora_rank": 64,
    "lora_alpha": 128.0,
    "lora_dropout": 0.0,
    "lora_adapter_mode": True,
    "fsdp_trainable_mode": "lora",
    "fsdp_trainable_attr": "transformer",
    "fsdp_param_dtype": "bf16",
    "fsdp_reduce_dtype": "fp32",
    "fsdp_master_dtype": "fp32",
    "fsdp_activation_checkpointing": True,
    "fsdp_load_wave_size": 2,
    "offload_train": True,
    "offload_rollout": True,
    "advantage_estimator": "grpo",
    "eps_clip": 1e-4,
    "generative_advantage_std_mode": "group",
    "num_updates_per_batch": 2,
    "lr": 3e-4,
    "lr_warmup_iters": 0,
    "adam_eps": 1e-8,
    "weight_decay": 0.0,
    "reward_runtime": "colocate",
    "reward_model_path": "/exp/models/PickScore_v1",
    "reward_required_components": ("pickscore",),
    "reward_component_weights": {"pickscore": 1.0},
    "weight_sync_wire_dtype": "bf16",
    "weight_sync_bucket_size_mb": 2048,
    "rollout_num_gpus_per_engine": 1,
    "save_interval": 20,
    "max_actor_ckpt_to_keep": 10,
    "resource": {"actor": [1, 8], "rollout": [1, 8]},
}
FULL = LORA | {
    "rollout_batch_size": 8,
    "global_batch_size": 64,
    "micro_batch_size": 2,
    "fsdp_trainable_mode": "full",
    "fsdp_master_dtype": None,
    "lora_rank": 0,
    "lora_alpha": 0.0,
    "lora_adapter_mode": False,
    "lr": 3e-5,
    "lr_warmup_iters": 20,
    "adam_eps": 1e-15,
    "max_actor_ckpt_to_keep": 2,
}


@pytest.mark.parametrize(
    ("recipe", "expected", "evaluated", "eval_file"),
    [
        ("qwen-image-t2i-lora-8xgpu", LORA, (3, 4, 5), "pickapic_eval256.jsonl"),
        ("qwen-image-t2i-8xgpu", FULL, (1, 3, 5), "pickapic_eval64.jsonl"),
    ],
)
def test_a_reference_recipe_has_every_value_of_its_table(recipe, expected, evaluated, eval_file):
    settings, _ = parse(["--recipe", recipe], ENV)
    flat = settings.flat()
    assert {name: flat[name] for name in expected} == expected
    assert flat["eval_prompt_data"][1].name == eval_file
    sampling = settings.rollout.sampling_config
    assert (sampling.height, sampling.width, sampling.num_inference_steps) == (384, 384, 12)
    assert (sampling.eta, sampling.sde_type, sampling.driver_xt) == (0.7, "sde", True)
    assert (sampling.num_sde_steps, sampling.sde_pool) == (3, (1, 2, 3, 4, 5))
    assert sampling.sde_steps(None) == evaluated
    assert len(sampling.sde_steps(7)) == 3


def test_an_engine_is_waited_for_as_long_as_asked_and_else_as_long_as_its_own_default():
    for words, seconds in ([], EngineConfig(name="x", model_path="x").start_timeout_s), (["1800"], 1800.0):
        settings, _ = parse(["--recipe", "quickstart", *(["--engine-start-timeout-s", *words] if words else [])], {})
        assert engine_config(settings, 0, device="cpu", targets=(), log="logs").start_timeout_s == seconds


def test_every_flag_has_a_name_of_its_own():
    groups = Settings().__dataclass_fields__
    names = [name for group in groups for name in getattr(Settings(), group).__dataclass_fields__]
    assert len(names) == len(set(names))
