"""The estimate against what was measured, against torch's own counts, and against the code whose rules it repeats.

No constant of the memory formulas is fitted; those of the speed are, to the rows that `cards` names.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import flowgrpo_rollout_sglang
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from flowgrpo_fsdp_actor import gather, join
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.estimate import DIFFUSERS, SGLANG, ModelSize, RunShape
from flowgrpo_fsdp_actor.estimate.architecture import ATTENTION, Adapters, Transformer, _vae_parameters
from flowgrpo_fsdp_actor.estimate.cards import EAGER, GIB, H200
from flowgrpo_fsdp_actor.estimate.memory import AUTO_MEMORY_SHARE, AUTO_TOKENS, SYNC_CHUNK_BYTES, MemoryModel
from flowgrpo_fsdp_actor.estimate.speed import (
    anchor_seconds,
    engine_pace,
    pass_seconds,
    replay_seconds,
    waits_for_host,
)
from flowgrpo_fsdp_actor.lora import inject_lora
from flowgrpo_fsdp_actor.plan import plan_updates
from flowgrpo_rollout_sglang import diffusers_engine
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity
from torch.utils.flop_counter import FlopCounterMode

from .full_size import MASTERS, QWEN_IMAGE, RECOMPUTED, memory_of, recomputed

SHIPPED = Path(__file__).parents[3] / "apps/trainer/src/flowgrpo_trainer/assets/tiny-qwen-image"

# One H200, 2026-11-29, torch 2.11.0, diffusers 0.37.0 and peft: the full-size transformer, random weights, LoRA 64 in
# bf16, 384 x 384 and 128 text tokens; one forward and backward. (batch, checkpointed, compiled, ms, peak GiB)
MEASURED = [
    (1, True, False, 814, 38.9),
    (1, False, False, 534, 42.8),
    (4, True, False, 1228, 39.9),
    (4, True, True, 539, 39.9),
    (16, True, False, 1486, 44.0),
    (16, False, False, 967, 109.0),
    (16, True, True, 1021, 43.5),
    (1, False, True, 208, 41.8),
    (3, False, True, 337, 49.0),
    (16, False, True, 715, 93.6),
    (20, False, True, 887, 107.0),
    (32, True, True, 2048, 48.6),
]
FORWARDS = [(1, False, 6.5), (4, False, 18.2), (16, False, 37.3), (16, True, 48.8), (32, True, 50.0)]
"""The same, without gradients: (batch, compiled, forwards of one row a second)."""
OURS_IS_FASTER = 0.13
"""How far below plain diffusers' compiled blocks the estimate may be: it is that of the actor's own."""


def replay_gib(memory, rows):
    """Without AdamW, which the measurements did not have."""
    parts = memory.replay_peak(rows, forwards=1, recomputed=recomputed(memory))
    return (sum(parts.values()) - parts["AdamW"]) / GIB


# ---------------------------------------------------------------------- against the measurements


@pytest.mark.parametrize(("batch", "checkpointed", "compiled", "ms", "peak"), MEASURED)
def test_the_peak_of_replay_is_what_was_measured(batch, checkpointed, compiled, ms, peak):
    """Asked for: within 10 %. It is within 1 %, so a block's activations are right too, not the weights alone."""
    memory = memory_of(fsdp_activation_checkpointing=checkpointed, replay_compile=compiled)
    assert replay_gib(memory, batch) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("batch", "checkpointed", "compiled", "ms", "peak"), MEASURED)
def test_the_time_of_replay_is_what_was_measured(batch, checkpointed, compiled, ms, peak):
    """Full eager forwards within 10 %, most of them held out; compiled ones are ours, which are up to 11 % faster than
    these. Small compiled ones are compared with our own, below."""
    memory = memory_of(fsdp_activation_checkpointing=checkpointed, replay_compile=compiled)
    estimated = 1e3 * replay_seconds(memory, batch, recomputed(memory))
    if batch >= 16 and compiled:
        assert (1 - OURS_IS_FASTER) * ms < estimated < ms
    elif batch >= 16:
        assert estimated == pytest.approx(ms, rel=0.10)
    elif not compiled:
        assert estimated == pytest.approx(ms, rel=0.02 if batch == 1 else 0.31)


@pytest.mark.parametrize(("batch", "compiled", "per_second"), FORWARDS)
def test_a_forward_alone_takes_what_was_measured(batch, compiled, per_second):
    seconds = anchor_seconds(memory_of(replay_compile=compiled), batch)
    if compiled:
        assert per_second < batch / seconds < per_second / (1 - OURS_IS_FASTER)
    else:
        assert batch / seconds == pytest.approx(per_second, rel=0.25 if batch == 4 else 0.05)


