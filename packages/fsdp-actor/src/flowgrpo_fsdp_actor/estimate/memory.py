"""Peak memory of one card in each phase: which tensors are on it, by formula.

Actor and engine share the card (S2): each phase counts both. The actor's own numbers are those of `sharding`
(what is stored), `update` (what a backward adds), `sleep` (what leaves) and `publish` (what a sync gathers).
"""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.estimate.architecture import ATTENTION, DTYPE_BYTES, Adapters, ModelSize
from flowgrpo_fsdp_actor.estimate.cards import GB, PROCESS_BYTES, Card
from flowgrpo_fsdp_actor.plan import Join, Units, evenly, join_of_memory, local_candidates

AUTO_MEMORY_SHARE = 0.85
"""Of the free memory that an automatic `replay_join` fills: `join.MEMORY_SHARE`, which a test holds equal."""
AUTO_TOKENS = 8192
"""What fills a GPU, so that fewer rows make blocks recompute: `join.CUDA_TOKENS`, which a test holds equal."""
SYNC_CHUNK_BYTES = 1 << 30
"""Of whole tensors in one gather for the sync: `gather.CHUNK_BYTES`, which a test holds equal."""
GATHERED_BLOCKS = 3
"""Blocks that FSDP2 holds whole at a time: the one that computes, the one that is prefetched, and its copy out."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What an engine does when its settings do not say. Values of `DiffusersEngine` and of the server's sampler."""

    candidates_per_forward: int
    decoded_at_once: int
    pinned: bool
    """Sleeps through page-locked memory."""
    compiled: bool
    """Runs forwards at the pace of compiled blocks."""
    graphs: bool
    """Replays forwards as CUDA graphs, where one card holds the transformer."""


# The server: 5.3 images a second of engine time were scaled up from 12 of 60 layers (11 text tokens, 12 steps), which
# is 530 TFLOP/s: the pace of compiled blocks, 500, is 6 % below it.
SGLANG = EngineKind(candidates_per_forward=32, decoded_at_once=16, pinned=True, compiled=True, graphs=True)
DIFFUSERS = EngineKind(candidates_per_forward=16, decoded_at_once=32, pinned=False, compiled=False, graphs=False)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What an estimate needs beside the actor's config: how many cards, how much work, and whose turn it is."""

    world_size: int = 1
    groups: int = 1
    """Prompts of a rollout."""
    trained_steps: int = 1
    text_tokens: int = 128
    """Assumed of every prompt: the true lengths are known when the engine has encoded them."""
    engine: EngineKind = SGLANG
    engine_gpus: int = 1
    """Cards of one engine, which divide its transformer; the other parts are counted whole on each."""
    engine_dtype: str = "bf16"
    candidates_per_forward: int | None = None
    cuda_graphs: bool = True
    bucket_mb: int = 512
    offload_train: bool = True
    offload_rollout: bool = True
    colocated_scorer: bool = False

    @property
    def engine_rows(self) -> int:
        return self.candidates_per_forward or self.engine.candidates_per_forward


