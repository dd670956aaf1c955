"""The verdict of an estimate: what fits, what is changed where it does not, and what the code itself would choose."""

import math
from dataclasses import replace

import pytest
from flowgrpo_fsdp_actor import ActorConfig, join
from flowgrpo_fsdp_actor.errors import ModelFolderError, TrainableBoundaryError
from flowgrpo_fsdp_actor.estimate import CARDS, SGLANG, ModelSize, RunShape, estimate_run
from flowgrpo_fsdp_actor.estimate.architecture import ATTENTION, Adapters
from flowgrpo_fsdp_actor.estimate.cards import GIB, H200, PROCESS_BYTES
from flowgrpo_fsdp_actor.estimate.memory import MemoryModel
from flowgrpo_fsdp_actor.estimate.speed import (
    _candidates,
    replay_seconds,
)
from flowgrpo_fsdp_actor.plan import evenly

from .full_size import LORA, QWEN_IMAGE, SAMPLING, memory_of

RECIPE = RunShape(world_size=1, groups=8, trained_steps=3, bucket_mb=2048, colocated_scorer=True)


def estimate(run=RECIPE, card=H200, **settings):
    common = {"model_path": "", "sampling": SAMPLING, "device": "cuda", "n_samples_per_prompt": 8}
    common |= {"replay_compile": False}
    return estimate_run(QWEN_IMAGE, ActorConfig(**(common | settings)), run, card)


def gib(found, phase):
    (one,) = (p for p in found.phases if p.name == phase)
    return one.total / GIB


def test_the_graphs_of_an_engine_of_one_card_take_as_much_as_a_forward():
    plain, graphs = (estimate(run=replace(RECIPE, cuda_graphs=on)) for on in (False, True))
    rows = SGLANG.candidates_per_forward
    forward = rows * QWEN_IMAGE.transformer.forward_bytes(576, RECIPE.text_tokens, dtype="bf16")
    assert gib(graphs, "rollout") - gib(plain, "rollout") == pytest.approx(forward / GIB)
    assert gib(estimate(run=replace(RECIPE, engine_gpus=2)), "rollout") < gib(plain, "rollout")


def test_an_automatic_join_fills_the_card_and_never_more():
    found = estimate(**LORA, fsdp_master_dtype="fp32")
    assert found.fits
    assert 0.8 * H200.memory < found.worst.total < H200.memory
    assert found.worst.name == "replay"
    assert found.remedies == []


def test_on_a_smaller_card_as_few_blocks_recompute_as_fill_the_gpu():
    """The rule of `choose_join`, asked of the code itself with the formulas' bytes in place of its probes."""
    a100 = CARDS["a100"]
    found = estimate(card=a100, **LORA)
    assert 0 < found.recomputed < 60
    assert gib(found, "replay") < a100.memory / GIB
    memory = memory_of(n_samples_per_prompt=8)
    memory.run, memory.card = RECIPE, a100
    kept, inputs = memory.row_bytes(0) - memory.row_bytes(1), memory.row_bytes(60) - memory.row_bytes(59)
    working = memory.row_bytes(60) - 60 * inputs - (kept + inputs)
    row = join.RowMemory(fixed=memory.gradients, inputs=inputs, activations=kept + inputs, blocks=60)
    taken = sum(memory.on_card) + memory.gathered() + memory.contexts
    free = join.MEMORY_SHARE * (a100.memory - taken) - 12 * working
    chosen = row.choose(free, 48, 12)
    assert abs(chosen.recomputed - found.recomputed) <= 1
    assert chosen.rows == 12
    assert found.join == 12


@pytest.mark.parametrize("gib", [100, 120, 140])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_under_fsdp2_the_plan_keeps_as_many_blocks_gathered_as_choose_join_would(gib, steps):
    """The rule of `RowMemory.choose`, asked with the formulas' bytes in place of its probes."""
    memory = memory_of(n_samples_per_prompt=8, world_size=2, fsdp_master_dtype="fp32")
    memory.run, memory.card = RunShape(world_size=2, groups=4, trained_steps=steps), replace(H200, memory=gib * GIB)
    taken = sum(memory.on_card) + memory.gathered() + memory.contexts
    block = memory.model.transformer.block_parameters * 2.0
    kept = memory.row_bytes(0, compiled=False) / 60
    row = join.RowMemory(fixed=memory.gradients, inputs=0.0, activations=kept, blocks=60)
    rows = memory.rows_of_update()
    chosen = row.choose(join.MEMORY_SHARE * (memory.card.memory - taken), rows, 12, units=join.Units(60, block))
    found = memory.join()
    assert (found.rows, found.recomputed) == (evenly(rows, math.ceil(rows / chosen.rows)), 0)
    assert found.gathered == chosen.gathered > 0
    kept, not_kept = (replay_seconds(memory, found.rows, 0, count) for count in (found.gathered, 0))
    assert kept < not_kept


def test_a_forward_that_is_too_large_is_refused_with_changes_that_each_fit():
    settings = LORA | {"replay_join": 64}
    found = estimate(**settings)
    assert not found.fits
    assert found.worst.name == "replay"
    changes = {remedy.change: remedy.peak for remedy in found.remedies}
    (joined,) = (int(change.split()[-1]) for change in changes if change.startswith("--replay-join"))
    assert estimate(**(settings | {"replay_join": joined})).fits
    assert not estimate(**(settings | {"replay_join": joined + 1})).fits
    checkpointed = estimate(**settings, fsdp_activation_checkpointing=True)
    assert checkpointed.fits
    assert changes["--fsdp-activation-checkpointing"] == checkpointed.worst.total