# The actor at full size as below, few rows (`bench`'s replay_pace, OMP_NUM_THREADS=1), one H200, 2026-11-30: the host,
# which launches, decides. (rows, blocks that recompute, ms beside other work, ms alone)
FEW_ROWS = [
    (1, 0, 323.0, 270.1),
    (2, 0, 337.8, 360.2),
    (3, 0, 377.8, 329.7),
    (4, 0, 321.9, 304.9),
    (1, 60, 439.6, 569.2),
    (2, 60, 547.2, 521.9),
    (3, 60, 602.7, 493.8),
    (4, 60, 624.9, 490.7),
]
FEW_ANCHORS = [(1, 168.3, 118.7), (2, 119.1, 131.3), (3, 201.6, 141.1), (4, 132.6, 155.0)]
EIGHT_ROWS = [(0, 356.2, 334.1), (60, 585.5, 569.9)]


@pytest.mark.parametrize(("rows", "blocks", "one", "other"), FEW_ROWS)
def test_few_rows_take_what_the_host_takes_to_launch_them(rows, blocks, one, other):
    """Between the two measurements, with 13 % to either side: they differ by more. Fitted to the second ones."""
    memory = memory_of(**MASTERS, replay_compile=True)
    assert 0.87 * min(one, other) < 1e3 * replay_seconds(memory, rows, blocks) < 1.13 * max(one, other)
    assert waits_for_host(memory, rows, blocks)


@pytest.mark.parametrize(("rows", "one", "other"), FEW_ANCHORS)
def test_anchors_of_few_rows_too(rows, one, other):
    memory = memory_of(**MASTERS, replay_compile=True)
    assert 0.87 * min(one, other) < 1e3 * anchor_seconds(memory, rows) < 1.13 * max(one, other)


@pytest.mark.parametrize(("blocks", "one", "other"), EIGHT_ROWS)
def test_eight_rows_take_what_was_measured_of_them(blocks, one, other):
    """Held out. The arithmetic takes little longer than the launches."""
    memory = memory_of(**MASTERS, replay_compile=True)
    seconds = replay_seconds(memory, 8, blocks)
    assert 1e3 * seconds == pytest.approx(one, rel=0.10)
    assert 1e3 * seconds == pytest.approx(other, rel=0.10)
    assert not waits_for_host(memory, 16, blocks)


# The actor itself, the same H200, 2026-11-30, eager: 12 of the 60 blocks, 384 x 384, 128 text tokens, 32 transitions
# in an update, peak of the third update. (settings, blocks' rows in a forward, forwards, peak GiB)
FULL = {"fsdp_trainable_mode": "full", "lora_rank": 0, "lora_alpha": 0.0, "lora_adapter_mode": False}
MEASURED_ACTOR = [
    (MASTERS, 16, 2, 22.83),
    (MASTERS | RECOMPUTED, 16, 2, 10.70),
    (MASTERS, 32, 1, 37.20),
    (FULL, 8, 4, 41.83),
    (FULL | RECOMPUTED, 8, 4, 31.73),
    (FULL | MASTERS | RECOMPUTED, 8, 4, 64.04),
]


@pytest.mark.parametrize(("settings", "rows", "forwards", "peak"), MEASURED_ACTOR)
def test_the_peak_of_the_actor_is_what_was_measured(settings, rows, forwards, peak):
    """Nothing was fitted to it: within 3.4 %, and 0.3 % with LoRA."""
    memory = memory_of(**settings)
    memory.model = replace(QWEN_IMAGE, transformer=replace(QWEN_IMAGE.transformer, blocks=12))
    memory = MemoryModel(memory.model, memory.config, memory.run, H200)
    found = sum(memory.replay_peak(rows, forwards=forwards, recomputed=recomputed(memory)).values()) / GIB
    assert found == pytest.approx(peak, rel=0.01 if memory.config.is_lora else 0.035)


# The actor at full size, the same H200, 2026-11-30: LoRA 64 over fp32 masters, compiled blocks, 16 rows, forward and
# backward without an optimizer. (blocks that recompute, ms, peak GiB). The first was fitted to; the second is from
# before the heads' kernels, which took 662 and 351 ms (anchors) to 645 and 298.
MEASURED_FULL_SIZE = [(0, 645.4, 94.3), (20, 768, 77.2), (60, 923.7, 43.8)]


