"""What settings must satisfy together: every problem is found before anything starts, all at once.

No torch, no model, no Ray: it answers in under half a second on a laptop.
Called by: `main`, before any service starts. Next on the reading path: `loop`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from flowgrpo_dataprep.source import validate_prompt_file
from flowgrpo_fsdp_actor.errors import PlanError
from flowgrpo_fsdp_actor.plan import plan_updates
from flowgrpo_rewards.loading import SCORERS
from flowgrpo_rollout_sglang.config import Problem

from flowgrpo_trainer.dotted_path import dotted_path_problem
from flowgrpo_trainer.settings import GENERATION_TASKS, Settings
from flowgrpo_trainer.wiring import actor_config, reward_config

DIFFUSERS_ENGINE = "flowgrpo_rollout_sglang.diffusers_engine.DiffusersEngine"
HEADER = "Generative RL config validation failed:"
SHOWN_LINES = 10
"""Of a prompt file's bad lines."""


class ConfigError(ValueError):
    """All that is wrong with the settings. `problems` has each one's value, rule and remedy."""

    def __init__(self, problems: tuple[Problem, ...]):
        super().__init__(problems)  # pickle, and so Ray, rebuilds from these
        self.problems = problems

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}; nothing was started"
        listed = "\n\n".join(f"{i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return f"{HEADER} {count}\n\n{listed}"


def validate_generative_config(settings: Settings) -> list[str]:
    """Raises one ConfigError (a ValueError) with every violation; returns the warnings."""
    problems = tuple(_problems(settings))
    if problems:
        raise ConfigError(problems)
    return list(_warnings(settings))


def validate_for_plan(settings: Settings) -> None:
    """Raises one ConfigError with what an estimate cannot be made of; asks for no data, no scorer, no weights."""
    checks = (_trainable_problems, _sync_problems, _batch_problems)
    problems = [problem for check in checks for problem in check(settings)]
    problems += settings.rollout.sampling_config.problems()
    if not settings.model.model_path:
        problems.append(Problem("--model-path is missing", "There is no model to plan for.", "name its folder"))
    if problems:
        raise ConfigError(tuple(problems))


def _problems(s: Settings) -> Iterator[Problem]:
    yield from _scope_problems(s)
    yield from _model_problems(s)
    yield from _trainable_problems(s)
    yield from s.rollout.sampling_config.problems()
    yield from _sync_problems(s)
    yield from _batch_problems(s)
    yield from _engine_problems(s)
    yield from _reward_problems(s)
    yield from _data_problems(s)
    yield from _hook_problems(s)
    yield from _place_problems(s)
    yield from _checkpoint_problems(s)
    yield from _tracking_problems(s)


def _scope_problems(s: Settings) -> Iterator[Problem]:
    """What this system does not do is refused, never ignored (S1 to S4)."""
    run, algorithm = s.run, s.algorithm
    if run.train_backend != "fsdp":
        yield Problem(f"--train-backend {run.train_backend}", "FSDP2 is the only training backend.", "use fsdp")
    if not run.colocate:
        yield Problem("--colocate is missing", "Only the synchronous colocate mode exists.", "add --colocate")
    for flag, given in (("--fully-async", run.fully_async), ("--hybrid", run.hybrid)):
        if given:
            yield Problem(flag, "Only the synchronous colocate mode exists.", f"leave {flag} out")
    if algorithm.kl_coef != 0.0:
        yield Problem(f"--kl-coef {algorithm.kl_coef}", "There is no reference model.", "set --kl-coef 0")
    refused = (
        ("--use-kl-loss", algorithm.use_kl_loss, "There is no reference model."),
        ("--use-dynamic-batch-size", algorithm.use_dynamic_batch_size, "Latents have a fixed shape."),
        ("--max-tokens-per-gpu", algorithm.max_tokens_per_gpu is not None, "Latents have a fixed shape."),
        ("--autoscaler-config", run.autoscaler_config is not None, "Diffusion engines cannot scale out."),
        ("--save-hf", s.checkpoint.save_hf is not None, "Checkpoints are exported offline, by `trainer export`."),
        (
            "--load-debug-rollout-data",
            s.rollout.load_debug_rollout_data is not None,
            "The actor reads rows and sidecars of the run itself.",
        ),
    )
    for flag, given, why in refused:
        if given:
            yield Problem(flag, why, f"leave {flag} out")
    if algorithm.advantage_estimator != "grpo":
        yield Problem(
            f"--advantage-estimator {algorithm.advantage_estimator}", "grpo is the only estimator.", "use grpo"
        )


def _model_problems(s: Settings) -> Iterator[Problem]:
    task = s.model.generation_task
    if task not in GENERATION_TASKS:
        yield Problem(
            f"--generation-task {task}",
            f"The tasks are {', '.join(GENERATION_TASKS)}.",
            f"use --generation-task {GENERATION_TASKS[0]}",
        )
    if not s.model.model_adapter_path:
        yield Problem("--model-adapter-path is missing", "It says how the model is replayed.", "name an adapter class")
    if not s.model.model_path:
        yield Problem("--model-path is missing", "There is no model to train.", "name a folder in diffusers layout")
        return
    folder = Path(s.model.model_path)
    if not folder.is_dir():
        yield Problem(f"--model-path {folder}", "The folder does not exist.", "download the model there first")
        return
    parts = ("model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json")
    if missing := [part for part in parts if not (folder / part).is_file()]:
        yield Problem(
            f"--model-path {folder}",
            f"It is no complete pipeline in diffusers layout: {', '.join(missing)} missing.",
            "name the folder that holds model_index.json, transformer/, vae/, text_encoder/, tokenizer/, scheduler/",
        )


def _trainable_problems(s: Settings) -> Iterator[Problem]:
    """What is trained; the actor's own rules are asked of the actor's own config."""
    mode, lora = s.fsdp.fsdp_trainable_mode, s.lora
    if mode not in ("full", "lora"):
        yield Problem(f"--fsdp-trainable-mode {mode}", "It is full or lora.", "use full, or lora with --lora-rank")
        return
    yield from actor_config(s, device="cpu").problems()
    if mode == "lora" and lora.lora_rank > 0:
        if lora.lora_alpha <= 0:
            yield Problem(
                f"--lora-alpha {lora.lora_alpha}", "The adapter's scale is alpha / rank.", "use twice the rank"
            )
        if not lora.lora_adapter_mode and not lora.lora_merge_mode:
            yield Problem(
                "neither --lora-adapter-mode nor --lora-merge-mode",
                "An engine takes either the adapter alone or the merged transformer.",
                "add --lora-adapter-mode",
            )


def _sync_problems(s: Settings) -> Iterator[Problem]:
    sync, lora = s.sync, s.lora
    if sync.weight_sync_mode is not None and sync.weight_sync_mode != s.weight_sync_mode:
        yield Problem(
            f"--weight-sync-mode {sync.weight_sync_mode}",
            f"The mode follows from the LoRA flags: here it is {s.weight_sync_mode}.",
            "leave --weight-sync-mode out, or set --lora-adapter-mode to match",
        )
    if lora.lora_adapter_mode and s.fsdp.fsdp_trainable_mode != "lora":
        yield Problem(
            f"--lora-adapter-mode, --fsdp-trainable-mode {s.fsdp.fsdp_trainable_mode}",
            "Only LoRA training has an adapter to send.",
            "add --fsdp-trainable-mode lora, or leave --lora-adapter-mode out",
        )
    computes = s.fsdp.fsdp_param_dtype
    if sync.weight_sync_wire_dtype != "bf16" and (sync.weight_sync_wire_dtype, computes) != ("fp32", "fp32"):
        yield Problem(
            f"--weight-sync-wire-dtype {sync.weight_sync_wire_dtype}, --fsdp-param-dtype {computes}",
            "The wire carries what the actor computes with: bf16, or fp32 where it computes in fp32.",
            "use --weight-sync-wire-dtype bf16",
        )
    if sync.weight_sync_bucket_size_mb < 1:
        yield Problem(
            f"--weight-sync-bucket-size-mb {sync.weight_sync_bucket_size_mb}", "It must be at least 1.", "use 512"
        )


def _batch_problems(s: Settings) -> Iterator[Problem]:
    rollout, algorithm = s.rollout, s.algorithm
    product = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    positive = ("rollout_batch_size", "n_samples_per_eval_prompt")
    for name in positive:
        if getattr(rollout, name) < 1:
            yield Problem(f"--{name.replace('_', '-')} {getattr(rollout, name)}", "It must be at least 1.", "raise it")
    if min(product, algorithm.num_updates_per_batch, rollout.n_samples_per_prompt) < 1:
        return  # said above and by the actor's own rules
    if rollout.global_batch_size is not None and rollout.global_batch_size != product:
        yield Problem(
            f"--global-batch-size {rollout.global_batch_size}",
            f"It is rollout-batch-size * n-samples-per-prompt = {product}.",
            f"set it to {product}, or leave it out",
        )
    for role in ("actor", "rollout"):
        shape = s.run.resource.get(role)
        if not (
            isinstance(shape, list | tuple) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)
        ):
            yield Problem(
                f"--resource {s.run.resource}",
                f'"{role}" must be [nodes, devices per node], both at least 1.',
                'e.g. \'{"actor": [1, 8], "rollout": [1, 8]}\'',
            )
            return
    world, per_engine = s.world_size("actor"), rollout.rollout_num_gpus_per_engine
    if per_engine < 1 or world % per_engine:
        yield Problem(
            f"--rollout-num-gpus-per-engine {per_engine}, actor world {world}",
            "Every engine's devices must tile the actor's ranks, or weights cannot go card to card.",
            "choose a divisor of the actor's world size",
        )
    elif s.world_size("rollout") != world:
        yield Problem(
            f"--resource {s.run.resource}",
            "Actor and engines share the same devices: both roles must have as many.",
            "give actor and rollout the same [nodes, devices]",
        )
    yield from _engine_devices_problems(s)
    yield from _update_problems(s, world)


