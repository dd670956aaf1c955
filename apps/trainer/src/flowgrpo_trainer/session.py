"""One run from its settings to its report: folders, workers, loop, and a clean end however it comes.

Called by: `main.run`, after preflight. Next on the reading path: `loop`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from flowgrpo_dataprep.source import PromptSource
from flowgrpo_rollout_sglang.artifacts import ArtifactStore
from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.text_window import check_prompts
from rich.console import Console

from flowgrpo_trainer import fleet as fleets
from flowgrpo_trainer.checkpoints import (
    NoCheckpoints,
    Resume,
    checkpoints_of,
    contract_of,
    refuse_checkpoints_of_another_run,
)
from flowgrpo_trainer.cli import settings_as_json
from flowgrpo_trainer.errors import in_words
from flowgrpo_trainer.evaluate import Evaluator
from flowgrpo_trainer.folders import assert_shared, owned_folders, read_by, written_folders
from flowgrpo_trainer.hooks import load_hook
from flowgrpo_trainer.loop import Run, train
from flowgrpo_trainer.parity import ParityGate
from flowgrpo_trainer.progress import RunProgress
from flowgrpo_trainer.recipe_record import write_recipe_record
from flowgrpo_trainer.report import write_report
from flowgrpo_trainer.rollout import RolloutContext
from flowgrpo_trainer.run_folder import Evaluation, RunFolder, RunFolderError
from flowgrpo_trainer.settings import Settings
from flowgrpo_trainer.sync import Publisher
from flowgrpo_trainer.tracking import Trackers, open_trackers


def train_session(settings: Settings, recipe: str, warnings: Sequence[str]) -> int:
    """Trains as `settings` say; returns the exit code. Errors pass through, after the report was written."""
    started = time.monotonic()
    assert settings.run.run_dir is not None
    folder = RunFolder(settings.run.run_dir)
    hooks = _hooks(settings)  # all imported, and their signatures checked, before a worker starts
    prompts, held_out = _prompts(settings)
    adapter = hooks["model_adapter_path"](settings.model.model_path)
    _check_text_window(settings, adapter.family, prompts, held_out)
    contract = contract_of(settings, adapter.lora_target_modules)
    resume = Resume.find(settings, contract)
    refuse_checkpoints_of_another_run(settings, resume)
    store = _store(settings)
    with owned_folders(settings, store):
        _open_folder(folder, settings, resume)
        write_recipe_record(settings, recipe, prompts.fingerprint)
        progress = RunProgress(
            settings.run.num_rollouts,
            first_rollout=resume.next_rollout if resume else 0,
            silent=settings.run.quiet,
        )
        tracker = _trackers(settings, folder, resume, progress)
        publisher = Publisher(
            gpus_per_engine=settings.rollout.rollout_num_gpus_per_engine,
            fault_tolerance=settings.run.use_fault_tolerance,
        )
        try:
            with progress:
                progress.note(f"run folder: {folder.path}")
                for warning in [*warnings, *(resume.changes(settings, prompts.fingerprint) if resume else [])]:
                    progress.note(f"warning: {warning}")
                with fleets.running(settings, store, adapter.lora_target_modules, progress.note) as fleet:
                    assert_shared(written_folders(settings, store), read_by(fleet.actors))
                    context = RolloutContext(
                        engines=fleet.engines,
                        adapter=adapter,
                        sampling=settings.rollout.sampling_config,
                        generation_seed=settings.rollout.generation_seed,
                        store=store,
                        weights_digest=lambda: publisher.digest,
                    )
                    run = _run(settings, hooks, prompts, held_out, context, folder, tracker, progress, publisher)
                    run.checkpoints = checkpoints_of(settings, contract, prompts.fingerprint, folder.metrics_text)
                    if resume is not None:
                        resume.restore(fleet, publisher)
                        run.next_rollout = resume.next_rollout
                        progress.note(f"resumed from {resume.tree.iteration(resume.iteration)}")
                    train(run, fleet)
                    if said := run.checkpoints.outcome():
                        progress.note(said)
            folder.mark_ended("finished")
        except KeyboardInterrupt:
            with suppress(OSError):
                folder.mark_ended("interrupted", "stopped by Ctrl-C")
            raise
        except BaseException as error:
            with suppress(OSError):  # of a full disk, too, the first error is the one to be read
                folder.mark_ended("failed", in_words(error))
            raise
        finally:
            tracker.close()
            _report(folder, time.monotonic() - started)
    return 0


def _hooks(settings: Settings) -> dict[str, Any]:
    """Every pluggable part of the driver's process (E8). Raises HookError."""
    rollout = settings.rollout
    calls: tuple[tuple[str, str | None, int, dict[str, Any]], ...] = (
        ("model_adapter_path", settings.model.model_adapter_path, 1, {}),
        (
            "rollout_function_path",
            rollout.rollout_function_path,
            2,
            {"group_size": 1, "rollout_id": 0, "folder_id": 0, "on_group": None},
        ),
        ("custom_convert_samples_to_train_data_path", rollout.custom_convert_samples_to_train_data_path, 3, {}),
        ("custom_reward_post_process_path", settings.reward.custom_reward_post_process_path, 3, {}),
        ("rollout_engine_class_path", rollout.rollout_engine_class_path, 1, {}),
    )
    return {
        name: load_hook(f"--{name.replace('_', '-')}", path or "", *[None] * count, **keywords)
        for name, path, count, keywords in calls
    }