@pytest.mark.parametrize(("blocks", "ms", "peak"), MEASURED_FULL_SIZE)
def test_the_full_size_actor_takes_what_was_measured(blocks, ms, peak):
    memory = memory_of(**MASTERS, replay_compile=True)
    parts = memory.replay_peak(16, forwards=1, recomputed=blocks)
    assert (sum(parts.values()) - parts["AdamW"]) / GIB == pytest.approx(peak, rel=0.01)
    assert 1e3 * replay_seconds(memory, 16, blocks) == pytest.approx(ms, rel=0.10)
    assert 1e3 * anchor_seconds(memory, 16) == pytest.approx(297.6, rel=0.01)


@pytest.mark.parametrize(("kept", "ms"), [(False, 782.8), (False, 770.3), (True, 702.3), (True, 704.7)])
def test_two_cards_replay_compiled_in_the_time_that_was_measured(kept, ms):
    """Two H200, 2026-11-30, 16 rows on each, weights gathered again for the backward or kept; held out."""
    memory = memory_of(**MASTERS, world_size=2, replay_compile=True, fsdp_reshard_after_forward=not kept)
    assert 1e3 * replay_seconds(memory, 16, 0) == pytest.approx(ms, rel=0.035)


def test_two_cards_under_fsdp2_take_what_was_measured():
    """Two H200, same day, eager: 91.5 GiB and 14.3 transitions/s a card at 16; 9.6 with checkpointing."""
    plain = memory_of(world_size=2)
    checkpointed = memory_of(world_size=2, fsdp_activation_checkpointing=True)
    assert replay_gib(plain, 16) == pytest.approx(91.5, rel=0.01)
    assert 16 / replay_seconds(plain, 16, 0) == pytest.approx(14.3, rel=0.10)
    assert 16 / replay_seconds(checkpointed, 16, 60) == pytest.approx(9.6, rel=0.10)


@pytest.mark.parametrize(("layers", "candidates", "ms"), [(60, 16, 236.7), (60, 32, 462), (12, 16, 45.6), (12, 1, 5.7)])
def test_the_server_draws_at_the_pace_that_was_measured(layers, candidates, ms):
    """A forward at 11 text tokens as a CUDA graph; of 60 layers a twelfth of a request, less 0.07 s that are
    not steps (of 2.91 and 5.61 s)."""
    memory = memory_of()
    memory.run = replace(memory.run, text_tokens=11)
    memory.model = replace(QWEN_IMAGE, transformer=replace(QWEN_IMAGE.transformer, blocks=layers))
    seconds = pass_seconds(memory, engine_pace(memory.run), candidates, backward=False)
    assert 1e3 * seconds == pytest.approx(ms, rel=0.10)


def test_a_server_without_graphs_is_as_fast_as_its_host_for_few_candidates():
    """One candidate through 12 layers took 19 to 39 ms in plain launches."""
    memory = memory_of()
    memory.model = replace(QWEN_IMAGE, transformer=replace(QWEN_IMAGE.transformer, blocks=12))
    for run in (replace(memory.run, cuda_graphs=False), replace(memory.run, engine_gpus=2)):
        assert 19e-3 < pass_seconds(memory, engine_pace(run), 1, backward=False) < 39e-3
    assert engine_pace(replace(memory.run, engine=DIFFUSERS)) == EAGER


# ---------------------------------------------------------------------- against torch's own counts


def test_the_full_size_model_has_the_parameters_that_were_counted():
    net = QWEN_IMAGE.transformer
    assert net.parameters == 20_430_401_088  # 40.86 GB in bf16
    assert net.adapter_parameters(Adapters(rank=64, targets=ATTENTION)) == 188_743_680  # 377.5 MB


def test_parameters_of_a_folder_are_those_of_its_weight_files():
    from safetensors import safe_open

    size = ModelSize.from_folder(SHIPPED)
    counted = {}
    for part in ("transformer", "text_encoder", "vae"):
        (path,) = (SHIPPED / part).glob("*.safetensors")
        with safe_open(path, "pt") as file:
            counted[part] = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert size.transformer.parameters == counted["transformer"]
    assert size.text_encoder_parameters == counted["text_encoder"]
    assert size.vae_parameters == counted["vae"]


def test_the_real_vae_has_the_parameters_of_the_formula():
    """With its upsampling in time, which the shipped one lacks."""
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage()
    assert sum(p.numel() for p in vae.parameters()) == sum(_vae_parameters({}))


IMAGE, TEXT, ROWS, RANK = (12, 12), 32, 3, 16
SMALL = {"num_attention_heads": 4, "attention_head_dim": 64, "joint_attention_dim": 128, "axes_dims_rope": (16, 24, 24)}