def _engine_devices_problems(s: Settings) -> Iterator[Problem]:
    """An engine over several devices divides the attention heads and some widths of the model among them."""
    per_engine = s.rollout.rollout_num_gpus_per_engine
    if per_engine <= 1:
        return
    where = f"--rollout-num-gpus-per-engine {per_engine}"
    if s.rollout.rollout_engine_class_path == DIFFUSERS_ENGINE:
        yield Problem(where, "The in-process engine runs on one device.", "set it to 1, or use the SGLang engine")
    if s.run.resource["rollout"][1] % per_engine:
        yield Problem(
            f"{where}, --resource {s.run.resource}",
            "The devices of an engine are on one node, so they must divide a node's.",
            "choose a divisor of the devices per node",
        )
    config = Path(s.model.model_path or "") / s.fsdp.fsdp_trainable_attr / "config.json"
    for what, count in _divided_counts(config).items():
        if count % per_engine:
            yield Problem(
                f"{where}, {count} {what} in {config}",
                "The devices of an engine divide them evenly.",
                f"choose a divisor of {count}",
            )


def _divided_counts(config: Path) -> dict[str, int]:
    """What the devices of an engine divide, of a transformer by its config.json; nothing where that does not say."""
    try:
        read = json.loads(config.read_text())
        heads, outputs = int(read["num_attention_heads"]), int(read["patch_size"]) ** 2 * int(read["out_channels"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # what is missing is said by the model's own rules
    return {"attention heads": heads, "channels of a token at the output": outputs}


def _update_problems(s: Settings, world: int) -> Iterator[Problem]:
    """T6: the updates of a rollout are disjoint and equal, by the actor's own plan; it is alike on every rank."""
    updates, micro = s.algorithm.num_updates_per_batch, s.algorithm.micro_batch_size
    try:
        plan_updates(
            s.rollout.rollout_batch_size,
            s.rollout.n_samples_per_prompt,
            rank=0,
            world_size=world,
            num_updates=updates,
            micro_batch_size=micro,
        )
    except PlanError as error:
        yield Problem(f"--num-updates-per-batch {updates}, --micro-batch-size {micro}", f"{error.what}.", error.fix)


def _engine_problems(s: Settings) -> Iterator[Problem]:
    if not s.rollout.engine_start_timeout_s > 0:
        yield Problem(
            f"--engine-start-timeout-s {s.rollout.engine_start_timeout_s}", "No engine starts in no time.", "use 600"
        )


def _reward_problems(s: Settings) -> Iterator[Problem]:
    reward = s.reward
    for problem in reward_config(s).problems():
        yield Problem(problem.where, problem.why, problem.fix)
    if not reward.reward_component_weights:
        yield Problem(
            "--reward-component-weights is missing", "No component would count.", "e.g. '{\"pickscore\": 1.0}'"
        )
    if reward.reward_model_path and not Path(reward.reward_model_path).exists():  # a JSON file for some scorers
        yield Problem(
            f"--reward-model-path {reward.reward_model_path}", "It does not exist.", "download the model first"
        )


def _data_problems(s: Settings) -> Iterator[Problem]:
    held_out = s.rollout.eval_prompt_data
    files = (
        ("--prompt-data", s.rollout.prompt_data, "name a JSONL file"),
        ("--eval-prompt-data", held_out and held_out[1], "give a name for the metrics, and a JSONL file"),
    )
    for flag, path, fix in files:
        if path is None:
            yield Problem(f"{flag} is missing", "There are no prompts.", fix)
            continue
        problems = validate_prompt_file(path)
        more = [f"and {len(problems) - SHOWN_LINES} more lines"] if len(problems) > SHOWN_LINES else []
        for why in [*problems[:SHOWN_LINES], *more]:
            yield Problem(f"{flag} {path}", why, "mend the file; `dataprep inspect` shows all of it")


def _hook_problems(s: Settings) -> Iterator[Problem]:
    """E8: each dotted path names something that can be called; found without importing it."""
    paths = (
        ("--model-adapter-path", s.model.model_adapter_path),
        ("--rollout-engine-class-path", s.rollout.rollout_engine_class_path),
        ("--rollout-function-path", s.rollout.rollout_function_path),
        ("--custom-convert-samples-to-train-data-path", s.rollout.custom_convert_samples_to_train_data_path),
        ("--custom-reward-post-process-path", s.reward.custom_reward_post_process_path),
        ("--reward-scorer-path", SCORERS.get(s.reward.reward_scorer_path or "", s.reward.reward_scorer_path)),
    )
    for flag, path in paths:
        if path and (why := dotted_path_problem(path)):
            yield Problem(f"{flag} {path}", why, "write package.module.Name, importable from here")


def _place_problems(s: Settings) -> Iterator[Problem]:
    """Folders that the run writes: found read-only now, not after the first rollout."""
    places = (
        ("--artifact-root", s.rollout.artifact_root),
        ("--run-dir", s.run.run_dir),
        ("--save", s.checkpoint.save),
    )
    for flag, path in places:
        if path is not None and (why := _write_problem(Path(path))):
            yield Problem(f"{flag} {path}", why, "choose a folder that you may write")
    if s.checkpoint.load is not None and not Path(s.checkpoint.load).is_dir():
        fix = "name the folder that --save had, or leave --load out to start afresh"
        yield Problem(f"--load {s.checkpoint.load}", "The folder does not exist.", fix)


def _write_problem(path: Path) -> str | None:
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder."
    probe = nearest / f".flowgrpo-write-test-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}."
    return None


def _checkpoint_problems(s: Settings) -> Iterator[Problem]:
    """What would end a run at its first save, or let a disk fill."""
    checkpoint = s.checkpoint
    rotate, keep = checkpoint.rotate_ckpt, checkpoint.max_actor_ckpt_to_keep
    if checkpoint.save_interval < 1:
        yield Problem(f"--save-interval {checkpoint.save_interval}", "It must be at least 1.", "use 20")
    if rotate and keep is None:
        yield Problem(
            "--rotate-ckpt without --max-actor-ckpt-to-keep",
            "How many checkpoints are to stay is not said, so none would ever be removed.",
            "add --max-actor-ckpt-to-keep 2, or leave --rotate-ckpt out to keep all",
        )
    if keep is not None and not rotate:
        yield Problem(
            f"--max-actor-ckpt-to-keep {keep} without --rotate-ckpt",
            "Only --rotate-ckpt removes checkpoints, so none would ever be removed.",
            "add --rotate-ckpt, or leave --max-actor-ckpt-to-keep out to keep all",
        )
    if keep is not None and keep < 1:
        yield Problem(
            f"--max-actor-ckpt-to-keep {keep}", "The newest checkpoint always stays.", "use 1 or more, such as 2"
        )


def _tracking_problems(s: Settings) -> Iterator[Problem]:
    tracking = s.tracking
    if tracking.use_clearml or tracking.use_metrics_service is not None:
        from flowgrpo_trainer.tracking import problems  # brings HTTP along, which few runs need

        yield from problems(use_clearml=tracking.use_clearml, metrics_service=tracking.use_metrics_service)


def _warnings(s: Settings) -> Iterator[str]:
    if s.fsdp.fsdp_trainable_mode == "lora" and s.fsdp.fsdp_master_dtype != "fp32":
        yield (
            "LoRA without --fsdp-master-dtype fp32: a bf16 master rounds RL's small updates away; "
            "loss and gradients look healthy while the policy stands still"
        )
    if s.checkpoint.async_save:
        yield "--async-save has no effect: saves are synchronous"
    if s.optimizer.lr_decay_style is not None and s.optimizer.fsdp_lr_scheduler == "constant":
        yield "--lr-decay-style has no effect while --fsdp-lr-scheduler is constant"
    if s.checkpoint.save_debug_train_data is not None:
        yield "--save-debug-train-data has no effect: rows are indices, tensors are in the sidecars"
    if s.fsdp.fsdp_param_dtype == "fp32" and s.sync.weight_sync_wire_dtype == "bf16":
        yield "the actor computes in fp32 but engines get bf16 weights: they serve a slightly different policy"
    if s.algorithm.num_updates_per_batch == 1:
        yield "--num-updates-per-batch 1: the ratio is always 1, so nothing is ever clipped"
    G, N, world = s.rollout.rollout_batch_size, s.rollout.n_samples_per_prompt, s.world_size("actor")
    if world > 1 and N % world:
        yield (
            f"--n-samples-per-prompt {N} over {world} ranks: they cannot share a group's candidates, so every rank "
            f"replays all {G * N}, {world} times the work; make it a multiple of {world}, or use a number of cards "
            f"that divides {N}"
        )
