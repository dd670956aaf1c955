"""Every setting of a run, typed and frozen; the flags of the command line are these fields.

No torch here: preflight answers in under half a second. What the settings must satisfy together is in
`preflight`; where their values come from (recipe, environment, command line) is in `cli`.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from flowgrpo_rollout_sglang.config import SamplingConfig
from tyro.conf import OmitArgPrefixes
from tyro.constructors import PrimitiveConstructorSpec

GENERATION_TASKS = ("t2i",)
"""A new task enters together with a replay path, never before it (S1)."""

ADAPTER_PATH = "flowgrpo_fsdp_actor.adapters.qwen_image.QwenImageAdapter"
ENGINE_PATH = "flowgrpo_rollout_sglang.engine.SGLangNativeGenerationEngine"
ROLLOUT_PATH = "flowgrpo_trainer.rollout.generate_rollout"
CONVERT_PATH = "flowgrpo_trainer.rollout.convert_samples_to_train_data"
POST_PROCESS_PATH = "flowgrpo_rewards.post_process"
JSON_FLAGS = ("resource", "sampling_config", "reward_required_components", "reward_component_weights")
"""Flags whose value is JSON text; `cli` writes them so."""


def _json(parse: Any, metavar: str) -> Any:
    """A flag whose value is JSON text, parsed by `parse`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: not isinstance(value, str),
        str_from_instance=lambda value: [json.dumps(value, default=_plain)],
    )


def _plain(value: Any) -> Any:
    return asdict(value)


def _parse_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")
    return value


def _parse_list(text: str) -> tuple[str, ...]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"expected a JSON list of strings, got {text}")
    return tuple(value)


