"""Replay as it runs on a GPU: compiled blocks, bf16 over float32 masters, joined and padded rows; and sleep."""

from itertools import pairwise

import pytest
import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, join
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.plan import join_forwards
from flowgrpo_fsdp_actor.sleep import DeviceMemory
from flowgrpo_fsdp_actor.testing import draw_rollout, random_qwen_image, waits_for_the_gpu_raise
from flowgrpo_fsdp_actor.update import accumulate_gradients
from flowgrpo_rollout_sglang.config import SamplingConfig
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu
LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 16, "lora_alpha": 32.0, "lora_merge_mode": True}
SAMPLING = SamplingConfig(height=128, width=128, num_inference_steps=5, sde_indices=(1, 2), num_sde_steps=2)
TEXTS = (40, 64, 100)
"""Two buckets, and one length that fills its bucket."""


@pytest.fixture(scope="module")
def make_actor(tmp_path_factory):
    heads = {"num_attention_heads": 4, "attention_head_dim": 128, "joint_attention_dim": 256}
    folder = random_qwen_image(tmp_path_factory.mktemp("random"), num_layers=4, **heads)

    def make(**settings):
        common = {
            "model_path": str(folder),
            "model_adapter_path": "flowgrpo_fsdp_actor.testing.RandomQwenImage",
            "sampling": SAMPLING,
            "device": "cuda",
            "fsdp_master_dtype": "fp32",
            "n_samples_per_prompt": 4,
            "lr": 1e-3,
        }
        actor = FsdpActor(ActorConfig(**(common | LORA | settings)), 0, 1)
        for name, parameter in actor._policy.module.named_parameters():
            if ".lora_B." in name:  # 0 at the start, when nothing of the adapter could be wrong
                generator = torch.Generator("cuda").manual_seed(parameter.numel())
                parameter.data.normal_(0, 0.02, generator=generator)
        return actor

    return make


@pytest.fixture(scope="module")
def rollout(make_actor):
    actor = make_actor(replay_compile=False)
    return draw_rollout(
        actor._policy.module, actor._adapter, group_size=4, text_tokens=TEXTS, text_width=256, sampling=SAMPLING
    )


ADVANTAGES = torch.randn(len(TEXTS), 4, generator=torch.Generator().manual_seed(1))


def gradients(actor, rollout, rows):
    replay = actor._replay(rollout, ADVANTAGES)
    forwards = join_forwards(actor._plan(len(TEXTS), 4, num_updates=1)[0], replay.shapes, rows)
    accumulate_gradients(actor._policy, replay, forwards, None, actor.config, ReplayStatistics())
    # The last block's text goes nowhere: its gradients are zeros, or None where a graph leaves it out.
    grads = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in actor._policy.trainable])
    actor._policy.optimizer.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("rows", [8, 24])
def test_compiled_joined_and_padded_replay_gives_the_log_probs_of_the_eager_engine(make_actor, rollout, rows):
    """In bf16. An eps_clip of 1e-4 is of this size: it is the parity gate's bound, not the ratio's, which is exact."""
    worst = max(make_actor(replay_join=rows).replay_parity(rollout).values())
    print(f"|ratio - 1| {worst:.1e} at {rows} rows")
    assert worst < 2e-3


@pytest.mark.parametrize("settings", [{}, {"fsdp_activation_checkpointing": True}], ids=["kept", "checkpointed"])
def test_compiled_replay_gives_the_gradients_of_eager_replay_one_at_a_time(make_actor, rollout, settings):
    alone = gradients(make_actor(replay_compile=False), rollout, 1)
    joined = gradients(make_actor(**settings), rollout, 24)
    apart = float((joined - alone).norm() / alone.norm())
    print(f"gradients apart by {apart:.1e} of their norm")
    assert apart < 3e-2


@pytest.mark.parametrize("settings", [{}, {"fsdp_activation_checkpointing": True}], ids=["kept", "checkpointed"])
def test_a_compiled_anchor_is_its_own_forward_bit_for_bit(make_actor, rollout, settings):
    """`fsdp_debug_fingerprint` scores the first update explicitly too, and raises if one bit differs."""
    actor = make_actor(fsdp_debug_fingerprint=True, num_updates_per_batch=3, replay_join=8, lr=1e-30, **settings)
    metrics = actor.update(0, rollout, ADVANTAGES).metrics
    assert (metrics["train/ratio_min"], metrics["train/ratio_max"]) == (1.0, 1.0)


