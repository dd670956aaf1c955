"""`trainer`: run, preflight, plan, report, export. Reading path: here -> `cli` -> `preflight` -> `loop`.

Only what a command needs is imported: `trainer preflight` and `trainer plan` load neither torch nor Ray.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from flowgrpo_trainer.cli import RecipeError, parse
from flowgrpo_trainer.errors import in_words
from flowgrpo_trainer.preflight import ConfigError, validate_generative_config
from flowgrpo_trainer.settings import Settings

INTERRUPTED = 130
WRONG = 2


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 failed while running, 2 wrong settings, 3 a plan that does
    not fit, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    sys.path.append(os.getcwd())  # dotted paths may name modules of the folder that the command is given in
    command = words[0] if words and words[0] in COMMANDS else "run"
    rest = words[1:] if command != "run" or words[:1] == ["run"] else words
    try:
        code = COMMANDS[command](rest)
    except (ConfigError, RecipeError) as error:
        code = _say_error(str(error), WRONG)
    except KeyboardInterrupt:
        code = _say_error("stopped", INTERRUPTED)
    except Exception as error:
        code = _say_error(in_words(error), 1)
    sys.exit(code)


def preflight(words: Sequence[str]) -> int:
    """`trainer preflight [--recipe ...] [flags]`: every problem of the settings at once; starts nothing."""
    settings, recipe = parse(words)
    for warning in validate_generative_config(settings):
        print(f"warning: {warning}")
    print(f"preflight passed: recipe {recipe}, {settings.run.num_rollouts} rollouts, nothing was started")
    return 0


def plan(words: Sequence[str]) -> int:
    """`trainer plan [--recipe ...] [flags]`: memory of each phase and seconds of a rollout, before anything loads."""
    from flowgrpo_trainer import plan as command

    return command.plan(words)


def report(words: Sequence[str]) -> int:
    """`trainer report DIR`: the HTML report of a run, at any time."""
    if len(words) != 1 or words[0].startswith("-"):
        return _say_error("usage: trainer report DIR   (the folder that the run printed)", WRONG)
    from flowgrpo_trainer.report import write_report

    print(write_report(Path(words[0])))
    return 0


def export(words: Sequence[str]) -> int:
    """`trainer export --form merged|adapter ...`: a checkpoint as files that others load."""
    from flowgrpo_trainer import export as command

    return command.export(words)


def run(words: Sequence[str]) -> int:
    """`trainer [--recipe ...] [flags]`: trains, evaluates, writes the report."""
    settings, recipe = parse(words)
    if recipe == "none":
        print("no --recipe given: starting from the flags' own defaults (--recipe quickstart is the trial run)")
    warnings = validate_generative_config(settings)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("flowgrpo_trainer").setLevel(logging.WARNING if settings.run.quiet else logging.INFO)
    settings = _with_folders(settings, recipe)
    from flowgrpo_trainer.session import train_session  # torch and Ray come with it

    return train_session(settings, recipe, warnings)


def _with_folders(settings: Settings, recipe: str) -> Settings:
    """The same settings with every folder named: a fresh run folder unless one was given."""
    run_dir = settings.run.run_dir
    if run_dir is None:
        name = Path(recipe).stem if recipe != "none" else "run"
        stamp = datetime.fromtimestamp(time.time()).strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs") / f"{name}-{stamp}"
    artifacts = settings.rollout.artifact_root or run_dir / "artifacts"
    return replace(
        settings,
        run=replace(settings.run, run_dir=run_dir.absolute()),
        rollout=replace(settings.rollout, artifact_root=artifacts.absolute()),
    )


def _say_error(text: str, code: int) -> int:
    print(f"trainer: {text}", file=sys.stderr)
    return code


COMMANDS = {"run": run, "preflight": preflight, "plan": plan, "report": report, "export": export}

if __name__ == "__main__":
    main()