SamplingFlag = Annotated[SamplingConfig, _json(SamplingConfig.from_json, "JSON")]
ObjectFlag = Annotated[dict[str, Any], _json(_parse_object, "JSON")]
ListFlag = Annotated[tuple[str, ...], _json(_parse_list, "JSON")]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What to run, on what, and where its outputs go."""

    num_rollouts: int = 100
    """Rollouts (training steps) of the run."""
    run_dir: Path | None = None
    """Folder of the run's metrics, settings and report; none makes a new one under `runs/`."""
    train_backend: str = "fsdp"
    """Training backend; `fsdp` is the only one."""
    colocate: bool = False
    """Actor and engines take turns on the same devices (required)."""
    fully_async: bool = False
    """Refused: only the synchronous colocate mode exists."""
    hybrid: bool = False
    """Refused: only the synchronous colocate mode exists."""
    resource: ObjectFlag = field(default_factory=lambda: {"actor": [1, 1], "rollout": [1, 1]})
    """JSON: for each role [nodes, devices per node], e.g. '{"actor": [1, 8], "rollout": [1, 8]}'."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; `auto` takes CUDA where every role finds its GPUs, and says what it took."""
    cpu_threads: int | None = None
    """Threads of each worker on the CPU; none divides the cores among the ranks."""
    ray_address: str | None = None
    """Address of a running Ray cluster; none: what RAY_ADDRESS names, else a local one of the run."""
    use_fault_tolerance: bool = False
    """After a failed weight sync, restart the engines instead of ending the run."""
    autoscaler_config: str | None = None
    """Refused: diffusion engines have no scale-out interface."""
    quiet: bool = False
    """No progress display; errors and the final lines still show."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy and the code that knows its family."""

    generation_task: str | None = None
    """Generation task: t2i."""
    model_path: str | None = None
    """Folder of the model in diffusers layout."""
    model_revision: str | None = None
    """Revision of the model; part of the base-model hash."""
    model_adapter_path: str | None = ADAPTER_PATH
    """Dotted path of the GenerativeModelAdapter."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How candidates are drawn, from which prompts."""

    prompt_data: Path | None = None
    """Training prompts: JSONL, one {"prompt": ..., "metadata": {...}} a line."""
    eval_prompt_data: tuple[str, Path] | None = None
    """Held-out prompts: a name for the metrics and the JSONL file."""
    eval_interval: int = 10
    """Rollouts between evaluations; 0 evaluates at the start and the end only."""
    n_samples_per_eval_prompt: int = 1
    """Pictures per held-out prompt."""
    rollout_batch_size: int = 8
    """Prompts (groups) per rollout."""
    n_samples_per_prompt: int = 8
    """Candidates per prompt, the GRPO group."""
    global_batch_size: int | None = None
    """rollout_batch_size * n_samples_per_prompt; none derives it."""
    rollout_seed: int = 42
    """Seed of the prompt order and of the adapter's initialisation."""
    generation_seed: int = 1234
    """Base seed of all sampling noise."""
    sampling_config: SamplingFlag = field(default_factory=SamplingConfig)
    """JSON: resolution, steps, noise, and which steps are trained."""
    rollout_engine_class_path: str = ENGINE_PATH
    """Dotted path of the RolloutEngine."""
    rollout_function_path: str = ROLLOUT_PATH
    """Dotted path of the function that draws one rollout."""
    custom_convert_samples_to_train_data_path: str = CONVERT_PATH
    """Dotted path of the function that makes the training rows."""
    rollout_num_gpus_per_engine: int = 1
    """Devices per engine, which divide the model between them; must divide the actor's world size and the heads."""
    engine_dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of the engine's transformer."""
    candidates_per_forward: int | None = None
    """Candidates that an engine joins in one forward; none chooses."""
    rollout_cuda_graphs: bool = True
    """An SGLang engine of one GPU replays its forwards as CUDA graphs; other engines never do."""
    engine_start_timeout_s: float = 600.0
    """Longest wait until an engine is ready, in seconds."""
    offload_rollout: bool = False
    """Engines free their devices while the actor trains."""
    parity_bound: float | None = None
    """Largest |ratio - 1| between engine and replay, of any step, with which a run may start; none is 1e-3 where both
    compute in fp32, else 0.05."""
    artifact_root: Path | None = None
    """Folder of pictures and sidecars, readable by every rank; none is `<run_dir>/artifacts`."""
    artifact_retention_rollouts: int = 2
    """Rollouts whose artifacts are kept; 0 or less keeps all."""
    load_debug_rollout_data: str | None = None
    """Refused: the actor reads sidecars and rows."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """FlowGRPO's objective."""

    advantage_estimator: str = "grpo"
    """`grpo` is the only one."""
    generative_advantage_std_mode: Literal["group", "batch", "none"] | None = None
    """Divisor of the centred rewards; none takes `group`, or `none` with --disable-grpo-std-normalization."""
    disable_grpo_std_normalization: bool = False
    """The older switch for --generative-advantage-std-mode none (Dr.GRPO)."""
    eps_clip: float = 1e-4
    """Clip range of the ratio."""
    eps_clip_high: float | None = None
    """Upper clip range where it differs."""
    num_updates_per_batch: int = 2
    """Disjoint optimizer steps that one rollout is split into."""
    micro_batch_size: int = 1
    """Candidates of a group that one micro-batch holds, where it divides; 0 is all of a rank's share."""
    replay_join: int | None = None
    """Transitions (a candidate at a step) joined in one replay forward; none chooses."""
    replay_compile: bool = True
    """On CUDA, compile the repeated transformer blocks, once for each shape; a CPU never does."""
    kl_coef: float = 0.0
    """Refused unless 0: there is no reference model."""
    use_kl_loss: bool = False
    """Refused: there is no reference model."""
    use_dynamic_batch_size: bool = False
    """Refused: latents have a fixed shape."""
    max_tokens_per_gpu: int | None = None
    """Refused: latents have a fixed shape."""


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """Sharding, number formats and what is trained."""

    fsdp_trainable_mode: str = "full"
    """`full`, or `lora` together with --lora-rank."""
    fsdp_trainable_attr: str = "transformer"
    """Name of the trainable module in the model bundle."""
    fsdp_param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Format of the gathered compute copy."""
    fsdp_reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Format of the gradient reduction."""
    fsdp_master_dtype: Literal["bf16", "fp32"] | None = None
    """Storage format of trainable parameters; none keeps the loaded one."""
    fsdp_reshard_after_forward: bool = True
    """Free gathered parameters after the forward."""
    fsdp_activation_checkpointing: bool = False
    """Recompute each block in the backward."""
    fsdp_cpu_offload: bool = False
    """Refused: training with parameters on the CPU is not supported yet."""
    fsdp_load_wave_size: int = 0
    """Ranks that load the base at once; 0 is all."""
    fsdp_debug_fingerprint: bool = False
    """Log weight fingerprints and replay parity in each step."""
    offload_train: bool = False
    """The actor frees its devices during rollout."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter, where one is trained."""

    lora_rank: int = 0
    """Rank; above 0 exactly in lora mode."""
    lora_alpha: float = 0.0
    """Scale numerator: the update is alpha / rank * B A."""
    lora_dropout: float = 0.0
    """Must be 0: a random forward breaks the first update's ratio of 1."""
    lora_target_modules: tuple[str, ...] | None = None
    """Module names (suffix match); none takes the model adapter's."""
    lora_adapter_mode: bool = False
    """Send only the adapter to the engines."""
    lora_merge_mode: bool = False
    """Fold the adapter into the base and send the whole transformer."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate."""

    lr: float = 1e-4
    """Learning rate after warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of a decay."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_iters: int | None = None
    """Optimizer steps of the decay, for linear and cosine."""
    fsdp_lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    lr_decay_style: str | None = None
    """No effect here (warned about): use --fsdp-lr-scheduler."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    adam_beta1: float = 0.9
    """AdamW beta1."""
    adam_beta2: float = 0.999
    """AdamW beta2."""
    adam_eps: float = 1e-8
    """AdamW epsilon."""
    clip_grad: float = 1.0
    """Largest gradient norm."""


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How new weights reach the engines."""

    weight_sync_mode: Literal["full", "adapter"] | None = None
    """Derived from the LoRA mode; a value that contradicts it is refused."""
    weight_sync_wire_dtype: str = "bf16"
    """Format on the wire: bf16, or fp32 where the actor computes in fp32."""
    weight_sync_bucket_size_mb: int = 512
    """Size of one staging bucket."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Who judges the pictures."""

    reward_scorer_path: str | None = None
    """Dotted path of the GenerativeRewardScorer."""
    reward_model_path: str | None = None
    """Local folder of the scorer's model."""
    reward_runtime: Literal["cpu", "colocate", "remote"] = "cpu"
    """Where the scorer runs."""
    reward_endpoint: str | None = None
    """URL of a reward server, for `remote`."""
    reward_required_components: ListFlag = ()
    """JSON list of components that every picture must have."""
    reward_component_weights: ObjectFlag = field(default_factory=dict)
    """JSON: weight of each component in the advantage."""
    reward_batch_size: int = 64
    """Pictures given to the scorer at once."""
    reward_timeout_s: float = 600.0
    """Longest time for one batch, in seconds."""
    custom_reward_post_process_path: str = POST_PROCESS_PATH
    """Dotted path of the reward step."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What survives a crash."""

    save: Path | None = None
    """Folder of checkpoints; none saves nothing."""
    load: Path | None = None
    """Folder to resume from; none starts at rollout 0."""
    save_interval: int = 20
    """Rollouts between checkpoints."""
    rotate_ckpt: bool = False
    """Remove old checkpoints before a new one is written."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints kept by --rotate-ckpt."""
    async_save: bool = False
    """No effect (warned about): saves are synchronous."""
    save_hf: str | None = None
    """Refused: use `trainer export`."""
    save_debug_train_data: str | None = None
    """No effect (warned about): rows are indices and sidecars."""


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """Where metrics go beyond the run folder and TensorBoard."""

    use_clearml: bool = False
    """Send metrics to ClearML."""
    use_metrics_service: str | None = None
    """URL of a metrics service."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, in the groups that `--help` shows."""

    run: OmitArgPrefixes[RunSettings] = field(default_factory=RunSettings)
    model: OmitArgPrefixes[ModelSettings] = field(default_factory=ModelSettings)
    rollout: OmitArgPrefixes[RolloutSettings] = field(default_factory=RolloutSettings)
    algorithm: OmitArgPrefixes[AlgorithmSettings] = field(default_factory=AlgorithmSettings)
    fsdp: OmitArgPrefixes[FsdpSettings] = field(default_factory=FsdpSettings)
    lora: OmitArgPrefixes[LoraSettings] = field(default_factory=LoraSettings)
    optimizer: OmitArgPrefixes[OptimizerSettings] = field(default_factory=OptimizerSettings)
    sync: OmitArgPrefixes[SyncSettings] = field(default_factory=SyncSettings)
    reward: OmitArgPrefixes[RewardSettings] = field(default_factory=RewardSettings)
    checkpoint: OmitArgPrefixes[CheckpointSettings] = field(default_factory=CheckpointSettings)
    tracking: OmitArgPrefixes[TrackingSettings] = field(default_factory=TrackingSettings)

    def flat(self) -> dict[str, Any]:
        """Every setting by its flag's name, without the groups."""
        groups = (getattr(self, group.name) for group in fields(self))
        return {item.name: getattr(group, item.name) for group in groups for item in fields(group)}

    @property
    def std_mode(self) -> Literal["group", "batch", "none"]:
        """The advantage's divisor after both switches and the forced case of one sample per prompt (M4)."""
        if self.rollout.n_samples_per_prompt == 1 or self.algorithm.disable_grpo_std_normalization:
            return "none"
        return self.algorithm.generative_advantage_std_mode or "group"

    @property
    def parity_bound(self) -> float:
        """`--parity-bound`, or what rounding allows. In fp32 a lost text mask moved the ratio by 4e-3 and more."""
        fp32 = self.fsdp.fsdp_param_dtype == self.rollout.engine_dtype == "fp32"
        given = self.rollout.parity_bound
        return given if given is not None else 1e-3 if fp32 else 0.05

    @property
    def weight_sync_mode(self) -> Literal["full", "adapter"]:
        """Derived from the LoRA mode (W1)."""
        return "adapter" if self.lora.lora_adapter_mode else "full"

    def world_size(self, role: Literal["actor", "rollout"]) -> int:
        """Devices of a role: nodes times devices per node."""
        nodes, per_node = self.run.resource[role]
        return nodes * per_node
