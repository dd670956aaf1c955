"""Seconds of one rollout: arithmetic at the paces of `cards`, copies at the rates of the card.

A pass takes as long as the longer of its arithmetic and its launches, nearly: the card decides in large forwards, the
host that launches in small ones (`Pace.blend`). Against what was held out it is within 8 % for compiled forwards of 8
rows and more, on one card and two, and for the server; 10 % low for eager ones of 16 with checkpointing. Forwards of
1 to 4 rows are as fast as the host, whose own times differed by up to 40 % from run to run.

Left out, because nothing was measured or it is not the trainer's: scoring, text encoding, writing sidecars and
checkpoints, start-up, compilation, and what FSDP2 copies on one card for masters in another dtype (a full training of
4.1 B parameters over fp32 masters took 1.57 s where this says 0.83; LoRA does not feel it).
"""

from math import ceil

from flowgrpo_fsdp_actor.estimate.architecture import DTYPE_BYTES
from flowgrpo_fsdp_actor.estimate.cards import COMPILED, EAGER, GB, GRAPHED, H200, Pace
from flowgrpo_fsdp_actor.estimate.memory import MemoryModel, RunShape

PAGEABLE_TO_HOST, PAGEABLE_TO_DEVICE = 1.1 * GB, 4.2 * GB
"""Stock SGLang's `module.to`, 7.6 GB in 7.0 s and back in 1.8 s on the H200: what `DiffusersEngine` does too."""
DECODE_S = 3.4e-3 / (384 * 384 * 96)
"""Of a pixel and a channel of the VAE's largest maps: 54 ms for 16 pictures of 384 x 384 in the SGLang server, H200,
2026-11-30. `DiffusersEngine`, whose VAE has no fused norms, was not timed."""
WIRE = 40.9 * GB / 0.092
"""Weight sync between two processes of one card, verified: 40.9 GB in 92 ms in 512 MB buckets, H200."""
WIRE_FLOOR_S = 0.01
"""An adapter of 377 MB took 10.5 ms."""


def pass_seconds(memory: MemoryModel, pace: Pace, rows: int, *, recomputed: int = 0, backward: bool = True) -> float:
    """One forward with `rows` rows, and its backward, in which `recomputed` blocks run again."""
    work, launches = _work_and_launches(memory, pace, rows, recomputed, backward)
    return (work**pace.blend + launches**pace.blend) ** (1.0 / pace.blend)


def _work_and_launches(
    memory: MemoryModel, pace: Pace, rows: int, recomputed: int, backward: bool
) -> tuple[float, float]:
    """Seconds of the card for the arithmetic of a pass, and of the host to launch it."""
    net, config, run = memory.model.transformer, memory.config, memory.run
    faster = memory.card.matmul / H200.matmul
    ahead = net.forward_flops(memory.image, run.text_tokens, memory.adapters) / pace.forward
    back = net.backward_flops(memory.image, run.text_tokens, memory.adapters, full=not config.is_lora) / pace.backward
    work = rows * ((1.0 + recomputed / net.blocks) * ahead + backward * back) / faster
    launches = net.blocks * (pace.launch_forward + backward * pace.launch_backward) + recomputed * pace.launch_again
    return work, launches


def waits_for_host(memory: MemoryModel, rows: int, recomputed: int) -> bool:
    """Whether a replay forward of `rows` rows takes longer to launch than to compute."""
    work, launches = _work_and_launches(memory, _replay_pace(memory), rows, recomputed, backward=True)
    return launches > work


def _replay_pace(memory: MemoryModel) -> Pace:
    return COMPILED if memory.config.replay_compile else EAGER


def engine_pace(run: RunShape) -> Pace:
    """Of the engine's forwards."""
    if not run.engine.compiled:
        return EAGER
    return GRAPHED if run.engine.graphs and run.cuda_graphs and run.engine_gpus == 1 else COMPILED


