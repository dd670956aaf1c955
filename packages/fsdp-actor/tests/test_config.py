import pickle
import subprocess
import sys

import pytest
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, errors
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0}


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"lora_rank": 4}, "--lora-rank"),
        ({"fsdp_trainable_mode": "lora"}, "--lora-rank"),
        (LORA | {"lora_alpha": 0.0}, "--lora-alpha"),
        (LORA | {"lora_dropout": 0.1}, "--lora-dropout"),
        (LORA | {"lora_adapter_mode": True, "lora_merge_mode": True}, "--lora-merge-mode"),
        ({"lora_adapter_mode": True}, "--lora-adapter-mode"),
        (LORA | {"fsdp_cpu_offload": True}, "--fsdp-cpu-offload"),
        ({"fsdp_cpu_offload": True}, "--fsdp-cpu-offload"),
        ({"fsdp_cpu_offload": True, "device": "cuda"}, "--fsdp-cpu-offload"),
        ({"lr": 0.0}, "--lr"),
        ({"eps_clip": 0.0}, "--eps-clip"),
        ({"fsdp_lr_scheduler": "cosine"}, "--lr-decay-iters"),
        ({"num_updates_per_batch": 0}, "--num-updates-per-batch"),
        ({"micro_batch_size": -1}, "--micro-batch-size"),
        ({"replay_join": 0}, "--replay-join"),
    ],
    ids=str,
)
def test_a_setting_that_the_actor_refuses_is_named(settings, flag):
    problems = list(ActorConfig(model_path="m", **settings).problems())
    assert any(flag in problem.where for problem in problems)


@pytest.mark.parametrize(
    "settings", [{}, LORA, LORA | {"lora_merge_mode": True}, {"fsdp_lr_scheduler": "linear", "lr_decay_iters": 9}]
)
def test_sound_settings_have_no_problem(settings):
    assert list(ActorConfig(model_path="m", **settings).problems()) == []


def test_the_actor_refuses_all_problems_at_once_before_it_loads_anything():
    with pytest.raises(errors.ConfigRefused) as error:
        FsdpActor(ActorConfig(model_path="nowhere", lora_rank=4, lr=0.0), 0, 1)
    assert len(error.value.problems) == 2


def test_settings_and_plan_import_without_torch_or_numpy():
    code = (
        "import sys, flowgrpo_fsdp_actor, flowgrpo_fsdp_actor.config, flowgrpo_fsdp_actor.plan, "
        "flowgrpo_fsdp_actor.adapters, flowgrpo_rollout_sglang.wire.manifest; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigRefused(("a", "b")),
        errors.RequestRefused("guidance_scale", "4.0", "why", "hint"),
        errors.TrajectoryRefused(3, "timesteps", "why"),
        errors.ModelFolderError("folder", "there is no x"),
        errors.PlanError("what", "fix"),
        errors.MicroBatchCountMismatch(1, (2, 3), (4, 5)),
        errors.TrainableBoundaryError("lora", ("a.b",), "why"),
        errors.ReplayMismatch(0, 0.5, 1.5),
        errors.ActorAsleep("update"),
        errors.RankFailed(1, "update", "ValueError: x"),
        errors.OutOfDeviceMemory("replay", 1, 2 << 30, 1 << 30, "--replay-join", "tried to allocate"),
        errors.CheckpointMismatch(("a", "b")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_fields_and_words_through_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (vars(again), str(again)) == (vars(error), str(error))


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        (
            "transformer_blocks.0._checkpoint_wrapped_module.attn.to_q.base_layer.weight",
            "transformer_blocks.0.attn.to_q.weight",
        ),
        ("transformer_blocks.0.attn.to_q.lora_A.default.weight", "transformer_blocks.0.attn.to_q.lora_A.weight"),
        ("_orig_mod.base_model.model.proj_out.bias", "proj_out.bias"),
        ("img_in.weight", "img_in.weight"),
    ],
)
def test_wire_names_carry_no_wrapper(name, stripped):
    assert strip_transport_wrappers(name) == stripped