def _prompts(settings: Settings) -> tuple[PromptSource, PromptSource]:
    """Training and held-out prompts. Raises PromptFileError naming every bad line."""
    rollout = settings.rollout
    assert rollout.prompt_data is not None
    assert rollout.eval_prompt_data is not None
    return (
        PromptSource(rollout.prompt_data, seed=rollout.rollout_seed, batch_size=rollout.rollout_batch_size),
        PromptSource(rollout.eval_prompt_data[1], seed=0, batch_size=1),
    )


def _check_text_window(settings: Settings, family: str, *lists: PromptSource) -> None:
    """Raises PromptsTooLongError. Most prompts are drawn late, and a resume would draw them again."""
    if family == "qwen_image":  # whose window that is
        for prompts in lists:
            check_prompts(str(prompts.path), (p.prompt for p in prompts.all()), settings.model.model_path or "")


def _open_folder(folder: RunFolder, settings: Settings, resume: Resume | None) -> None:
    """A new run folder, or the one that goes on; a new folder of a resumed run gets the metrics so far."""
    if resume is not None and not folder.metrics_path.exists():
        folder.path.mkdir(parents=True, exist_ok=True)
        history = resume.history()
        write_atomic(folder.metrics_path, lambda temporary: temporary.write_text(history))
    folder.start(
        settings_as_json(settings),
        total_rollouts=settings.run.num_rollouts,
        resume_step=resume.next_rollout if resume else None,
    )


def _trackers(settings: Settings, folder: RunFolder, resume: Resume | None, progress: RunProgress) -> Trackers:
    return open_trackers(
        folder,
        run_name=folder.path.name,
        resume_step=resume.next_rollout if resume else 0,
        use_clearml=settings.tracking.use_clearml,
        metrics_service=settings.tracking.use_metrics_service,
        settings=settings_as_json(settings),
        say=progress.note,
    )


def _store(settings: Settings) -> ArtifactStore:
    assert settings.rollout.artifact_root is not None
    return ArtifactStore(
        root=settings.rollout.artifact_root,
        task=settings.model.generation_task or "",
        retention_rollouts=settings.rollout.artifact_retention_rollouts,
    )


def _run(
    settings: Settings,
    hooks: dict[str, Any],
    prompts: PromptSource,
    held_out: PromptSource,
    context: RolloutContext,
    folder: RunFolder,
    tracker: Trackers,
    progress: RunProgress,
    publisher: Publisher,
) -> Run:
    rollout = settings.rollout
    assert rollout.eval_prompt_data is not None
    return Run(
        num_rollouts=settings.run.num_rollouts,
        group_size=rollout.n_samples_per_prompt,
        std_mode=settings.std_mode,
        prompts=prompts,
        context=context,
        generate=hooks["rollout_function_path"],
        convert=hooks["custom_convert_samples_to_train_data_path"],
        parity=ParityGate(bound=settings.parity_bound),
        evaluator=Evaluator(
            name=rollout.eval_prompt_data[0],
            prompts=tuple(held_out.all()),
            samples_per_prompt=rollout.n_samples_per_eval_prompt,
            interval=rollout.eval_interval,
            generate=hooks["rollout_function_path"],
            folder=folder,
        ),
        publisher=publisher,
        checkpoints=NoCheckpoints(),
        tracker=tracker,
        progress=progress,
    )


def _report(folder: RunFolder, seconds: float) -> None:
    """The last lines of a run: what it won, how long it took, where to look.

    A report that cannot be written is said, and does not hide the error that ended the run.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        page = write_report(folder.path)
        evaluations = folder.read_evals()
        if len(evaluations) > 1:
            first, last = evaluations[0], evaluations[-1]
            for name in last.sets:
                before, after = _summary(first, name), _summary(last, name)
                console.print(f"held-out {name}, {len(last.sets[name])} pictures: {before} -> {after}")
        console.print(f"{seconds / 60:.1f} minutes; report: {page}")
    except (OSError, RunFolderError) as error:
        console.print(f"no report: {error}")
    console.print(f"all files: {folder.path}")


def _summary(evaluation: Evaluation, name: str) -> str:
    samples = evaluation.sets[name]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    words = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    if all(sample.correct is not None for sample in samples):
        words += f", {sum(bool(sample.correct) for sample in samples) / len(samples):.0%} fully correct"
    return words
