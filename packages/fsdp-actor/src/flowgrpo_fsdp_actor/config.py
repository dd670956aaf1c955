"""Every setting that the actor reads, in one typed object. No torch here: preflight composes and checks it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from flowgrpo_rollout_sglang.config import Problem, SamplingConfig

ParamDtype = Literal["bf16", "fp32"]
TrainableMode = Literal["full", "lora"]
LrScheduler = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """One training rank's settings: the same on every rank."""

    model_path: str
    """Folder of the diffusers pipeline; only its `transformer` is loaded."""
    model_adapter_path: str = "flowgrpo_fsdp_actor.adapters.qwen_image.QwenImageAdapter"
    """Dotted path of the `GenerativeModelAdapter` of this model family."""
    generation_task: str = "t2i"
    """The task that is trained; the adapter must support it."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How the trajectories were sampled: replay scores them with the same eta, sde_type and sigma_max."""

    fsdp_trainable_mode: TrainableMode = "full"
    """`full`: every weight moves. `lora`: low-rank adapters move, the base is frozen."""
    fsdp_trainable_attr: str = "transformer"
    """Subfolder of the model folder that is trained."""
    fsdp_param_dtype: ParamDtype = "bf16"
    """Dtype of the forward and backward, and of the frozen weights."""
    fsdp_reduce_dtype: ParamDtype = "fp32"
    """Dtype in which gradients are reduced over ranks."""
    fsdp_master_dtype: ParamDtype | None = None
    """Dtype in which the trainable weights and their AdamW state are kept; None is `fsdp_param_dtype`."""
    fsdp_reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again in its backward."""
    fsdp_activation_checkpointing: bool = False
    """Recompute each block's activations in the backward instead of keeping them."""
    fsdp_cpu_offload: bool = False
    """Refused: weights and optimizer that stay on the host also while training have never run on a GPU."""
    fsdp_load_wave_size: int = 0
    """How many ranks read the weight files at the same time; 0 is all of them."""
    fsdp_lr_scheduler: LrScheduler = "constant"
    """What the learning rate does after its warm-up."""
    fsdp_debug_fingerprint: bool = False
    """Print a fingerprint of the trainable weights around each optimizer step, and the log-prob parity."""

    lora_rank: int = 0
    """Rank of the adapters; above 0 exactly in `lora` mode."""
    lora_alpha: float = 0.0
    """The adapter's product is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Must be 0: a dropped input would make replay score another policy than the one that sampled."""
    lora_target_modules: tuple[str, ...] | None = None
    """Suffixes of the module names that get an adapter; None is the model adapter's own list."""
    lora_adapter_mode: bool = False
    """Publish the LoRA tensors alone (the engine holds base and adapter apart)."""
    lora_merge_mode: bool = False
    """Publish the whole transformer with the adapter folded in."""

    lr: float = 1e-5
    """Learning rate after the warm-up."""
    weight_decay: float = 1e-4
    """AdamW's decoupled weight decay."""
    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: float = 0.999
    """AdamW's decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to AdamW's denominator."""
    clip_grad: float = 1.0
    """Largest gradient norm over all trainable weights; 0 or below clips nothing."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_iters: int = 0
    """Optimizer steps after the warm-up in which `linear` and `cosine` reach `min_lr`."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    eps_clip: float = 1e-4
    """The ratio of a (sample, step) is clipped below 1 - eps_clip."""
    eps_clip_high: float | None = None
    """The ratio is clipped above 1 + eps_clip_high; None is eps_clip."""
    num_updates_per_batch: int = 1
    """Optimizer steps per rollout; each sample takes part in exactly one of them."""
    micro_batch_size: int = 0
    """Candidates of a group in one micro-batch, where it divides this rank's share of the group; 0 is all."""
    n_samples_per_prompt: int = 8
    """Candidates of a prompt group."""
    replay_join: int | None = None
    """Transitions (a candidate at a step) in one forward, over steps, candidates and groups; None chooses."""
    replay_compile: bool = True
    """On CUDA, compile the repeated transformer blocks with torch.compile, once for each shape; a CPU never does."""

    seed: int = 0
    """Seed of the adapters' initial weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the actor trains; with `cuda`, the process's current device."""

    @property
    def master_dtype(self) -> ParamDtype:
        """Dtype in which the trainable weights are stored."""
        return self.fsdp_master_dtype or self.fsdp_param_dtype

    @property
    def compiles(self) -> bool:
        """Whether replay runs compiled blocks."""
        return self.replay_compile and self.device == "cuda"

    @property
    def is_lora(self) -> bool:
        return self.fsdp_trainable_mode == "lora"

    def problems(self) -> Iterator[Problem]:
        """Everything that the actor itself would refuse. Never raises, never edits."""
        yield from self._lora_problems()
        yield from self._optimizer_problems()
        if self.fsdp_cpu_offload:
            yield Problem(
                "--fsdp-cpu-offload",
                "Training with weights and optimizer on the host is not supported yet.",
                "leave it out; for want of memory use more cards, LoRA, or --offload-train",
            )
        for name in ("num_updates_per_batch", "n_samples_per_prompt"):
            if (value := getattr(self, name)) < 1:
                yield Problem(f"{_flag(name)} {value}", "It must be at least 1.", f"set {_flag(name)} to 1 or more")
        for name in ("micro_batch_size", "fsdp_load_wave_size", "lr_warmup_iters", "lr_decay_iters"):
            if (value := getattr(self, name)) < 0:
                yield Problem(f"{_flag(name)} {value}", "It must not be negative.", f"set {_flag(name)} to 0 or more")
        if self.replay_join is not None and self.replay_join < 1:
            yield Problem(
                f"--replay-join {self.replay_join}",
                "A forward needs at least one transition.",
                "leave --replay-join out to have it chosen",
            )

    def _lora_problems(self) -> Iterator[Problem]:
        if self.is_lora != (self.lora_rank > 0):
            yield Problem(
                f"--fsdp-trainable-mode {self.fsdp_trainable_mode} with --lora-rank {self.lora_rank}",
                "`lora` needs a rank above 0, and `full` needs rank 0.",
                "set both or neither",
            )
        if self.is_lora and not self.lora_alpha > 0:
            yield Problem(
                f"--lora-alpha {self.lora_alpha}",
                "The adapter's product is scaled by lora_alpha / lora_rank, so nothing would change.",
                "set --lora-alpha to once or twice --lora-rank",
            )
        if self.lora_dropout != 0:
            yield Problem(
                f"--lora-dropout {self.lora_dropout}",
                "Replay would score another policy than the one that sampled.",
                "set --lora-dropout 0",
            )
        if self.lora_adapter_mode and self.lora_merge_mode:
            yield Problem(
                "--lora-adapter-mode with --lora-merge-mode",
                "An engine holds the adapter apart or folded in, never both.",
                "keep one of the two",
            )
        if not self.is_lora and (self.lora_adapter_mode or self.lora_merge_mode):
            mode = "--lora-adapter-mode" if self.lora_adapter_mode else "--lora-merge-mode"
            yield Problem(f"{mode} with --fsdp-trainable-mode full", "There is no adapter.", f"leave {mode} out")

    def _optimizer_problems(self) -> Iterator[Problem]:
        if not self.lr > 0:
            yield Problem(f"--lr {self.lr}", "It must be above 0.", "use 1e-5, or 1e-4 and more with LoRA")
        if not self.eps_clip > 0:
            yield Problem(f"--eps-clip {self.eps_clip}", "It must be above 0.", "use 1e-4")
        if self.fsdp_lr_scheduler != "constant" and self.lr_decay_iters < 1:
            yield Problem(
                f"--fsdp-lr-scheduler {self.fsdp_lr_scheduler} with --lr-decay-iters {self.lr_decay_iters}",
                "A decay needs a length.",
                "set --lr-decay-iters to the number of optimizer steps it takes",
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