@dataclass(frozen=True)
class Phase:
    """One phase's bytes on the card, by what holds them."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class MemoryModel:
    """The card's memory under one recipe. Everything is bytes of one card."""

    def __init__(self, model: ModelSize, config: ActorConfig, run: RunShape, card: Card):
        self.model, self.config, self.run, self.card = model, config, run, card
        net, sampling = model.transformer, config.sampling
        self.adapters = Adapters()
        if config.is_lora:
            self.adapters = Adapters(rank=config.lora_rank, targets=config.lora_target_modules or ATTENTION)
        self.image = model.image_tokens(sampling.height, sampling.width)
        self.adapter_elements = net.adapter_parameters(self.adapters)
        self.trained = self.adapter_elements if config.is_lora else net.parameters
        self.frozen = net.parameters if config.is_lora else 0
        self._compute, self._master = DTYPE_BYTES[config.fsdp_param_dtype], DTYPE_BYTES[config.master_dtype]
        self.sharded = run.world_size > 1

    # ------------------------------------------------------------------ the actor at rest

    @property
    def trained_here(self) -> float:
        """Trained elements of one rank: its shard of a whole model; adapters are whole on every rank (`sharding`)."""
        return self.trained / (1 if self.config.is_lora else self.run.world_size)

    @property
    def weights(self) -> float:
        """This rank's shard of the frozen weights in the compute dtype, and its trained ones in the master dtype."""
        return self.frozen * self._compute / self.run.world_size + self.trained_here * self._master

    @property
    def moments(self) -> float:
        """AdamW's two, in the master dtype."""
        return 2.0 * self.trained_here * self._master

    @property
    def on_card(self) -> tuple[float, float]:
        """(weights, moments) that stay on the card while training; `fsdp_cpu_offload` keeps both on the host."""
        return (0.0, 0.0) if self.config.fsdp_cpu_offload else (self.weights, self.moments)

    @property
    def gradients(self) -> float:
        """Of one update, in the master dtype; a whole model's are reduced to shards block by block."""
        return 0.0 if self.config.fsdp_cpu_offload else self.trained_here * self._master

    @property
    def in_units(self) -> bool:
        """Whether FSDP2 holds the model (`sharding.is_sharded`)."""
        lone = self.config.master_dtype != self.config.fsdp_param_dtype or self.config.fsdp_cpu_offload
        return self.sharded or (lone and not self.config.is_lora)

    def gathered(self, kept: int = 0) -> float:
        """What FSDP2 holds in the compute dtype beside the shards, where the last `kept` blocks stay gathered."""
        config, net = self.config, self.model.transformer
        if not self.in_units:
            return 0.0
        whole = float(net.parameters * self._compute)
        if self.sharded and not config.fsdp_reshard_after_forward:
            return whole
        reduced = 0.0 if config.is_lora else net.block_parameters * DTYPE_BYTES[config.fsdp_reduce_dtype]
        return whole * min(1.0, (GATHERED_BLOCKS + kept) / net.blocks) + reduced

    def cast_adapters(self, recomputed: int) -> float:
        """A and B in the compute dtype, which blocks that keep their activations keep too (`lora.Factor`)."""
        if not self.config.is_lora or self.config.master_dtype == self.config.fsdp_param_dtype:
            return 0.0
        blocks = self.model.transformer.blocks
        return self.trained * self._compute * max(1, blocks - recomputed) / blocks

    # ------------------------------------------------------------------ replay

    def row_bytes(self, recomputed: int, *, blocks: int | None = None, compiled: bool | None = None) -> float:
        """What one more row of a forward adds to the peak of its backward, `recomputed` of `blocks` recomputing.

        The blocks that keep are the last ones (`recompute`), so the peak is where the backward begins. Blocks made for
        compilation keep as much where they run eagerly, in the probes of `join`: their norms make no copies there.
        """
        net, config, image, text = self.model.transformer, self.config, self.image, self.run.text_tokens
        blocks = net.blocks if blocks is None else blocks
        compiled = config.replay_compile if compiled is None else compiled
        dtype = config.fsdp_param_dtype
        own, full = config.replay_compile, not config.is_lora
        kept = net.saved_bytes(image, text, self.adapters, full=full, compiled=own, dtype=dtype)
        working = net.backward_bytes(image, text, compiled=compiled, dtype=dtype)
        return recomputed * net.input_bytes(image, text, dtype=dtype) + max(1, blocks - recomputed) * kept + working

    def replay_peak(self, rows: int, *, forwards: int, recomputed: int, gathered: int = 0) -> dict[str, float]:
        """The actor alone, in the worst moment of a backward; of the blocks, `gathered` stayed so since their forward.

        An update's first forward begins its backward without gradients and ends it without activations: they do
        not add up, unless an earlier forward of the same update has left its gradients.
        """
        weights, moments = self.on_card
        activations, gradients = rows * self.row_bytes(recomputed), self.gradients
        if forwards == 1:
            first_block = rows * self.row_bytes(min(recomputed, 1), blocks=1)
            if gradients + first_block > activations:
                activations = first_block
            else:
                gradients = 0.0
        return {
            "actor weights": weights,
            "AdamW": moments,
            "gathered blocks": self.gathered(gathered),
            "cast adapters": self.cast_adapters(recomputed),
            "gradients": gradients,
            "activations": activations,
        }

    def rows_of_update(self) -> int:
        """(candidate, step) pairs that one rank replays for one optimizer step."""
        config, world = self.config, self.run.world_size
        local = len(local_candidates(config.n_samples_per_prompt, rank=0, world_size=world))
        return max(1, self.run.groups * local * self.run.trained_steps // config.num_updates_per_batch)

    def join(self) -> Join:
        """As set, or `join.choose_join` with formulas for its probes.

        The probes are not compiled; the fewest blocks recompute with which enough rows fit to fill the GPU.
        """
        rows, blocks = self.rows_of_update(), self.model.transformer.blocks
        checkpointed = self.config.fsdp_activation_checkpointing
        if self.config.replay_join:
            return Join(min(self.config.replay_join, rows), blocks if checkpointed else 0)
        taken = sum(self.on_card) + self.gathered() + self.engine_while_training() + self.contexts
        available = AUTO_MEMORY_SHARE * (self.card.memory - taken) - self.gradients
        fill = ceil(AUTO_TOKENS / (self.image + self.run.text_tokens))
        units = None
        if self.in_units and self.config.fsdp_reshard_after_forward:
            units = Units(blocks, self.model.transformer.block_parameters * self._compute)
        row_bytes = partial(self.row_bytes, compiled=False)
        join = join_of_memory(available, rows, fill, row_bytes, blocks, recompute_all=checkpointed, units=units)
        return replace(join, rows=evenly(rows, ceil(rows / join.rows)))

    # ------------------------------------------------------------------ the engine

    @property
    def engine_transformer(self) -> float:
        """What one card of an engine holds of it."""
        adapters = self.adapters if self.config.lora_adapter_mode else None
        held = self.model.transformer.engine_rank_parameters(self.run.engine_gpus, adapters)
        return held * DTYPE_BYTES[self.run.engine_dtype]

    @property
    def engine_frozen(self) -> float:
        return (self.model.text_encoder_parameters + self.model.vae_parameters) * DTYPE_BYTES[self.run.engine_dtype]

    def engine_while_training(self) -> float:
        return 0.0 if self.run.offload_rollout else self.engine_transformer + self.engine_frozen

    def sampling_bytes(self) -> float:
        """The worse of a denoising forward and of decoding its pictures; the text encoder's own is smaller.

        CUDA graphs have memory of their own, which all of them share: as much as one forward.
        """
        run, sampling, dtype = self.run, self.config.sampling, self.run.engine_dtype
        rows = min(run.engine_rows, run.groups * self.config.n_samples_per_prompt)
        forward = rows * self.model.transformer.forward_bytes(self.image, run.text_tokens, dtype=dtype)
        decoded = min(rows, run.engine.decoded_at_once)
        recorded = forward if run.engine.graphs and run.cuda_graphs and run.engine_gpus == 1 else 0.0
        return recorded + max(forward, decoded * self.model.decode_bytes(sampling.height, sampling.width, dtype=dtype))

    @property
    def contexts(self) -> float:
        return PROCESS_BYTES * (3 if self.run.colocated_scorer else 2)

    # ------------------------------------------------------------------ the phases

    def phases(self) -> list[Phase]:
        """In the order of a run."""
        weights, moments = self.on_card
        actor = {"actor weights": weights, "AdamW": moments}
        engine = {"engine transformer": self.engine_transformer, "engine text encoder, VAE": self.engine_frozen}
        processes = {"processes": self.contexts}
        awake = {} if self.run.offload_train else actor
        beside = {} if self.run.offload_rollout else engine
        join = self.join()
        replay = self.replay_peak(
            join.rows,
            forwards=ceil(self.rows_of_update() / join.rows),
            recomputed=join.recomputed,
            gathered=join.gathered,
        )
        staging = {"sync buckets": 2.0 * self.run.bucket_mb * (1 << 20), "gathered for the sync": self._sync_gather()}
        taking = engine | ({"engine text encoder, VAE": 0.0} if self.run.offload_rollout else {})
        phases = [
            Phase("load", processes | {"actor weights": weights} | engine),
            Phase("rollout", processes | awake | engine | {"sampling": self.sampling_bytes()}),
            Phase("replay", processes | beside | replay),
            Phase("optimizer step", processes | beside | actor | {"gradients": self.gradients}),
            Phase("sync", processes | actor | taking | staging),
            Phase("both asleep", processes | awake | beside),
        ]
        return [Phase(phase.name, {name: b for name, b in phase.parts.items() if b > 0}) for phase in phases]

    def _sync_gather(self) -> float:
        """What a sync holds beside its buckets: two chunks on their way, and the tensors of the bucket being packed.

        An adapter is sent from where it is: every rank has it whole.
        """
        if not self.sharded or self.config.lora_adapter_mode:
            return 0.0
        sent = self.model.transformer.parameters * self._compute
        return min(2.0 * SYNC_CHUNK_BYTES + self.run.bucket_mb * (1 << 20), 2.0 * sent)

    def host_bytes(self) -> float:
        """Host memory that one card's sleepers take: what leaves the card lies there."""
        actor = self.weights + self.moments if self.run.offload_train or self.config.fsdp_cpu_offload else 0.0
        return actor + (self.engine_transformer + self.engine_frozen if self.run.offload_rollout else 0.0)

    def gathered_gb(self) -> float:
        """What one pass over the model gathers from the other ranks, in 1e9 bytes."""
        return self.model.transformer.parameters * self._compute / GB if self.sharded else 0.0
