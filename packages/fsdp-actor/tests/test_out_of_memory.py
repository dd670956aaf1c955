"""Out of memory names the phase, the rank, the bytes and what to lower, in every phase of the actor."""

import pickle
from contextlib import contextmanager, suppress

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, load_adapter
from flowgrpo_fsdp_actor.errors import OutOfDeviceMemory
from flowgrpo_fsdp_actor.out_of_memory import GATHER, LOADING, OPTIMIZER, PARITY, REPLAY, WAKE
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_rollout, tiny_qwen_image

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_adapter_mode": True}
ADVANTAGES = torch.tensor([[1.0, -1.0], [0.5, -0.5]])
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 139.30 GiB memory in use."
)


def fail(*_, **__):
    raise torch.OutOfMemoryError(TORCH_SAYS)


@pytest.fixture(scope="module")
def rollout(model_folder):
    engine = QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")
    adapter = load_adapter(ActorConfig(model_path="").model_adapter_path, str(model_folder))
    return draw_rollout(engine, adapter, group_size=2, text_tokens=(7, 7))


@pytest.fixture
def actor(model_folder):
    return make_actor(model_folder)


def make_actor(folder, **settings):
    common = {"fsdp_param_dtype": "fp32", "n_samples_per_prompt": 2, "sampling": SAMPLING}
    common |= {"replay_compile": False}
    return FsdpActor(ActorConfig(model_path=str(folder), **(common | LORA | settings)), 0, 1)


def break_forward(actor):
    actor._policy.module.get_submodule("transformer_blocks.1").register_forward_hook(fail)


def break_backward(actor):
    actor._policy.module.get_submodule("transformer_blocks.1").register_full_backward_pre_hook(fail)


def break_step(actor):
    actor._policy.optimizer.register_step_pre_hook(fail)


def break_gather(actor):
    actor._publisher._wire_name = fail


def break_wake(actor):
    actor.sleep()
    actor._memory.wake = fail


@pytest.mark.parametrize(
    ("phase", "broken", "call", "remedy"),
    [
        (REPLAY, break_forward, "update", "--replay-join"),
        (REPLAY, break_backward, "update", "--fsdp-activation-checkpointing"),
        (OPTIMIZER, break_step, "update", "--lora-rank"),
        (PARITY, break_forward, "replay_parity", "--replay-join"),
        (GATHER, break_gather, "wire_tensors", "--weight-sync-bucket-size-mb"),
        (WAKE, break_wake, "wake", "--offload-rollout"),
    ],
    ids=["forward", "backward", "optimizer", "parity", "gather", "wake"],
)
def test_out_of_memory_says_phase_rank_bytes_and_what_to_lower(actor, rollout, phase, broken, call, remedy):
    broken(actor)
    arguments = {"update": (0, rollout, ADVANTAGES), "replay_parity": (rollout,)}.get(call, ())
    with pytest.raises(OutOfDeviceMemory) as caught:
        for _ in getattr(actor, call)(*arguments) or ():
            pass
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.phase, error.rank) == (phase, 0)
    assert (error.asked, error.free) == (int(2.5 * 2**30), 2**29)
    assert remedy in error.lower
    assert all(words in str(error) for words in (phase, "rank 0", "2.50 GiB", "0.50 GiB", remedy))


def test_out_of_memory_while_loading_says_so(model_folder, monkeypatch):
    monkeypatch.setattr("flowgrpo_fsdp_actor.actor.build_policy", fail)
    with pytest.raises(OutOfDeviceMemory) as caught:
        make_actor(model_folder)
    assert caught.value.phase == LOADING


@pytest.mark.gpu
@pytest.mark.parametrize("phase", [REPLAY, WAKE])
def test_a_card_that_is_really_full_says_phase_bytes_and_what_to_lower(tmp_path, phase):
    """Other tensors take all of the card: the replay, or the waking weights, find no room."""
    folder = tiny_qwen_image(tmp_path, dtype=torch.bfloat16, num_layers=8)
    actor = make_actor(folder, device="cuda", fsdp_param_dtype="bf16", replay_join=48, n_samples_per_prompt=8)
    policy = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    rollout = draw_rollout(policy, actor._adapter, group_size=8, text_tokens=(400, 400))
    if phase == WAKE:
        actor.sleep()
    calls = {REPLAY: lambda: actor.update(0, rollout, torch.randn(2, 8)), WAKE: actor.wake}
    with the_card_full(), pytest.raises(OutOfDeviceMemory) as caught:
        calls[phase]()
    error = caught.value
    assert (error.phase, error.rank) == (phase, 0)
    assert error.asked > 0
    assert error.free < 16 << 20  # what the driver calls free is not all to be had
    assert error.lower


@contextmanager
def the_card_full():
    """Takes all memory of the card: pieces that torch asks the driver for, then the gaps in what torch has cached."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = []
    for size in (free - (256 << 20), 20 << 20, 1 << 19, 1 << 14, 512):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.empty_cache()
