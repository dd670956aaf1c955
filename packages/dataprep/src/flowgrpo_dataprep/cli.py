"""`dataprep prepare | curate | inspect`. Exit code 0: done; 1: a problem was found; 2: the input or a flag is wrong."""

import argparse
import errno
import sys
import tempfile
from pathlib import Path

from flowgrpo_dataprep.errors import InputError
from flowgrpo_dataprep.source import GENERATION_TASKS

TOKENIZER_HELP = "the model's tokenizer folder, or its tokenizer.json, which counts tokens"
WINDOW_HELP = "tokens that an engine takes, of which the prompt template's end needs 5 (default 512)"


def main(arguments: list[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        return flags.command(flags)
    except (InputError, ValueError) as error:
        print(f"dataprep: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"dataprep: {_os_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dataprep: interrupted, nothing was written", file=sys.stderr)
        return 130


def _prepare(flags: argparse.Namespace) -> int:
    from flowgrpo_dataprep.prepare import prepare

    report = prepare(
        source=flags.source,
        inputs=flags.input,
        output=flags.output,
        task=flags.task,
        id_prefix=flags.id_prefix,
        reward=flags.reward,
        on_error=flags.on_error,
        quiet=flags.quiet,
    )
    print(f"read {report.read:,}, blank {report.blank:,}, skipped {report.skipped:,}, wrote {report.written:,}")
    _print_skipped(report.first_skipped, report.skipped)
    print(flags.output)
    return 0


def _curate(flags: argparse.Namespace) -> int:
    from flowgrpo_dataprep.curate import CurateConfig, curate

    config = CurateConfig(
        inputs=tuple(flags.input),
        out_dir=flags.out_dir,
        prefix=flags.prefix,
        min_prompt_words=flags.min_prompt_words,
        max_prompt_tokens=flags.max_prompt_tokens,
        tokenizer=flags.tokenizer,
        dedup=flags.dedup,
        check_media=flags.check_media,
        eval_size=flags.eval_size,
        eval_fraction=flags.eval_fraction,
        eval_subset_sizes=tuple(flags.eval_subset_sizes),
        on_error=flags.on_error,
    )
    report = curate(config, quiet=flags.quiet)
    print(
        f"read {report.read:,}: skipped {report.skipped:,}, short {report.short:,}, long {report.long:,}, "
        f"missing media {report.missing_media:,}, duplicates {report.duplicates:,}, train {report.train:,}, "
        f"eval {report.eval:,}"
    )
    _print_skipped(report.first_skipped, report.skipped)
    for path, records in report.files.items():
        print(f"{path}  {records:,}")
    return 0


def _inspect(flags: argparse.Namespace) -> int:
    from flowgrpo_dataprep.inspection import InspectConfig, as_json, as_text, inspect

    if flags.train is None and flags.eval is None:
        raise ValueError("inspect needs --train, --eval or both")
    config = InspectConfig(
        train=flags.train,
        eval=flags.eval,
        decode_media=flags.decode_media,
        short_words=flags.short_words,
        text_window=flags.text_window,
        tokenizer=flags.tokenizer,
    )
    report = inspect(config, quiet=flags.quiet)
    if flags.json:
        import json

        print(json.dumps(as_json(report), indent=2, ensure_ascii=False))
    else:
        print(as_text(report))
    return 1 if report.problems or (flags.strict and report.warnings) else 0


def _os_sentence(error: OSError) -> str:
    """What the system refused, where, and the remedy for the usual reasons."""
    hints = {
        errno.ENOSPC: f"make room; temporary files of curate lie in {tempfile.gettempdir()} (TMPDIR moves them)",
        errno.EACCES: "check who may read and write there",
        errno.ENOTDIR: "a part of this path is a file",
    }
    where = f"{error.filename}: " if error.filename else ""
    hint = hints.get(error.errno or 0, "check the path and the disk")
    return f"{where}{error.strerror or error}\nhint: {hint}"


def _print_skipped(lines: list[str], count: int) -> None:
    for line in lines:
        print(f"  skipped {line}", file=sys.stderr)
    if count > len(lines):
        print(f"  and {count - len(lines):,} more", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dataprep", description="Prompt data for text-to-image RL.")
    commands = parser.add_subparsers(required=True, metavar="prepare | curate | inspect")
    _add_prepare(commands)
    _add_curate(commands)
    _add_inspect(commands)
    return parser


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    prepare = commands.add_parser("prepare", help="prompt collections to one JSONL file")
    prepare.add_argument("--source", required=True, choices=("pickapic", "prompts", "ocr", "geneval"))
    prepare.add_argument(
        "--input", required=True, nargs="+", type=Path, help="files or folders: .txt, .jsonl (.gz), .parquet"
    )
    prepare.add_argument("--output", required=True, type=Path)
    prepare.add_argument("--task", default="t2i", choices=GENERATION_TASKS)
    prepare.add_argument("--id-prefix", help="begins every sample_id (default: the source's name and _)")
    prepare.add_argument("--reward", help="component that judges these prompts, where a run mixes several")
    _add_common(prepare)
    prepare.set_defaults(command=_prepare)


def _add_curate(commands: argparse._SubParsersAction) -> None:
    curate = commands.add_parser("curate", help="drop duplicates, short and long prompts, split into train and eval")
    curate.add_argument("--input", required=True, nargs="+", type=Path, help="files that `prepare` wrote")
    curate.add_argument("--out-dir", required=True, type=Path)
    curate.add_argument("--prefix", default="", help="begins each file name")
    curate.add_argument("--min-prompt-words", type=int, default=1, help="drop shorter prompts (default 1)")
    curate.add_argument(
        "--max-prompt-tokens", type=int, help="drop longer prompts, counted by --tokenizer; Qwen-Image takes 507"
    )
    curate.add_argument("--tokenizer", type=Path, help=TOKENIZER_HELP)
    curate.add_argument(
        "--dedup", default="exact", choices=("exact", "folded"), help="folded: letter case and white space do not count"
    )
    curate.add_argument(
        "--no-check-media", dest="check_media", action="store_false", help="keep records without their media"
    )
    held_out = curate.add_mutually_exclusive_group()
    held_out.add_argument("--eval-size", type=int, help="records held out")
    held_out.add_argument("--eval-fraction", type=float, default=0.01, help="share held out (default 0.01)")
    curate.add_argument("--eval-subset-sizes", type=int, nargs="*", default=(), help="also write these eval subsets")
    _add_common(curate)
    curate.set_defaults(command=_curate)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    inspect = commands.add_parser("inspect", help="everything wrong with a train and an eval file; exit 1 on a problem")
    inspect.add_argument("--train", type=Path)
    inspect.add_argument("--eval", type=Path)
    inspect.add_argument("--decode-media", action="store_true", help="open every picture that a record names")
    inspect.add_argument("--short-words", type=int, default=6, help="fewer words are a short prompt (default 6)")
    inspect.add_argument("--text-window", type=int, default=512, help=WINDOW_HELP)
    inspect.add_argument("--tokenizer", type=Path, help=f"{TOKENIZER_HELP}; without one, bytes bound the tokens")
    inspect.add_argument("--strict", action="store_true", help="warnings are problems")
    inspect.add_argument("--json", action="store_true", help="print the whole report as JSON")
    inspect.add_argument("--quiet", action="store_true", help="no progress")
    inspect.set_defaults(command=_inspect)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on-error", default="stop", choices=("stop", "skip"), help="what a bad line does (default stop)"
    )
    command.add_argument("--quiet", action="store_true", help="no progress")


if __name__ == "__main__":
    sys.exit(main())
