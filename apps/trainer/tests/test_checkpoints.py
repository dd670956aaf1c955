"""What the commands say of checkpoints: resumes and exports refused in words, exports that prove themselves."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flowgrpo_fsdp_actor import FsdpActor
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.checkpoint_files import save_checkpoint
from flowgrpo_fsdp_actor.distributed import init_lone_process_group
from flowgrpo_fsdp_actor.errors import CheckpointError, NotResumable
from flowgrpo_fsdp_actor.testing import largest_file
from flowgrpo_math.sigmas import qwen_image_sigmas
from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.engine import SGLangNativeGenerationEngine
from flowgrpo_rollout_sglang.request import GroupRequest
from flowgrpo_trainer.checkpoints import Resume, checkpoints_of, contract_of, refuse_checkpoints_of_another_run
from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.errors import in_words
from flowgrpo_trainer.main import main
from flowgrpo_trainer.wiring import actor_config

RUN = ["--recipe", "quickstart", "--quiet"]


def settings_of(*words):
    settings, _ = parse([*RUN, *map(str, words)], {})
    return settings


def contract(settings):
    return contract_of(settings, QwenImageAdapter(Path(settings.model.model_path)).lora_target_modules)


@pytest.fixture(scope="module")
def trained():
    """The actor of a quickstart run; its adapter has moved."""
    init_lone_process_group("cpu")
    actor = FsdpActor(actor_config(settings_of(), device="cpu"), 0, 1)
    for seed, tensor in enumerate(actor.checkpoint_state()["model"].values()):
        tensor.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
    yield actor
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """The --save folder of the run."""
    folder = tmp_path_factory.mktemp("save")
    settings = settings_of("--save", folder)
    run = checkpoints_of(settings, contract(settings), "prompts", lambda: "")
    state = run.constant | {"rollout_id": 4, "policy_version": 5, "lr_scheduler_steps": 10}
    documents = {"trainer_state.json": state, "weight_sync_manifest.json": {}, "adapter_contract.json": run.contract}
    save_checkpoint(trained, run.tree, 4, documents)
    return folder


@pytest.fixture
def another_base(tmp_path):
    """The quickstart's model with one bit of one weight changed."""
    base = shutil.copytree(settings_of().model.model_path, tmp_path / "base")
    weights = next((base / "transformer").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return base


def a_request():
    """Four candidates of one prompt, sampled as the quickstart does."""
    rollout = settings_of().rollout
    sampling = rollout.sampling_config
    tokens = (sampling.height // 8) * (sampling.width // 8)
    return GroupRequest(
        group_index=0,
        prompt="a red circle on a blue background",
        sample_ids=tuple("abcd"),
        sampling=sampling,
        sigmas=tuple(qwen_image_sigmas(sampling.num_inference_steps, tokens).tolist()),
        sde_indices=(1, 3),
        noise_seed=77,
    )


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def export(saved, output, *words):
    base = settings_of().model.model_path
    return run_command("export", "--save-dir", saved, "--output-dir", output, "--base-model-path", base, *words)


def test_the_same_settings_resume_after_the_saved_rollout(saved):
    settings = settings_of("--load", saved)
    resume = Resume.find(settings, contract(settings))
    assert resume.next_rollout == 5
    assert resume.changes(settings, "prompts") == []
    assert len(resume.changes(settings_of("--load", saved, "--rollout-seed", "7"), "other prompts")) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--lora-rank", "8"], {"lora_rank"}),
        (["--lora-alpha", "3"], {"lora_alpha"}),
        (["--lora-target-modules", "attn.to_q"], {"lora_target_modules"}),
        (["--model-revision", "v2"], {"base_model_hash"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_resume_with_other_settings_is_refused_naming_them(saved, words, named):
    settings = settings_of("--load", saved, *words)
    with pytest.raises(NotResumable) as error:
        Resume.find(settings, contract(settings))
    assert error.value.differing.keys() == named


def test_a_resume_on_another_base_model_is_refused(saved, another_base):
    settings = settings_of("--load", saved, "--model-path", another_base)
    with pytest.raises(NotResumable) as error:
        Resume.find(settings, contract(settings))
    assert error.value.differing.keys() == {"base_model_hash"}


def test_a_cut_shard_is_named_before_anything_starts(saved, tmp_path, capsys):
    copy = shutil.copytree(saved, tmp_path / "save")
    shard = next(copy.rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert run_command(*RUN, "--load", copy, "--run-dir", tmp_path / "run") == 1
    assert str(shard) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_fresh_run_into_the_folder_of_another_one_is_refused_before_anything_starts(saved, tmp_path, capsys):
    """Its rotation would remove its own checkpoints, and a later --load would go on with the other run."""
    assert run_command(*RUN, "--save", saved, "--run-dir", tmp_path / "run") == 1
    said = capsys.readouterr().err
    for word in (str(saved / "t2i"), "iter_0000004", f"--load {saved}", "--save"):
        assert word in said
    assert not (tmp_path / "run").exists()


def test_a_run_saves_where_it_resumed_from_or_where_nothing_is(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    other = shutil.copytree(saved, tmp_path / "other")
    early = tmp_path / "early"  # of a run that has not come as far
    shutil.copytree(saved / "t2i" / "iter_0000004", early / "t2i" / "iter_0000001")
    for save, refused in ((saved, 0), (tmp_path / "link", 0), (tmp_path / "new", 0), (other, 1), (early, 1)):
        settings = settings_of("--load", saved, "--save", save)
        resume = Resume.find(settings, contract(settings))
        if refused:
            with pytest.raises(CheckpointError) as error:
                refuse_checkpoints_of_another_run(settings, resume)
            assert error.value.path == str(save / "t2i")
        else:
            refuse_checkpoints_of_another_run(settings, resume)
    refuse_checkpoints_of_another_run(settings_of(), None)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_an_export_is_proven_by_a_forward_pass(saved, tmp_path, capsys, form):
    assert export(saved, tmp_path / "out", "--form", form, "--verify") == 0
    assert "verified by a forward pass" in capsys.readouterr().out


def test_sglang_on_a_merged_export_samples_from_the_policy_that_was_trained(trained, saved, tmp_path):
    """By its log-probs, which the trained actor replays from base and adapter; the base's own are far from them."""
    base = Path(settings_of().model.model_path)
    served = shutil.copytree(base, tmp_path / base.name, ignore=shutil.ignore_patterns("transformer"))
    assert export(saved, tmp_path / "out", "--form", "merged") == 0
    (tmp_path / "out" / "transformer").rename(served / "transformer")
    config = EngineConfig(name="merged", model_path=str(served), dtype="fp32", log_folder=str(tmp_path))
    engine = SGLangNativeGenerationEngine(config)
    try:
        engine.start()
        trajectories = engine.generate([a_request()])
    finally:
        engine.stop()
    from_trained = max(trained.replay_parity(trajectories).values())
    from_base = max(FsdpActor(trained.config, 0, 1).replay_parity(trajectories).values())
    assert from_trained < 1e-6  # |ratio - 1|; 3e-8 was seen, and 6e-4 from the base
    assert from_base > 100 * max(from_trained, 1e-6)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_an_export_that_the_disk_refuses_names_the_file_and_leaves_no_half_of_it(saved, tmp_path, capsys, form):
    with largest_file(20_000):
        assert export(saved, tmp_path / "out", "--form", form) == 1
    assert {"merged": "diffusion_pytorch_model", "adapter": "adapter_model"}[form] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_over_another_base_model_is_refused(saved, another_base, tmp_path, capsys):
    words = ["--form", "merged", "--save-dir", saved, "--output-dir", tmp_path / "out"]
    assert run_command("export", *words, "--base-model-path", another_base) == 1
    assert str(another_base) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_says_at_its_end_which_checkpoints_failed(saved):
    settings = settings_of("--save", saved)
    run = checkpoints_of(settings, contract(settings), "prompts", lambda: "")
    assert run.outcome() == ""
    run.failures = 2
    assert "2 checkpoints" in run.outcome()
    assert str(saved / "t2i" / "iter_0000004") in run.outcome()


class ActorDiedError(Exception):
    """Named and worded as Ray's."""


def test_a_rank_that_was_killed_is_named_and_the_way_on_is_said():
    died = "The actor died.\n\tclass_name: ActorWorker\n\tactor_id: 3b0c\n\tpid: 24057\n\tip: 192.0.2.2\nMany causes."
    said = in_words(ActorDiedError(died))
    assert "training rank (process 24057)" in said
    assert "--load" in said
    assert "causes" not in said
