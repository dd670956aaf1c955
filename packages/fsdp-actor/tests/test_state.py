"""What leaves the actor besides its updates: sleep and wake, published weights, checkpoints."""

import pytest
import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor
from flowgrpo_fsdp_actor import sleep as sleep_module
from flowgrpo_fsdp_actor.errors import CheckpointMismatch, TrainableBoundaryError
from flowgrpo_fsdp_actor.lora import check_trainable_boundary, inject_lora
from flowgrpo_fsdp_actor.plan import Transition
from flowgrpo_fsdp_actor.sleep import DeviceMemory
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_rollout
from torch import nn

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0}
ADVANTAGES = torch.tensor([[1.0, -1.0], [0.5, -0.5]])


@pytest.fixture(scope="module")
def make_actor(model_folder):
    def make(**settings):
        common = {"fsdp_param_dtype": "fp32", "lr": 1e-2, "eps_clip": 1e-3, "n_samples_per_prompt": 2}
        return FsdpActor(ActorConfig(model_path=str(model_folder), sampling=SAMPLING, **(common | settings)), 0, 1)

    return make


@pytest.fixture(scope="module")
def rollout(make_actor):
    actor = make_actor()
    return draw_rollout(actor._policy.module, actor._adapter, group_size=2, text_tokens=(7, 7))


def test_sleep_frees_every_storage_once_and_wake_brings_back_its_bits_and_its_views():
    base = torch.arange(12.0)
    trained, frozen = [base, base[3:6].view(3, 1)], [torch.arange(5, dtype=torch.bfloat16)]
    expected = [t.clone() for t in (*trained, *frozen)]
    memory = DeviceMemory()
    assert memory.sleep(trained, frozen) == 12 * 4 + 5 * 2
    assert [t.untyped_storage().nbytes() for t in (base, frozen[0])] == [0, 0]
    assert memory.wake() == 12 * 4 + 5 * 2
    assert all(torch.equal(t, e) for t, e in zip((*trained, *frozen), expected, strict=True))


def test_sleeping_a_hundred_times_keeps_every_bit_and_needs_no_more_host_memory():
    trained, frozen = [torch.randn(1000)], [torch.randn(3000)]
    memory = DeviceMemory()
    kept = set()
    for _ in range(100):
        trained[0] += 1.0  # moves between sleeps, as training does
        expected = trained[0].clone(), frozen[0].clone()
        memory.sleep(trained, frozen)
        kept.add(tuple(piece.data_ptr() for s in memory._sleepers.values() for piece in s.host))
        memory.wake()
        assert torch.equal(trained[0], expected[0])
        assert torch.equal(frozen[0], expected[1])
    assert len(kept) == 1


def test_a_storage_larger_than_a_slab_comes_back_from_several(monkeypatch):
    monkeypatch.setattr(sleep_module, "MAX_SLAB_BYTES", 1 << 10)
    tensors = [torch.randn(700), torch.randn(31), torch.randn(900)]
    expected = [t.clone() for t in tensors]
    memory = DeviceMemory()
    memory.sleep(tensors, [])
    assert max(len(s.host) for s in memory._sleepers.values()) > 1
    memory.wake()
    assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))


def test_sleeping_or_waking_twice_changes_nothing():
    tensor = torch.randn(10)
    expected = tensor.clone()
    memory = DeviceMemory()
    assert memory.sleep([tensor], []) == 40
    assert memory.sleep([tensor], []) == 0
    assert memory.wake() == 40
    assert memory.wake() == 0
    assert torch.equal(tensor, expected)


