"""`trainer plan`: what a recipe needs of each card, and how long a rollout takes, from config.json files alone.

The formulas and what they were checked against are `flowgrpo_fsdp_actor.estimate`; here are the flags, the
mapping from a run's settings, and one page for a person.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.errors import ModelFolderError, TrainableBoundaryError
from flowgrpo_fsdp_actor.estimate import CARDS, DIFFUSERS, SGLANG, Card, Estimate, ModelSize, RunShape, estimate_run
from flowgrpo_fsdp_actor.estimate.cards import GIB
from flowgrpo_rollout_sglang.config import Problem
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.preflight import ConfigError, validate_for_plan
from flowgrpo_trainer.settings import ADAPTER_PATH, Settings
from flowgrpo_trainer.wiring import actor_config

DOES_NOT_FIT = 3
ENGINES = {"DiffusersEngine": DIFFUSERS, "SGLangNativeGenerationEngine": SGLANG}
OTHER_CARDS = (1, 2, 4, 8, 16, 32)
NOT_COUNTED = "Seconds leave out scoring, text encoding, files, checkpoints and start-up."


def plan(words: Sequence[str]) -> int:
    """Prints the estimate; 0 if it fits, 3 if not. Raises ConfigError for settings that make no estimate."""
    flags, rest = _flags().parse_known_args(list(words))
    settings, recipe = parse(rest)
    validate_for_plan(settings)
    card = CARDS[flags.plan_gpu]
    estimate = estimate_settings(settings, card, text_tokens=flags.plan_text_tokens)
    others = [estimate_settings(settings, card, text_tokens=flags.plan_text_tokens, cards=n) for n in OTHER_CARDS]
    notes = assumptions(settings, card, flags.plan_text_tokens)
    if flags.json:
        by_cards = {str(other.world_size): _briefly(other) for other in others}
        node = {"host_gib_per_node": estimate.host_bytes * cards_per_node(settings) / GIB}
        document = {"recipe": recipe} | estimate.as_json() | node | {"by_cards": by_cards, "notes": notes}
        print(json.dumps(document, indent=2))
    else:
        show(estimate, others, settings, recipe, notes, Console())
    return 0 if estimate.fits else DOES_NOT_FIT


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer plan",
        description="Peak memory of a card in each phase and seconds of a rollout, before anything loads. Takes every "
        "flag of `trainer` (see `trainer --help`) and reads only the config.json files of --model-path.",
        allow_abbrev=False,
    )
    parser.add_argument("--plan-gpu", choices=CARDS, default="h200", help="the card to plan for (default: h200)")
    parser.add_argument("--plan-text-tokens", type=int, default=128, metavar="N", help="assumed of every prompt")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON")
    return parser


def estimate_settings(settings: Settings, card: Card, *, text_tokens: int, cards: int | None = None) -> Estimate:
    """The estimate of a run's settings, on their number of cards or on `cards`.

    Raises ConfigError for a model folder that it cannot read.
    """
    rollout = settings.rollout
    config = _with_targets(actor_config(settings, device="cuda"), settings)
    run = RunShape(
        world_size=cards or settings.world_size("actor"),
        groups=rollout.rollout_batch_size,
        trained_steps=len(rollout.sampling_config.sde_steps(0)),
        text_tokens=text_tokens,
        engine=ENGINES.get(rollout.rollout_engine_class_path.rpartition(".")[2], SGLANG),
        engine_gpus=rollout.rollout_num_gpus_per_engine,
        engine_dtype=rollout.engine_dtype,
        candidates_per_forward=rollout.candidates_per_forward,
        cuda_graphs=rollout.rollout_cuda_graphs,
        bucket_mb=settings.sync.weight_sync_bucket_size_mb,
        offload_train=settings.fsdp.offload_train,
        offload_rollout=rollout.offload_rollout,
        colocated_scorer=settings.reward.reward_runtime == "colocate",
    )
    try:
        model = ModelSize.from_folder(settings.model.model_path or "", settings.fsdp.fsdp_trainable_attr)
        return estimate_run(model, config, run, card)
    except ModelFolderError as error:
        where = f"--model-path {settings.model.model_path}"
        raise ConfigError((Problem(where, error.missing, error.hint),)) from error
    except TrainableBoundaryError as error:
        where = f"--lora-target-modules {' '.join(error.wrong)}"
        raise ConfigError((Problem(where, error.why, "name layers of the transformer's blocks"),)) from error


def cards_per_node(settings: Settings) -> int:
    """From --resource."""
    return int(settings.run.resource["actor"][1])


def _with_targets(config: ActorConfig, settings: Settings) -> ActorConfig:
    """LoRA targets of another model adapter than the one whose targets the estimate knows."""
    if not config.is_lora or config.lora_target_modules or settings.model.model_adapter_path == ADAPTER_PATH:
        return config
    from flowgrpo_fsdp_actor.adapters import load_adapter  # brings torch

    targets = load_adapter(config.model_adapter_path, config.model_path).lora_target_modules
    return replace(config, lora_target_modules=targets)


def assumptions(settings: Settings, card: Card, text_tokens: int) -> list[str]:
    """What the numbers rest on beyond the recipe, in sentences."""
    notes = [f"Every prompt is taken to have {text_tokens} tokens (--plan-text-tokens).", NOT_COUNTED]
    if any(settings.rollout.n_samples_per_prompt % cards for cards in OTHER_CARDS):
        notes.append("Where the cards do not divide --n-samples-per-prompt, every rank replays whole groups.")
    if not card.measured:
        notes.append(f"{card.name}: data-sheet rates times the share of its own that an H200 reaches; nothing was run.")
    if settings.run.resource["actor"][0] > 1:
        notes.append("The network between hosts is not in the table: gathers are timed as inside one host.")
    if settings.rollout.rollout_num_gpus_per_engine > 1:
        notes.append(
            "The cards of an engine divide its transformer; its text encoder and VAE are counted whole on each, "
            "and it is timed as one card."
        )
    if settings.rollout.rollout_engine_class_path.rpartition(".")[2] not in ENGINES:
        notes.append("The engine is not one of ours: it is taken to be like the SGLang server.")
    if settings.reward.reward_runtime == "colocate":
        notes.append("The scorer's own weights are not counted; it is on the card while the engine is awake.")
    return notes


def _briefly(estimate: Estimate) -> dict[str, float | str | bool]:
    return {
        "fits": estimate.fits,
        "worst_phase": estimate.worst.name,
        "peak_gib": estimate.worst.total / GIB,
        "seconds": sum(estimate.seconds.values()),
    }


def show(
    estimate: Estimate,
    others: Sequence[Estimate],
    settings: Settings,
    recipe: str,
    notes: Sequence[str],
    console: Console,
) -> None:
    """One page: the phases, the seconds, other numbers of cards, the verdict, what to change."""
    card, cards = estimate.card, estimate.world_size
    trained = f"LoRA {settings.lora.lora_rank}, " if settings.lora.lora_rank else ""
    console.print(
        f"[bold]{recipe}[/bold] on {cards} x {card.name.upper()} ({card.memory / GIB:.1f} GiB each): "
        f"{estimate.parameters / 1e9:.2f} B parameters, {trained}{estimate.trained / 1e6:.0f} M trained",
        highlight=False,
    )
    console.print(_phase_table(estimate))
    console.print(_seconds_table(estimate))
    console.print(
        f"A replay forward joins {estimate.join} transitions; of {estimate.blocks} blocks {estimate.recomputed} "
        f"recompute{f', {estimate.gathered} stay gathered' if estimate.gathered else ''}: "
        f"{estimate.transitions_per_s:.1f} transitions/s a card. "
        f"{_host_memory(estimate, cards_per_node(settings))}",
        highlight=False,
    )
    if estimate.waits_for_host:
        console.print(
            "So small a forward waits for the host to launch it: the seconds are those of one idle host and may be "
            "half as long again on another.",
            highlight=False,
        )
    console.print(_cards_table(others))
    for note in notes:
        console.print(f"[dim]{note}[/dim]", highlight=False)
    console.print(_verdict(estimate))


def _host_memory(estimate: Estimate, cards: int) -> str:
    each = estimate.host_bytes / GIB
    return f"Host memory for what sleeps: {each:.0f} GiB a card, {each * cards:.0f} GiB a node of {cards}."


def _phase_table(estimate: Estimate) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("GiB a card", justify="right")
    table.add_column("of it", justify="right")
    table.add_column("what holds it, GiB")
    for phase in estimate.phases:
        share = phase.total / estimate.card.memory
        style = "red" if share > 1 else "bold" if phase is estimate.worst else ""
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        held = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size > 0.005 * phase.total)
        table.add_row(phase.name, f"{phase.total / GIB:.1f}", f"{share:.0%}", held, style=style)
    return table


def _seconds_table(estimate: Estimate) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    parts = [(name, seconds) for name, seconds in estimate.seconds.items() if seconds > 0]
    for name, _ in parts:
        table.add_column(name, justify="right")
    table.add_column("a rollout", justify="right", style="bold")
    total = sum(estimate.seconds.values())
    table.add_row(*(f"{seconds:.2f} s" for _, seconds in parts), f"{total:.2f} s")
    return table


def _cards_table(others: Sequence[Estimate]) -> Table:
    """The same recipe, the same work in a rollout, on other numbers of cards."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cards")
    for other in others:
        table.add_column(str(other.world_size), justify="right")
    worst = [Text(f"{o.worst.total / GIB:.0f}", style="" if o.fits else "red") for o in others]
    table.add_row("largest phase, GiB a card", *worst)
    table.add_row("a rollout, s", *(f"{sum(o.seconds.values()):.1f}" for o in others))
    return table


def _verdict(estimate: Estimate) -> Text:
    worst, have = estimate.worst, estimate.card.memory
    need = f"the largest phase, {worst.name}, takes {worst.total / GIB:.1f} of {have / GIB:.1f} GiB"
    if estimate.tight:
        return Text(f"fits, barely: {need}; the allocator's gaps may decide", style="bold yellow")
    if estimate.fits:
        text = Text(f"fits: {need}", style="bold green")
        for faster in estimate.speedups:
            saves = f"\n{faster.change}: a rollout in {faster.seconds:.1f} s, largest phase {faster.peak / GIB:.1f} GiB"
            text.append(saves, style="not bold")
        return text
    text = Text(f"does not fit: {need}, {(worst.total - have) / GIB:.1f} too much", style="bold red")
    if not estimate.remedies:
        return text.append("\nno single change that was tried makes it fit", style="not bold")
    text.append("\nany one of these makes it fit:", style="not bold")
    for remedy in estimate.remedies:
        text.append(f"\n  {remedy.change}: largest phase {remedy.peak / GIB:.1f} GiB", style="not bold")
    return text