def test_forwards_and_backwards_of_an_update_never_wait_for_the_gpu(make_actor, rollout):
    """Padded rows too. A wait at each forward costs the GPU what the host needs to start the next: 40 ms of 660."""
    actor = make_actor()
    gradients(actor, rollout, 8)  # compiles, and pins what is pinned once
    replay = actor._replay(rollout, ADVANTAGES)
    forwards = join_forwards(actor._plan(len(TEXTS), 4, num_updates=1)[0], replay.shapes, 8)
    statistics = ReplayStatistics()
    with waits_for_the_gpu_raise():
        accumulate_gradients(actor._policy, replay, forwards, None, actor.config, statistics)
    assert statistics.reduced()["train/ratio_mean"] == 1.0


def test_a_run_with_texts_of_many_lengths_compiles_one_graph_for_each_bucket(make_actor):
    actor = make_actor(replay_join=8)
    torch._dynamo.reset()
    counters.clear()
    for lengths in ((5, 20, 64), (33, 40, 50), (70, 81, 128), (65, 100, 127)):
        rollout = draw_rollout(
            make_actor(replay_compile=False)._policy.module,
            actor._adapter,
            group_size=4,
            text_tokens=lengths,
            text_width=256,
            sampling=SAMPLING,
        )
        actor.update(0, rollout, ADVANTAGES)
    # 64 and 128 tokens, each with padding and (64, 128 themselves) without.
    assert counters["stats"]["unique_graphs"] <= 4


def test_full_fine_tuning_trains_compiled(make_actor, rollout):
    full = {"fsdp_trainable_mode": "full", "lora_rank": 0, "lora_alpha": 0.0, "lora_merge_mode": False}
    actor = make_actor(**full, lr=1e-5)
    first, second = (actor.update(i, rollout, ADVANTAGES).metrics for i in range(2))
    assert (first["train/ratio_min"], first["train/ratio_max"]) == (1.0, 1.0)
    assert first["train/optimizer_steps"] == second["train/optimizer_steps"] == 1


def test_rows_and_recomputed_blocks_are_chosen_by_the_memory_that_is_free(make_actor, rollout, monkeypatch):
    actor = make_actor(replay_compile=False)
    replay = actor._replay(rollout, ADVANTAGES)
    plan = actor._plan(len(TEXTS), 4, num_updates=1)
    blocks = actor._policy.blocks
    assert join.choose_join(actor._policy, replay, plan, actor.config).rows_of(replay, plan) == 24
    assert not any(block.recomputes for block in blocks)
    limits = (120e6, 60e6)
    chosen = []
    for limit in limits:
        monkeypatch.setattr(join, "_free_bytes", lambda limit=limit: limit)
        rows = join.choose_join(actor._policy, replay, plan, actor.config).rows_of(replay, plan)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(actor, rollout, rows)
        peak = torch.cuda.max_memory_allocated() - before
        chosen.append((rows, sum(block.recomputes for block in blocks)))
        print(f"{limit / 1e6:.0f} MB free: {chosen[-1]}, peak {peak / 1e6:.0f} MB")
        assert peak < 1.1 * limit
    assert all(a[0] > b[0] or a[1] < b[1] for a, b in pairwise([(24, 0), *chosen]))


def test_a_hundred_sleeps_give_back_the_same_memory_and_bring_back_the_same_bits():
    """Tensors too large for the gaps that earlier tests left in torch's cache: those are not given back."""
    trained = [torch.randn(1 << 26, device="cuda"), torch.randn(1000, device="cuda")]
    frozen = [torch.randn(1 << 27, device="cuda"), *(torch.randn(3000, device="cuda") for _ in range(50))]
    expected = [torch.empty_like(t) for t in (*trained, *frozen)]
    memory, left = DeviceMemory(), set()
    torch.cuda.empty_cache()
    awake, total = torch.cuda.mem_get_info()[0], sum(t.nbytes for t in (*trained, *frozen))
    for _ in range(100):
        trained[0] += 1.0
        for copy, tensor in zip(expected, (*trained, *frozen), strict=True):
            copy.copy_(tensor)
        memory.sleep(trained, frozen)
        torch.cuda.empty_cache()
        left.add(torch.cuda.mem_get_info()[0])
        memory.wake()
        assert all(torch.equal(t, e) for t, e in zip((*trained, *frozen), expected, strict=True))
    assert max(left) - min(left) <= 4 << 20
    assert min(left) - awake > 0.9 * total