def test_what_spends_memory_on_time_is_named_where_it_fits_with_room_to_spare():
    """Two cards with 16 rows each: gathered once instead of twice, as two H200 were seen to be 10 % faster."""
    settings = LORA | {"fsdp_master_dtype": "fp32", "replay_join": 16, "replay_compile": True}
    two = replace(RECIPE, world_size=2)
    found = estimate(run=two, **settings)
    kept = estimate(run=two, **settings, fsdp_reshard_after_forward=False)
    (faster,) = found.speedups
    assert faster.change == "--no-fsdp-reshard-after-forward"
    assert (faster.peak, faster.seconds) == (kept.worst.total, sum(kept.seconds.values()))
    assert faster.seconds < sum(found.seconds.values())
    assert kept.speedups == []
    assert estimate(run=replace(RECIPE, world_size=1), **settings).speedups == []
    assert estimate(run=two, card=CARDS["a100"], **settings).speedups == []  # 41 GB more would not fit


def test_full_training_of_20_b_does_not_fit_one_card_and_says_how_many_it_takes():
    found = estimate(fsdp_activation_checkpointing=True)
    assert not found.fits
    assert [remedy.change for remedy in found.remedies] == ["2 cards (--resource)"]
    assert estimate(replace(RECIPE, world_size=2), fsdp_activation_checkpointing=True).fits


def test_what_sleeps_is_on_the_card_in_its_own_turn_only():
    both = estimate(**LORA, replay_join=8)
    actor_awake = estimate(replace(RECIPE, offload_train=False), **LORA, replay_join=8)
    engine_awake = estimate(replace(RECIPE, offload_rollout=False), **LORA, replay_join=8)
    weights = (QWEN_IMAGE.transformer.parameters + 188_743_680) * 2 / GIB
    moments = 2 * 188_743_680 * 2 / GIB
    frozen = (QWEN_IMAGE.text_encoder_parameters + QWEN_IMAGE.vae_parameters) * 2 / GIB
    assert gib(actor_awake, "rollout") - gib(both, "rollout") == pytest.approx(weights + moments)
    assert gib(engine_awake, "replay") - gib(both, "replay") == pytest.approx(weights + frozen)
    assert gib(engine_awake, "sync") - gib(both, "sync") == pytest.approx(frozen)
    assert (
        gib(both, "load") == gib(actor_awake, "load") == pytest.approx(2 * weights + frozen + 3 * PROCESS_BYTES / GIB)
    )
    assert both.host_bytes > actor_awake.host_bytes


def test_more_cards_hold_less_each_and_a_rollout_takes_less_time():
    found = [estimate(replace(RECIPE, world_size=n), **LORA, replay_join=8) for n in (1, 2, 4, 8)]
    adapters = 188_743_680 * 2 / GIB  # whole on every rank, with gradients and moments; the frozen base is sharded
    assert gib(found[3], "optimizer step") == pytest.approx(20_430_401_088 * 2 / 8 / GIB + 4 * adapters + 2.49)
    replay = [gib(e, "replay") for e in found]
    seconds = [sum(e.seconds.values()) for e in found]
    assert replay == sorted(replay, reverse=True)
    assert seconds == sorted(seconds, reverse=True)


def test_the_cards_of_an_engine_divide_what_sglang_divides():
    """Of a block's 36 d^2, 12 are modulations, whole on each card, and on two cards 8 of the text's MLP are, too."""
    net, adapters = QWEN_IMAGE.transformer, Adapters(rank=64, targets=ATTENTION)
    shares = [net.engine_rank_parameters(cards) / net.parameters for cards in (1, 2, 4)]
    assert shares == pytest.approx([1.0, 28 / 36, 18 / 36], abs=0.005)
    assert net.engine_rank_parameters(1, adapters) == net.parameters + net.adapter_parameters(adapters)
    lora = [net.engine_rank_parameters(n, adapters) - net.engine_rank_parameters(n) for n in (1, 2)]
    assert lora[1] == lora[0] * 3 // 4
    two = estimate(replace(RECIPE, world_size=2, engine_gpus=2), **LORA, replay_join=8)
    one = estimate(replace(RECIPE, world_size=2, cuda_graphs=False), **LORA, replay_join=8)  # two cards have none
    saved = (net.engine_rank_parameters(1, adapters) - net.engine_rank_parameters(2, adapters)) * 2 / GIB
    assert gib(one, "rollout") - gib(two, "rollout") == pytest.approx(saved)


def test_only_the_card_that_was_measured_says_so():
    assert [name for name, card in CARDS.items() if card.measured] == ["h200"]
    assert all(card.memory <= H200.memory and card.matmul <= H200.matmul for card in CARDS.values())


def test_a_folder_or_a_target_that_cannot_be_estimated_is_refused(tmp_path):
    with pytest.raises(ModelFolderError):
        ModelSize.from_folder(tmp_path)
    with pytest.raises(TrainableBoundaryError):
        estimate(**LORA, lora_target_modules=("attn.to_qq",))


@pytest.mark.parametrize(("groups", "drawn"), [(32, 32), (8, 8), (20, 24), (3, 8)])
def test_an_engine_draws_whole_groups(groups, drawn):
    """The trainer sends no group to two engines: `flowgrpo_trainer.fleet.calls_of`."""
    config = memory_of(n_samples_per_prompt=8).config
    assert _candidates(MemoryModel(QWEN_IMAGE, config, RunShape(world_size=8, groups=groups), H200)) == drawn