def test_the_actor_sleeps_with_weights_and_optimizer_and_trains_on_as_if_it_never_slept(make_actor, rollout):
    rested, other = make_actor(), make_actor()
    trained = sum(p.numel() for p in rested._policy.trainable)
    for step in range(2):
        rested.update(step, rollout, ADVANTAGES)
        other.update(step, rollout, ADVANTAGES)
        assert rested.sleep() > 2.7 * 4 * trained  # weights, and two moments of almost all of them
        assert all(p.untyped_storage().nbytes() == 0 for p in rested._policy.module.parameters())
        rested.wake()
    pairs = zip(rested._policy.module.parameters(), other._policy.module.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_full_mode_publishes_every_weight_under_its_name_on_disk(make_actor, model_folder):
    from safetensors.torch import load_file

    on_disk = load_file(model_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    actor = make_actor(fsdp_activation_checkpointing=True)
    sent = dict(actor.wire_tensors())
    assert [(name, tuple(t.shape)) for name, t in sent.items()] == actor.wire_manifest_entries()
    assert sent.keys() == on_disk.keys()
    assert all(torch.equal(sent[name], on_disk[name]) for name in sent)


def test_adapter_mode_publishes_the_lora_tensors_alone(make_actor):
    actor = make_actor(**LORA, lora_adapter_mode=True)
    names = [name for name, _ in actor.wire_tensors()]
    assert names == [name for name, _ in actor.wire_manifest_entries()]
    assert len(names) == 2 * 8 * 2
    assert names[0] == "transformer_blocks.0.attn.to_q.lora_A.weight"
    assert all(".lora_A." in name or ".lora_B." in name for name in names)


def test_merge_mode_publishes_a_transformer_that_predicts_what_the_adapted_policy_does(
    make_actor, rollout, model_folder
):
    from diffusers import QwenImageTransformer2DModel

    actor = make_actor(**LORA, lora_merge_mode=True)
    for step in range(2):
        actor.update(step, rollout, ADVANTAGES)
    engine = QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")
    moved = dict(actor.wire_tensors())
    assert not torch.equal(
        moved["transformer_blocks.0.attn.to_q.weight"], engine.transformer_blocks[0].attn.to_q.weight
    )
    engine.load_state_dict(moved)
    replay = actor._replay(rollout, ADVANTAGES)
    batch = replay.batch([Transition(0, 0, 0), Transition(0, 1, 0)])
    with torch.no_grad():
        torch.testing.assert_close(
            replay.logp(engine, batch), replay.logp(actor._policy.module, batch), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_a_checkpoint_resumes_the_run_bit_for_bit(make_actor, rollout, settings):
    straight = make_actor(num_updates_per_batch=2, **settings)
    straight.update(0, rollout, ADVANTAGES)
    saved = straight.checkpoint_state()
    saved = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in saved.items()}
    steps = straight.lr_scheduler_steps
    straight.update(1, rollout, ADVANTAGES)
    resumed = make_actor(num_updates_per_batch=2, seed=99, **settings)
    resumed.load_checkpoint_state(saved)
    resumed.lr_scheduler_steps = steps
    resumed.update(1, rollout, ADVANTAGES)
    pairs = zip(straight._policy.module.parameters(), resumed._policy.module.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_lora_checkpoint_holds_the_adapter_alone_and_names_no_wrapper(make_actor):
    state = make_actor(fsdp_activation_checkpointing=True, **LORA).checkpoint_state()
    assert all(".lora_" in name and "default" not in name and "_checkpoint" not in name for name in state["model"])
    assert len(state["optimizer"]) == 3 * len(state["model"])


def test_a_checkpoint_of_another_rank_is_refused_before_anything_is_written(make_actor):
    actor = make_actor(**LORA)
    before = [p.detach().clone() for p in actor._policy.module.parameters()]
    with pytest.raises(CheckpointMismatch) as error:
        actor.load_checkpoint_state(make_actor(**(LORA | {"lora_rank": 2})).checkpoint_state())
    assert any("lora_A" in name for name in error.value.names)
    assert all(torch.equal(p, b) for p, b in zip(actor._policy.module.parameters(), before, strict=True))


def test_the_trainable_boundary_names_what_is_on_the_wrong_side():
    model = nn.ModuleDict({"to_q": nn.Linear(2, 2), "proj": nn.Linear(2, 2)})
    check_trainable_boundary(model, "full")
    model["proj"].requires_grad_(False)
    with pytest.raises(TrainableBoundaryError) as error:
        check_trainable_boundary(model, "full")
    assert error.value.wrong == ("proj.weight", "proj.bias")
    inject_lora(model, rank=2, alpha=2.0, targets=["to_q"])
    check_trainable_boundary(model, "lora")
    model["proj"].requires_grad_(True)
    with pytest.raises(TrainableBoundaryError) as error:
        check_trainable_boundary(model, "lora")
    assert error.value.wrong == ("proj.weight", "proj.bias")


def test_a_lora_target_that_no_layer_has_is_named(make_actor):
    with pytest.raises(TrainableBoundaryError) as error:
        make_actor(**LORA, lora_target_modules=("attn.to_q", "attn.to_z"))
    assert error.value.wrong == ("attn.to_z",)
