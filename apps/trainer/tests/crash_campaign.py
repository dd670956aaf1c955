"""Kills the real trainer around its saves, again and again, and holds every restart to what it promises.

    uv run python apps/trainer/tests/crash_campaign.py FOLDER [--kills 40] [--seed 0]

Run by hand: a life takes a start of Ray. The quickstart with two prompts a rollout, a save after each rollout and
rotation on, is killed with SIGKILL at a random moment inside or around a save: the driver alone, one training rank,
or every process at once. Held: what was committed before the kill is still the newest or was followed by a newer
one; the newest is whole; the next life resumes from it; a life whose rank was killed ends with an error in words.
At the end the run is finished, and its metrics must equal, bit for bit, those of a run that nobody killed.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from flowgrpo_fsdp_actor.checkpoint_files import COMMITTED, CheckpointTree, read_documents

TINY = [
    *("--recipe", "quickstart", "--quiet", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    *("--eval-interval", "0", "--n-samples-per-eval-prompt", "1", "--save-interval", "1", "--rotate-ckpt"),
    *("--max-actor-ckpt-to-keep", "2"),
]
VICTIMS = ("driver", "rank", "everything")
NOT_COMPARED = ("perf/", "reward/score_", "eval/")
LIFE_S = 300.0


class Campaign:
    """One run folder and one save folder that live through all kills."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.tree = CheckpointTree(folder / "save", "t2i")
        self.outcomes: Counter[str] = Counter()

    def command(self, name: str, rollouts: int, resumed: bool) -> list[str]:
        save = self.folder / ("save" if name == "run" else f"save-{name}")
        words = [*TINY, "--num-rollouts", str(rollouts), "--run-dir", str(self.folder / name), "--save", str(save)]
        return [sys.executable, "-m", "flowgrpo_trainer.main", *words, *(["--load", str(save)] if resumed else [])]

    def life(self, number: int) -> None:
        """Starts the trainer, kills a victim around a save, and checks what is left."""
        before = self.newest()
        log = self.folder / f"life-{number:03d}.log"
        with open(log, "w") as output:
            trainer = subprocess.Popen(
                self.command("run", 10**6, resumed=before >= 0), stdout=output, stderr=subprocess.STDOUT
            )
        self.wait_for_a_commit(trainer, before)
        victim = self.random.choice(VICTIMS)
        processes = self.processes(trainer, victim)
        moment = self.wait_for_a_moment(trainer)
        seen = self.newest()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        unfinished = any(not (path / COMMITTED).exists() for path in self.tree.folder.glob("iter_*"))
        code = trainer.wait(120)
        said = log.read_text()
        if victim == "rank":
            assert code == 1, f"life {number}: exit code {code} after a rank was killed"
            assert "trainer: " in said.splitlines()[-1] or "trainer: " in said, f"life {number}: no word of error"
        if before >= 0:
            resumed = [line for line in said.splitlines() if line.startswith("resumed from ")]
            assert len(resumed) == 1, f"life {number} did not say that it resumed:\n{said[-2000:]}"
            assert int(resumed[0].rpartition("_")[2]) >= before, f"life {number} went back: {resumed[0]}"
        newest = self.newest()
        assert newest >= seen >= before, f"life {number}: {seen} was committed, {newest} is left"
        read_documents(self.tree.iteration(newest))
        self.outcomes[f"{victim}, {'inside' if unfinished else 'between'} saves"] += 1
        print(f"life {number}: {moment}, {victim} killed at {seen}, left {newest}, committed {self.tree.committed()}")
        if self.random.random() < 0.5:  # otherwise the next life begins while the last one's workers still end
            wait_for_ray_to_end()

    def wait_for_a_commit(self, trainer: subprocess.Popen, before: int) -> None:
        """A life must get somewhere, or the campaign would not."""
        deadline = time.monotonic() + LIFE_S
        while self.newest() <= before:
            assert trainer.poll() is None, "the trainer ended by itself"
            assert time.monotonic() < deadline, f"no checkpoint within {LIFE_S:g} s"
            time.sleep(0.01)

    def wait_for_a_moment(self, trainer: subprocess.Popen) -> str:
        """Returns at the moment of the kill: inside a save more often than not."""
        deadline = time.monotonic() + LIFE_S
        if self.random.random() < 0.3:
            time.sleep(wait := self.random.uniform(0.0, 2.0))
            return f"{wait:.2f} s after a commit"
        seen = {path.name for path in self.tree.folder.glob("iter_*")}
        while not {path.name for path in self.tree.folder.glob("iter_*")} - seen:
            assert trainer.poll() is None, "the trainer ended by itself"
            assert time.monotonic() < deadline, f"no save begins within {LIFE_S:g} s"
            time.sleep(0.0005)
        time.sleep(wait := self.random.uniform(0.0, 0.06))
        return f"{1e3 * wait:.0f} ms after a save began"

    def processes(self, trainer: subprocess.Popen, victim: str) -> list[psutil.Process]:
        driver = psutil.Process(trainer.pid)
        family = driver.children(recursive=True)
        ranks = [p for p in family if "ray::ActorWorker" in " ".join(command_of(p))]
        assert ranks, "no training rank was found"
        return {"driver": [driver], "rank": ranks[:1], "everything": [driver, *family]}[victim]

    def newest(self) -> int:
        return (self.tree.committed() or [-1])[-1]

    def finish(self) -> None:
        """One more life to the end, and a run that nobody killed: the same curve."""
        wait_for_ray_to_end()
        rollouts = self.newest() + 2
        subprocess.run(self.command("run", rollouts, resumed=True), check=True, timeout=600)
        subprocess.run(self.command("whole", rollouts, resumed=False), check=True, timeout=3600)
        killed, whole = (list(curve(self.folder / name)) for name in ("run", "whole"))
        assert len(whole) == rollouts
        assert killed == whole, "the killed run's metrics are not those of the run that was left alone"
        print(f"{rollouts} rollouts: the curve of the killed run is that of the run left alone, bit for bit")


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for_ray_to_end() -> None:
    """Until no worker of a killed life is left."""
    for _ in range(600):
        if not any("ray::ActorWorker" in " ".join(command_of(p)) for p in psutil.process_iter()):
            return
        time.sleep(0.1)
    raise TimeoutError("workers of a killed trainer are still there after a minute")


def curve(run: Path) -> Iterator[dict[str, float]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield {k: v for k, v in json.loads(line)["metrics"].items() if not k.startswith(NOT_COMPARED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    campaign = Campaign(arguments.folder.absolute(), arguments.seed)
    for number in range(arguments.kills):
        campaign.life(number)
    print(f"{arguments.kills} kills: {dict(campaign.outcomes)}", flush=True)
    campaign.finish()


if __name__ == "__main__":
    main()