def small_model(layers, *, lora, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = QwenImageTransformer2DModel(num_layers=layers, **SMALL).to(torch.bfloat16)
        if lora:
            inject_lora(model, rank=RANK, alpha=RANK, targets=ATTENTION)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and device == "cpu":
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.weight = torch.nn.Parameter(torch.randn(parameter.shape, dtype=torch.bfloat16))
    return model, Transformer.from_config({**model.config, "_class_name": "QwenImageTransformer2DModel"}, "")


def forward(model, device):
    rows, columns = IMAGE
    x, sigma = torch.randn(ROWS, rows * columns, 64, device=device), torch.full((ROWS,), 0.5, device=device)
    text = torch.randn(ROWS, TEXT, 128, device=device)
    return qwen_image_velocity(model, x, sigma, text, None, 16 * rows, 16 * columns, 8)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_block_saves_for_its_backward_what_autograd_saves(lora):
    """Eager, bf16, counted with saved-tensor hooks: each storage once, parameters not at all."""

    def saved(layers):
        model, net = small_model(layers, lora=lora, device="cpu")
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward(model, "cpu")
        assert out.grad_fn is not None
        return sum(storage.nbytes() for storage in kept.values()), net

    (small, net), (large, _) = saved(1), saved(3)
    adapters = Adapters(rank=RANK, targets=ATTENTION) if lora else Adapters()
    tokens = IMAGE[0] * IMAGE[1]
    formula = ROWS * net.saved_bytes(tokens, TEXT, adapters, full=not lora, compiled=False, dtype="bf16")
    assert (large - small) / 2 == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_arithmetic_is_what_torch_counts(lora):
    """Per block, on the meta device, where attention's backward does not compute its scores again: 2, not 2.5."""

    def counted(layers):
        model, net = small_model(layers, lora=lora, device="meta")
        with FlopCounterMode(display=False) as ahead:
            out = forward(model, "meta")
        with FlopCounterMode(display=False) as back:
            out.sum().backward()
        return ahead.get_total_flops(), back.get_total_flops(), net

    (ahead_2, back_2, two), (ahead_3, back_3, three) = counted(2), counted(3)
    adapters = Adapters(rank=RANK, targets=ATTENTION) if lora else Adapters()
    sizes = (IMAGE[0] * IMAGE[1], TEXT, adapters)
    again = 0.5 * 4.0 * (sizes[0] + TEXT) ** 2 * two.width
    ahead = three.forward_flops(*sizes) - two.forward_flops(*sizes)
    back = three.backward_flops(*sizes, full=not lora) - two.backward_flops(*sizes, full=not lora) - again
    assert ahead_3 - ahead_2 == pytest.approx(ROWS * ahead, rel=1e-6)
    # The modulation layers see what needs no gradient under LoRA; they are a hundredth of a block's work.
    assert back_3 - back_2 == pytest.approx(ROWS * back, rel=0.02)


# ---------------------------------------------------------------------- against the code whose rules it repeats


def test_what_the_estimate_repeats_is_what_the_code_does():
    sampler = (Path(flowgrpo_rollout_sglang.__path__[0]) / "server/sampler.py").read_text()
    constants = {name: int(value) for name, value in re.findall(r"^([A-Z_]+) = (\d+)$", sampler, re.MULTILINE)}
    assert AUTO_MEMORY_SHARE == join.MEMORY_SHARE
    assert AUTO_TOKENS == join.CUDA_TOKENS
    assert SYNC_CHUNK_BYTES == gather.CHUNK_BYTES
    assert QwenImageAdapter.lora_target_modules == ATTENTION
    assert DIFFUSERS.candidates_per_forward == diffusers_engine.CANDIDATES["cuda"]
    assert DIFFUSERS.decoded_at_once == diffusers_engine.DECODED_AT_ONCE
    assert SGLANG.candidates_per_forward == constants["DEFAULT_CANDIDATES"]
    assert SGLANG.decoded_at_once == constants["DECODE_AT_ONCE"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("candidates", [3, 8])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_rank_replays_as_many_rows_as_the_plan_gives_it(world_size, candidates, updates):
    plan = plan_updates(4, candidates, rank=0, world_size=world_size, num_updates=updates, micro_batch_size=1)
    memory = memory_of(n_samples_per_prompt=candidates, num_updates_per_batch=updates)
    memory.run = RunShape(world_size=world_size, groups=4, trained_steps=3)
    assert memory.rows_of_update() == 3 * sum(len(batch.candidates) for batch in plan[0])