def replay_seconds(memory: MemoryModel, rows: int, recomputed: int, gathered: int = 0) -> float:
    """Forward and backward of one joined forward, with what FSDP2 gathers for it: all blocks for the forward, and those
    that did not stay `gathered` for the backward.

    On two H200 the gathers added to the time instead of hiding behind it: 967 + 2 x 75 ms were 1119 ms in truth.
    """
    config = memory.config
    seconds = pass_seconds(memory, _replay_pace(memory), rows, recomputed=recomputed)
    again = 1.0 - gathered / memory.model.transformer.blocks
    gathers = 1.0 + (again if config.fsdp_reshard_after_forward else 0.0)
    if not config.is_lora:
        gathers += 2 if config.fsdp_reduce_dtype == "fp32" else 1  # the gradients' reduction moves as much, or twice
    return seconds + gathers * gather_seconds(memory)


def anchor_seconds(memory: MemoryModel, rows: int) -> float:
    """One forward without gradients, for the anchors of the updates after the first."""
    seconds = pass_seconds(memory, _replay_pace(memory), rows, backward=False)
    return seconds + gather_seconds(memory)


def gather_seconds(memory: MemoryModel) -> float:
    return memory.gathered_gb() * GB / memory.card.gather


def rollout_seconds(memory: MemoryModel) -> dict[str, float]:
    """Seconds of each part of one rollout, on the card that has most to do."""
    config = memory.config
    rows, join = memory.rows_of_update(), memory.join()
    per_update = ceil(rows / join.rows)
    seconds = replay_seconds(memory, join.rows, join.recomputed, join.gathered)
    replay = config.num_updates_per_batch * per_update * seconds
    anchored = config.num_updates_per_batch - (0 if config.fsdp_debug_fingerprint else 1)
    anchors = anchored * per_update * anchor_seconds(memory, join.rows)
    moved = memory.trained_here * 7.0 * DTYPE_BYTES[config.master_dtype]  # 4 read, 3 written
    return {
        "sampling": _sampling(memory),
        "decoding": _decoding(memory),
        "replay": replay,
        "anchors": anchors,
        "optimizer": config.num_updates_per_batch * moved / memory.card.copy,
        "sleep and wake": _sleeping(memory),
        "sync": _sync(memory),
    }


def _candidates(memory: MemoryModel) -> int:
    """Of the engine that draws most, in a rollout: an engine draws whole groups."""
    engines = max(1, memory.run.world_size // memory.run.engine_gpus)
    return ceil(memory.run.groups / engines) * memory.config.n_samples_per_prompt


def _decoding(memory: MemoryModel) -> float:
    sampling = memory.config.sampling
    cells = sampling.height * sampling.width * memory.model.vae_channels
    return _candidates(memory) * cells * DECODE_S * H200.copy / memory.card.copy


def _sampling(memory: MemoryModel) -> float:
    run, config, candidates = memory.run, memory.config, _candidates(memory)
    rows = min(run.engine_rows, candidates)
    forward = pass_seconds(memory, engine_pace(run), rows, backward=False)
    return ceil(candidates / rows) * config.sampling.num_inference_steps * forward


def _sleeping(memory: MemoryModel) -> float:
    """`colocation`: the engine wakes whole, sleeps, wakes its transformer for the sync, and sleeps."""
    run, card = memory.run, memory.card
    seconds = 0.0
    if run.offload_train:
        trained = memory.trained_here * 3.0 * DTYPE_BYTES[memory.config.master_dtype]
        seconds += (memory.weights + memory.moments) / card.host_to_device + trained / card.device_to_host
    if run.offload_rollout:
        transformer, frozen = memory.engine_transformer, memory.engine_frozen
        up, down = 2 * transformer + frozen, 2 * transformer + frozen
        if run.engine.pinned:  # what nobody wrote since the last sleep is not copied out again
            synced = 0.0 if memory.config.lora_adapter_mode else transformer
            seconds += up / card.host_to_device + synced / card.device_to_host
        else:
            seconds += up / PAGEABLE_TO_DEVICE + down / PAGEABLE_TO_HOST
    return seconds


def _sync(memory: MemoryModel) -> float:
    sent = memory.adapter_elements if memory.config.lora_adapter_mode else memory.model.transformer.parameters
    gathered = gather_seconds(memory) if not memory.config.lora_adapter_mode else 0.0
    return max(WIRE_FLOOR_S, sent * 2.0 / WIRE) + gathered
