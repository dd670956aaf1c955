"""`bench run | compare | list`."""

import argparse
import sys
from pathlib import Path

DEFAULT_OUT = Path("outputs/bench")


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit code 0: all gates passed and nothing is slower than it may; 1: not so; 2: wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.do(arguments)
    except (ValueError, FileNotFoundError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench", description="Performance cases with correctness gates and baselines."
    )
    commands = parser.add_subparsers(required=True, metavar="run | compare | list")

    run = commands.add_parser("run", help="check and time cases, print a table, write JSON")
    run.add_argument("cases", nargs="*", metavar="CASE", help="names from `bench list`; all if none")
    run.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    run.add_argument("--smoke", action="store_true", help="tiny sizes, few samples: proves that the cases run")
    run.add_argument("--out", type=Path, help=f"JSON file (default: {DEFAULT_OUT}/<machine kind>.json)")
    run.add_argument("--save-baseline", action="store_true", help="also make this run the baseline of its machine kind")
    run.set_defaults(do=_run)

    compare = commands.add_parser("compare", help="a run against the baselines; fails if something got slower")
    compare.add_argument("report", nargs="?", type=Path, help="JSON of `bench run` (default: the last run's)")
    compare.add_argument("--baselines", type=Path, help="folder (default: bench/baselines)")
    compare.set_defaults(do=_compare)

    listing = commands.add_parser("list", help="the cases, and which machines have a baseline of each")
    listing.set_defaults(do=_list)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from flowgrpo_bench.case import all_cases
    from flowgrpo_bench.results import save_baselines
    from flowgrpo_bench.run import run
    from flowgrpo_bench.tables import run_table, wide_console

    cases = {case.name: case for case in all_cases()}
    if unknown := sorted(set(arguments.cases) - cases.keys()):
        raise ValueError(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    if arguments.smoke and arguments.save_baseline:
        raise ValueError("--smoke measures nothing worth keeping: leave out --save-baseline, or --smoke")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = run([cases[name] for name in arguments.cases or cases], device, smoke=arguments.smoke)
    out = arguments.out or DEFAULT_OUT / f"{report.machine['kind']}.json"
    report.write(out)
    console = wide_console()
    console.print(run_table(report))
    for size, why in report.failed.items():
        console.print(f"gate failed, not timed: {size}: {why}", markup=False)
    console.print(f"written: {out}")
    if arguments.save_baseline:
        for path in save_baselines(report):
            console.print(f"baseline: {path}")
    return 1 if report.failed else 0


def _compare(arguments: argparse.Namespace) -> int:
    from flowgrpo_bench.compare import compare, passed
    from flowgrpo_bench.results import BASELINES, Report, read_baselines
    from flowgrpo_bench.tables import compare_table, wide_console

    path = arguments.report or _last_report()
    report = Report.read(path)
    comparisons = compare(report, read_baselines(report.machine["kind"], arguments.baselines or BASELINES))
    console = wide_console()
    console.print(compare_table(comparisons))
    for size, why in report.failed.items():
        console.print(f"gate failed, not timed: {size}: {why}", markup=False)
    return 0 if passed(report, comparisons) else 1


def _last_report() -> Path:
    reports = sorted(DEFAULT_OUT.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise FileNotFoundError(f"no report in {DEFAULT_OUT}; run `bench run` first, or name one")
    return reports[-1]


def _list(arguments: argparse.Namespace) -> int:
    from flowgrpo_bench.case import all_cases
    from flowgrpo_bench.results import BASELINES

    for case in all_cases():
        kinds = sorted(path.parent.name for path in BASELINES.glob(f"*/{case.name}.json"))
        print(f"{case.name:28} {'/'.join(case.devices):9} baselines: {', '.join(kinds) or 'none':20} {case.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
