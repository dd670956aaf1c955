"""Draws docs/quickstart-seeds.svg from finished runs, and prints the rows of the README's table.

uv run python docs/quickstart_seeds.py RUN_FOLDER RUN_FOLDER ...
"""

import sys
from pathlib import Path

from flowgrpo_trainer.report.curves import Series, curves_svg
from flowgrpo_trainer.run_folder import RunFolder

TITLE = "Reward of the quickstart, three seeds: training (mean of ten rollouts) and held-out (points)"
WINDOW = 10


def main(folders: list[str]) -> None:
    """One colour a run: its training reward as a line, its evaluations as points."""
    series = []
    for color, folder in enumerate(folders):
        run = RunFolder(Path(folder))
        rollout = run.read_settings()["settings"]["rollout"]
        name = f"--rollout-seed {rollout['rollout_seed']} --generation-seed {rollout['generation_seed']}"
        rewards = [record.metrics["reward/mean"] for record in run.read_metrics()]
        means = [_mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
        series.append(Series(name=name, x=range(len(means)), y=means, color=color))
        held_out = [(e.step, [s for samples in e.sets.values() for s in samples]) for e in run.read_evals()]
        points = [_mean([s.reward for s in samples]) for _, samples in held_out]
        series.append(
            Series(name=name, x=[step for step, _ in held_out], y=points, kind="points", color=color, legend=False)
        )
        correct = [f"{_mean([bool(s.correct) for s in samples]):.0%}" for _, samples in held_out]
        print(name, "| correct", *correct, "| reward", *(f"{point:.2f}" for point in points))
    svg = curves_svg(series, TITLE, y_label="reward (match)", width=760, height=360)
    Path(__file__).with_name("quickstart-seeds.svg").write_text(svg + "\n")


def _mean(values: list) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main(sys.argv[1:])
